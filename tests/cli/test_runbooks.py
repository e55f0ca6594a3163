"""Goal: every command in a runbook works as it is written, with its placeholders filled in.

Method: `baton up` is a process; a topic has messages, one of which became a dead letter of a group.
Each `baton` command of the pages runs against it; its status is 0, and its output contains
the expected text. Other programs run where they need no other machine; the rest is listed with the
reason.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from batonmq._blocking import BlockingProducer
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from tests.cli.baton import RunningCluster, up
from tests.storage.batches import batch
from tests.storage.test_fsck import node_in, write
from tests.support.conditions import until_now

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
RUNBOOKS = Path(__file__).parents[2] / "docs" / "how-to" / "runbooks"
PAGES = "\n".join(page.read_text() for page in sorted(RUNBOOKS.glob("*.md")))
COMMANDS = sorted(set(re.findall(r"`baton ([^`]+)`", PAGES)))
OTHERS = set(re.findall(r"`((?:kubectl|etcdctl|openssl|python) [^`]+)`", PAGES))
RUN_OTHERS = (
    "python -m batonmq_server.SERVICE --print-config",
    "openssl x509 -noout -enddate -in FILE",
    "openssl x509 -in FILE -out NEW",
    r"openssl crl2pkcs7 -nocrl -certfile FILE \| openssl pkcs7 -print_certs -noout",
)
NOT_RUN = {
    "kubectl -n baton describe certificate NAME": "needs Kubernetes with cert-manager",
    "kubectl -n baton describe pod POD": "needs Kubernetes",
    "kubectl -n baton get pods -o wide": "needs Kubernetes",
    "kubectl -n baton logs POD --previous": "needs Kubernetes",
    "etcdctl alarm disarm": "etcdctl is no part of the installation; the alarm is tested by calls",
    "etcdctl compact REVISION": "etcdctl is no part of the installation",
    "etcdctl defrag --cluster": "etcdctl is no part of the installation",
    "etcdctl endpoint status --cluster -w table": "etcdctl is no part of the installation",
    "etcdctl endpoint status -w json": "etcdctl is no part of the installation",
}
"""The commands that this test does not run, and why."""
ENDLESS = ("topic stats TOPIC --watch",)
"""Commands that end at Ctrl-C only."""
ELECT = "cluster elect NODE --service S --set NAME"
"""Needs a replica set of several nodes; with these it runs in
tests/nameserver/test_unclean_election.py."""
TOPIC, GROUP, SPARE, BOOKINGS = "orders", "shipping", "spare", "bookings"
NEW_QUEUES = "2"
EXPECTED_TEXTS: Mapping[str, str] = {
    "access token create": "baton_",
    "bench produce": "MSG/S",
    "cluster brokers": "broker-0",
    "cluster replication": "broker-0",
    "cluster status": "lockmgr",
    "debug bundle": "files",
    "dlq": GROUP,
    "dlq show": f"{TOPIC}/broker-0/0@0",
    "fsck": "clean",
    "gateway clients": "LIBRARY",
    "gateway messages": "LEASE-LEFT",
    "group delete": SPARE,
    "group outputs": "remembered outputs",
    "group resets": "reset",
    "group": GROUP,
    "lock release": f"{TOPIC}/broker-0/0 is released; its owner was",
    "lock": GROUP,
    "message": TOPIC,
    "top": TOPIC,
    "topic delete": SPARE,
    "topic": TOPIC,
    "transaction commit": "committed, in queue 0",
    "transaction list": "TRANSACTION",
    "transaction rollback": "rolled back",
}
"""A text that the output contains, by the beginning of the command."""


@dataclass(frozen=True)
class RunbookScene:
    """The cluster, and the values of placeholders."""

    cluster: RunningCluster
    values: Mapping[str, str]

    def arguments(self, command: str) -> list[str]:
        """Return the words of a command with the placeholders filled in."""
        values = dict(self.values)
        if "delete" in command:
            values |= {"TOPIC": SPARE, "GROUP": SPARE}
        if "rollback" in command:
            values["TRANSACTION"] = values["OTHER"]
        filled = [values.get(word, word) for word in shlex.split(command)]
        return (
            [*filled, "--yes"] if "delete" in command else filled
        )  # a terminal would need a confirmation


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """A cluster with a gateway."""
    with up(tmp_path_factory.mktemp("up") / "data", "--gateway", "--gateway-port", "0") as running:
        yield running
        assert running.interrupt() == 0


@pytest.fixture(scope="module")
def scene(
    cluster: RunningCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunbookScene]:
    """A group with a member, a dead letter and a recorded reset; a topic and a group to delete."""
    folder = tmp_path_factory.mktemp("runbooks")
    lines = folder / "lines"
    lines.write_text("1\n")
    for topic in (TOPIC, SPARE, BOOKINGS):
        assert cluster("topic", "create", topic, "--queues", "1").code == 0
        assert cluster("produce", topic, "--file", str(lines)).code == 0
    assert cluster("consume", SPARE, "--group", SPARE).code == 0
    asyncio.run(_fail_once(cluster.nameserver))
    until_now(lambda: cluster("dlq", "show", GROUP).code == 0, timeout_s=60)
    reset = ("group", "reset-offsets", GROUP, "--to-current", "--execute", "--reason", "r")
    assert cluster(*reset).code == 0
    (message,) = cluster(
        *("message", "get", "--topic", TOPIC, "--queue", "0", "--offset", "0"), "--format", "json"
    ).json_lines
    stopped = folder / "stopped"
    with node_in(stopped) as node:
        write(node, batch(b"1"))
        node.checkpointing.run()
    values = {
        "TOPIC": TOPIC,
        "GROUP": GROUP,
        "BROKER": "broker-0",
        "BROKER/ID": "broker-0/0",
        "QUEUE": "0",
        "N": "1",
        "ID": str(message["message_id"]),
        "COUNT": NEW_QUEUES,
        "TIME": "2026-01-31T08:00:00Z",
        "R": "because",
        "FILE.tar.gz": str(folder / "bundle.tar.gz"),
        "DIR": str(stopped),
        "NODE": "broker-0",
        "NAME": "broker-0",
        "S": "storage",
        **_open_transactions(cluster.nameserver),
    }
    with cluster.started("consume", TOPIC, "--group", GROUP, "--follow"):
        until_now(lambda: GROUP in cluster("group", "members", GROUP).out, timeout_s=60)
        yield RunbookScene(cluster, values)


def _open_transactions(nameserver: str) -> dict[str, str]:
    """Leave two transactions open; return their ids by placeholder."""
    values = {}
    with BlockingProducer(nameserver, group="shop") as producer:
        for name in ("TRANSACTION", "OTHER"):
            with producer.transaction(BOOKINGS, b"half") as tx:
                tx.leave_open()
            values[name] = tx.transaction_id
    return values


async def _fail_once(nameserver: str) -> None:
    settings = ConsumerSettings(retries_max=0, consume_from="first")
    consumer = Consumer(nameserver, GROUP, {TOPIC: "*"}, settings)

    def fail(_: ReceivedMessage) -> None:
        consumer.stop()
        raise ValueError("no stock")

    async with consumer:
        await consumer.run(fail)


def test_every_command_of_a_runbook_is_run_or_listed_with_a_reason() -> None:
    assert len(COMMANDS) > 30
    assert {*ENDLESS, ELECT} <= set(COMMANDS)
    assert {*RUN_OTHERS, *NOT_RUN} == OTHERS


@pytest.mark.long
@pytest.mark.parametrize("command", [one for one in COMMANDS if one not in (*ENDLESS, ELECT)])
def test_command_of_a_runbook_works(scene: RunbookScene, command: str) -> None:
    done = scene.cluster(*scene.arguments(command))
    assert done.code == 0, done
    start = max((start for start in EXPECTED_TEXTS if command.startswith(start)), key=len)
    assert EXPECTED_TEXTS[start] in done.out, done


def test_election_without_replicas_is_rejected_with_a_remedy(scene: RunbookScene) -> None:
    refused = scene.cluster(*scene.arguments(ELECT))
    assert refused.code == 1
    assert "replica set broker-0 does not exist" in refused.err
    assert "baton cluster replication" in refused.err


@pytest.mark.parametrize("command", ENDLESS)
def test_endless_command_of_a_runbook_prints_and_ends_at_an_interrupt(
    scene: RunbookScene, command: str
) -> None:
    with scene.cluster.started(*scene.arguments(command)) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the heading
        assert TOPIC in process.stdout.readline().decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@pytest.mark.parametrize("service", ["storage", "offsets", "lockmgr", "nameserver"])
def test_settings_are_printed_by_the_program_of_a_service(service: str) -> None:
    command = RUN_OTHERS[0].replace("SERVICE", service).split()
    env = {f"BATON_{service.upper()}_NODE_ID": "n", "PYTHONPATH": ":".join(sys.path)}
    if service == "storage":
        env["BATON_STORAGE_DATA_DIR"] = "/tmp"
    if service == "offsets":
        env["BATON_OFFSETS_DATA_DIR"] = "/tmp"
    done = subprocess.run(
        [sys.executable, *command[1:]], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert '"node_id": "n"' in done.stdout


@pytest.mark.skipif(
    shutil.which("openssl") is None,
    reason="NOT TESTED: there is no openssl (Debian: apt-get install openssl)",
)
@pytest.mark.parametrize("command", RUN_OTHERS[1:])
def test_openssl_command_of_a_runbook_works(command: str, tmp_path: Path) -> None:
    file, new = tmp_path / "cert.pem", tmp_path / "new.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=baton"
    subprocess.run(
        [*make.split(), "-keyout", str(tmp_path / "key.pem"), "-out", str(file)],
        check=True,
        capture_output=True,
    )
    line = command.replace(r"\|", "|").replace("FILE", str(file)).replace("NEW", str(new))
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"notAfter|CN ?= ?baton", done.stdout) or new.exists()
