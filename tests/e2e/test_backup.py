"""Goal: after the loss of a whole cluster its backup has every message and all progress: on another
cluster, with other brokers, each message is handled that was not, and none twice.

Method: the drill. A real cluster with a producer and members that run throughout. Some handlers
fail, so that messages wait for their retry; one handler hangs while later messages of its queue are
acknowledged. Snapshots are taken by the command under load, then a last one. The cluster is given
up, and the backup restored into an empty one. The ledger is what the handlers have noted.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.records import Message
from batonmq._producer.producer import Producer
from batonmq.admin.access import AccessControl, Role, RoleGrant
from batonmq.admin.admin import Admin
from batonmq.admin.backup_store import open_backup_store
from batonmq.admin.backup_writer import read_backup_manifest
from batonmq.admin.resets import Resets
from tests.cli.baton import BATON, CommandResult
from tests.support.cluster import local_cluster
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

TOPIC, GROUP, QUEUES = "orders", "workers", 4
SCHEDULED = 5
HELD = 37
"""Number of the message whose handler hangs at the first cluster."""


class Ledger:
    """What was sent, and what the handlers have handled, over both clusters."""

    def __init__(self) -> None:
        self.sent: set[int] = set()
        self.handled: Counter[int] = Counter()
        self.failed: set[int] = set()
        self.holds, self.stands_still = True, False

    async def handle(self, message: ReceivedMessage) -> None:
        """Handle a message; a few fail once, and one hangs."""
        number = int(message.body)
        if self.stands_still:
            await asyncio.Event().wait()
        if number % 101 == 7 and number not in self.failed:
            self.failed.add(number)
            raise RuntimeError(f"message {number} fails once")
        if number == HELD and self.holds:
            await asyncio.Event().wait()
        self.handled[number] += 1

    async def send(self, nameserver: str, stop: asyncio.Event) -> None:
        """Send numbers until `stop`, in steady traffic."""
        number = max(self.sent, default=-1) + 1
        async with Producer(nameserver) as producer:
            while not stop.is_set():
                pending = {
                    n: await producer.submit(TOPIC, Message(b"%d" % n), ordering_key=str(n))
                    for n in range(number, number + 20)
                }
                for n, receipt in pending.items():
                    await receipt
                    self.sent.add(n)
                number += 20
                await asyncio.sleep(0.02)

    @asynccontextmanager
    async def members(self, nameserver: str, *names: str) -> AsyncIterator[None]:
        """Run members of the group during the block."""
        settings = ConsumerSettings(
            consume_from="first",
            commit_interval_ms=200,
            queue_concurrency=8,
            handle_timeout_ms=None,
            drain_timeout_ms=500,
            handle_signals=False,
        )

        async def run(name: str) -> None:
            async with Consumer(
                nameserver, GROUP, {TOPIC: "*"}, settings, client_id=name
            ) as consumer:
                await consumer.run(self.handle)

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(name)) for name in names]
            yield
            for task in running:
                task.cancel()

    async def proceed(self, count: int) -> None:
        """Wait until `count` more messages are sent and handled."""
        sent, handled = len(self.sent) + count, len(self.handled) + count
        await until(lambda: len(self.sent) >= sent and len(self.handled) >= handled, timeout_s=60)


async def baton(nameserver: str, *words: str) -> CommandResult:
    process = await asyncio.create_subprocess_exec(
        *BATON,
        *("--nameserver", nameserver, "--format", "json"),
        *words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = await process.communicate()
    return CommandResult(process.returncode or 0, out.decode(), err.decode())


async def snapshot(nameserver: str, place: str) -> dict[str, Any]:
    done = await baton(nameserver, "backup", "create", place)
    assert done.code == 0, done.err
    (item,) = json.loads(done.out)
    assert isinstance(item, dict)
    return item


async def is_acknowledged(admin: Admin, ledger: Ledger) -> bool:
    """Return whether each handled message is acknowledged, and each failed one is sent back."""
    acked = sum(one.committed_offset + one.acked_count for one in await admin.progress(GROUP))
    return acked == ledger.handled.total() + len(ledger.failed)


async def is_read(admin: Admin, but: int = 0) -> bool:
    """Return whether all messages of the topic but some are acknowledged."""
    progress = [one for one in await admin.progress(GROUP) if one.queue.queue.topic == TOPIC]
    acked = sum(one.committed_offset + one.acked_count for one in progress)
    detail = await admin.describe_topic(TOPIC)
    return acked == sum(one.next_offset or 0 for one in detail.queues) - but


async def fill(admin: Admin, nameserver: str) -> None:
    """Store what is not traffic: a grant, a paused group, and messages for later."""
    await AccessControl(admin).grant("app", RoleGrant(Role.CONSUME, f"topic:{TOPIC}"))
    await admin.update_group("reports", policy="staged")
    await admin.pause_group("reports", "ann", "end of the month")
    await admin.create_topic("later", 1, retention_ms=86_400_000)
    async with Producer(nameserver) as producer:
        for number in range(SCHEDULED):
            await producer.send("later", b"%d" % number, delay_ms=3_600_000)


async def lose_a_cluster(data_dir: Path, ledger: Ledger, place: str) -> list[dict[str, Any]]:
    """Run a cluster under load, take three snapshots, and give it up; return the snapshots."""
    async with local_cluster(data_dir) as lost, Admin(lost.nameserver) as admin:
        await admin.create_topic(TOPIC, QUEUES)
        await fill(admin, lost.nameserver)
        stop = asyncio.Event()
        async with ledger.members(lost.nameserver, "first", "second"), asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(ledger.send(lost.nameserver, stop))
            await ledger.proceed(300)
            full = await snapshot(lost.nameserver, place)
            await ledger.proceed(300)
            more = await snapshot(lost.nameserver, place)
            stop.set()
            await sending
            await until(lambda: is_read(admin, but=1), timeout_s=60)
            # The ledger ends here: what it has is acknowledged, and nothing more is handled.
            ledger.stands_still = True
            await until(lambda: is_acknowledged(admin, ledger), timeout_s=60)
            last = await snapshot(lost.nameserver, place)
    return [full, more, last]


async def check_snapshots(ledger: Ledger, place: str, snapshots: list[dict[str, Any]]) -> None:
    last = snapshots[-1]
    assert [one["number"] for one in snapshots] == [1, 2, 3]
    assert sum(one["new_byte_count"] for one in snapshots) < 2 * last["byte_count"], (
        "an incremental snapshot has copied what the backup had"
    )
    assert last["message_count"] >= len(ledger.sent)
    manifest = await read_backup_manifest(open_backup_store(place))
    (workers,) = (one for one in manifest.groups if one.name == GROUP)
    assert any(one.acked for one in workers.progress), "no message was acknowledged out of order"
    assert manifest.scheduled_count >= SCHEDULED


async def restore(nameserver: str, admin: Admin, place: str, message_count: int) -> None:
    """Verify and restore the backup by the command, and refuse to do it twice."""
    for number in ("1", "2", "3"):
        verified = await baton(nameserver, "backup", "verify", place, "--snapshot", number)
        assert verified.code == 0, verified.err
    command = ("backup", "restore", place)
    shown = await baton(nameserver, *command, "--dry-run")
    assert shown.code == 0, shown.err
    assert shown.json["message_count"] == message_count
    assert all(one.name.startswith("BATON_SYS_") for one in await admin.list_topics())
    done = await baton(nameserver, *command, "--yes")
    assert done.code == 0, done.err
    again = await baton(nameserver, *command, "--yes")
    assert again.code == 1
    assert "NOT_EMPTY" in again.err


@pytest.mark.long
async def test_drill_restores_a_lost_cluster(tmp_path: Path) -> None:
    ledger, place = Ledger(), str(tmp_path / "backup")
    snapshots = await lose_a_cluster(tmp_path / "lost", ledger, place)
    await check_snapshots(ledger, place, snapshots)
    assert HELD not in ledger.handled
    ledger.holds = ledger.stands_still = False
    async with (
        local_cluster(tmp_path / "new", brokers=2) as new,
        Admin(new.nameserver) as admin,
    ):
        await restore(new.nameserver, admin, place, snapshots[-1]["message_count"])
        assert {queue.broker for queue in (await admin.describe_topic(TOPIC)).topic.queues} == {
            "broker-0",
            "broker-1",
        }
        assert (await admin.describe_group("reports")).pause is not None
        (app,) = await AccessControl(admin).list("app")
        assert app.grants == (RoleGrant(Role.CONSUME, f"topic:{TOPIC}"),)
        async with ledger.members(new.nameserver, "third"):
            await until(lambda: set(ledger.handled) == ledger.sent, timeout_s=90)
            await until(lambda: is_read(admin), timeout_s=60)
        rescued = await snapshot(new.nameserver, str(tmp_path / "of-the-new"))
        assert rescued["scheduled_count"] == SCHEDULED
        (reset,) = await Resets(admin).history(GROUP)
        assert reset.reason == "restore of snapshot 3"
    assert {n for n, times in ledger.handled.items() if times > 1} == set(), "handled twice"
    assert set(ledger.handled) == ledger.sent, "lost"


async def test_interrupted_restore_goes_on_and_damage_is_found(tmp_path: Path) -> None:
    place = tmp_path / "backup"
    bodies = [b"%d" % number for number in range(2_000)]
    async with local_cluster(tmp_path / "data") as cluster, Admin(cluster.nameserver) as admin:
        await admin.create_topic(TOPIC, 2)
        async with Producer(cluster.nameserver) as producer:
            for start in range(0, len(bodies), 100):
                await producer.send_many(TOPIC, bodies[start : start + 100])
        await snapshot(cluster.nameserver, str(place))
        manifest = await read_backup_manifest(open_backup_store(str(place)))
        damaged = place / manifest.files[-1].name
        content = damaged.read_bytes()
        await admin.delete_topic(TOPIC)

        damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        found = await baton(cluster.nameserver, "backup", "verify", str(place))
        assert found.code == 1
        assert manifest.files[-1].name in found.err
        stopped = await baton(cluster.nameserver, "backup", "restore", str(place), "--yes")
        assert stopped.code == 1
        assert "DATA_LOSS" in stopped.err

        damaged.write_bytes(content)
        restore = ("backup", "restore", str(place), "--yes", "--continue")
        for _ in range(2):  # the second run finds everything done
            done = await baton(cluster.nameserver, *restore)
            assert done.code == 0, done.err
        detail = await admin.describe_topic(TOPIC)
        assert sum(one.next_offset or 0 for one in detail.queues) == len(bodies)
        async with Producer(cluster.nameserver) as producer:
            await producer.send(TOPIC, b"new")
        refused = await baton(cluster.nameserver, *restore)
        assert "that are not of this snapshot" in refused.err
