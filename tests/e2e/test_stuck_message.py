"""Goal: operators see a stuck message, and after a crash only this message is redelivered.

Method: the worker and the commands of docs/how-to/stuck-message.md, in their order, each repeated
until it prints the output of the page, except ids, times and the generation. Then the same with
acks that are never sent: exactly the messages without an ack at offsets are redelivered. Leases of
10 s make the hand-over after the kill fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batonmq.admin.admin import Admin
from tests.docs.terminal import commands, terminal
from tests.e2e.worker_group import send, started_again, worker_group
from tests.support.cluster import local_cluster
from tests.support.conditions import until
from tools.docs.pages import ROOT, Page

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

PAGE = Path("docs/how-to/stuck-message.md")
ADDRESS = "127.0.0.1:9876"
LEASES: dict[str, Any] = {
    "lockmgr": {"lock_lease_ms": 10_000},
    "nameserver": {"member_lease_ms": 10_000, "heartbeat_interval_ms": 2_000},
}


@pytest.mark.long
async def test_documentation_matches_the_behavior(tmp_path: Path) -> None:
    page = Page(PAGE, (ROOT / PAGE).read_text())
    (program,) = page.blocks("python")
    assert ADDRESS in program
    async with (
        local_cluster(tmp_path / "cluster", **LEASES) as cluster,
        terminal(tmp_path, cluster.nameserver) as opened,
    ):
        (tmp_path / "worker.py").write_text(program.replace(ADDRESS, cluster.nameserver))
        page_commands = list(commands(page))
        for command, shown in page_commands:
            await opened.run(command, shown)
    first, second = ((tmp_path / f"worker-{n}.txt").read_text().splitlines() for n in (1, 2))
    assert sorted(map(int, first)) == list(range(1, 2_201))
    assert second == ["2101 again"]
    for part in ("UNACKED", "HEAD_OF_LINE", "LAG-SECONDS", "kill -9"):
        assert any(part in command + shown for command, shown in page_commands)


@pytest.mark.long
async def test_messages_without_a_sent_ack_are_redelivered_flagged_after_a_crash(
    tmp_path: Path,
) -> None:
    async with (
        local_cluster(tmp_path / "cluster", **LEASES) as cluster,
        Admin(cluster.nameserver) as admin,
        worker_group(cluster.nameserver, "parcels", tmp_path) as workers,
    ):
        await admin.create_topic("parcels", 1)
        await send(cluster.nameserver, "parcels", range(1, 2_201))
        victim = await workers.join("victim", parallel=20, stick=2_101, commit_ms=600_000)
        everything = set(range(1, 2_201))
        await until(lambda: workers.done() == everything - {2_101}, timeout_s=60)
        # The pending long poll returns these messages. The next long poll carries the acks of the
        # earlier messages and waits; the acks of these messages are not sent before it ends.
        await send(cluster.nameserver, "parcels", range(2_201, 2_221))
        everything |= set(range(2_201, 2_221))
        await until(lambda: workers.done() == everything - {2_101}, timeout_s=60)
        victim.kill()
        await victim.process.ended()
        (progress,) = await admin.progress(workers.group)
        durable = set(range(progress.committed_offset))
        durable.update(
            offset for run in progress.acked for offset in range(run.first_offset, run.next_offset)
        )
        missing = everything - {offset + 1 for offset in durable}
        assert missing > {2_101}, "every ack was stored before the kill"

        successor = await workers.join("heir", parallel=20)
        await until(lambda: workers.done() == everything, timeout_s=60)
        await send(cluster.nameserver, "parcels", [2_221])
        await until(lambda: 2_221 in workers.done())
        again = {later.number: later.redelivered for _, later in started_again(workers.handlings())}
        assert again == dict.fromkeys(missing, True)
        assert {handling.number for handling in successor.handlings()} == missing | {2_221}
