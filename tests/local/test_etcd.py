"""Goal: a local etcd keeps data and ports over any restart, and ends with its parent.

Method: real etcd processes on a directory of the test's own, checked over HTTP.
"""

from __future__ import annotations

import base64
import json
import signal
import urllib.request
from pathlib import Path

import pytest

from batonmq_server.local.child_process import NotReady, describe_exit
from batonmq_server.local.etcd import EtcdProcess, is_healthy, version_problem
from tests.support.conditions import until
from tests.support.parent import assert_child_is_killed_with_its_parent

pytestmark = pytest.mark.e2e


def _call(endpoint: str, method: str, **fields: str) -> dict[str, object]:
    encoded = {k: base64.b64encode(v.encode()).decode() for k, v in fields.items()}
    request = urllib.request.Request(
        f"http://{endpoint}/v3/kv/{method}", data=json.dumps(encoded).encode()
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        answer = json.loads(response.read())
    assert isinstance(answer, dict)
    return answer


async def test_data_and_port_of_etcd_survive_a_kill(tmp_path: Path) -> None:
    async with EtcdProcess(tmp_path) as etcd:
        first = etcd.endpoint
        _call(first, "put", key="k", value="v")
        etcd.child.kill_now()
        assert etcd.child.returncode == -signal.SIGKILL
    async with EtcdProcess(tmp_path) as etcd:
        assert etcd.endpoint == first
        assert _call(first, "range", key="k")["count"] == "1"


@pytest.mark.parametrize(
    ("printed", "problem"),
    [
        ("etcd Version: 3.5.0", "etcd 3.5.0 can lose"),
        ("etcd Version: 3.5.5", "etcd 3.5.5 can lose"),
        ("etcd Version: 3.4.23", ""),
        ("etcd Version: 3.5.6", ""),
        ("etcd Version: 3.6.16", ""),
        ("nonsense", ""),
    ],
)
def test_version_that_can_lose_writes_is_a_problem(
    printed: str, problem: str, tmp_path: Path
) -> None:
    program = tmp_path / "etcd"
    program.write_text(f"#!/bin/sh\necho '{printed}'\n")
    program.chmod(0o755)
    assert version_problem(program).startswith(problem)
    assert bool(version_problem(program)) == bool(problem)


async def test_shared_etcd_is_healthy(etcd_endpoint: str) -> None:
    await until(lambda: is_healthy(etcd_endpoint))


async def test_start_on_damaged_data_fails_with_the_exit_status(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a directory")
    with pytest.raises(NotReady, match="exit code"):
        await EtcdProcess(tmp_path).start()


async def test_etcd_is_killed_with_its_parent(tmp_path: Path) -> None:
    program = """
import asyncio, pathlib, sys
from batonmq_server.local.etcd import EtcdProcess
async def main():
    async with EtcdProcess(pathlib.Path(sys.argv[1])) as etcd:
        print(etcd.child.pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    await assert_child_is_killed_with_its_parent(program, str(tmp_path))


def test_exit_status_is_described() -> None:
    assert describe_exit(-9) == "SIGKILL"
    assert describe_exit(3) == "exit code 3"
