"""Goal: a mirrored cluster takes over with every message, none of them twice, and with the progress
of the group: nothing is lost, and nothing is handled twice.

Method: two real clusters. A group fails over and back in peace. Then a producer and members of
another group run throughout; some handlers fail once, so that messages wait for their retry, and
some hang while later ones are acknowledged. `baton mirror run` is killed with -9, and so is a
storage service of each cluster. Then the first cluster is given up, the group fails over by the
command, and its members go on in the second one. The ledger is what the handlers have noted, and
the log of the second cluster.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.puller import Puller, PullerSettings
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from batonmq.admin.mirror import Mirror, begin_standby, fail_over
from batonmq.errors import GroupInUse, InvalidArgument, TopicExists
from batonmq_server.local.cluster import LocalCluster
from tests.cli.baton import BATON, CommandResult
from tests.e2e.mirrored_work import FAILS_ONCE, GROUP, QUEUES, TOPIC, MirroredWork
from tests.support.cluster import local_cluster
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

INVOICES, CLERKS = "invoices", "clerks"
HELD = frozenset({31, 118})


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


@asynccontextmanager
async def running_mirror(source: str, target: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the command during the block, and kill it with -9 at the end."""
    words = (
        "mirror",
        "run",
        TOPIC,
        "--to",
        target,
        "--group",
        GROUP,
        "--report",
        "1",
        "--progress",
        "0.5",
    )
    process = await asyncio.create_subprocess_exec(
        *BATON,
        *("--nameserver", source, "--format", "json", *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline(), "the mirror has ended"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def stored_messages(nameserver: str, count: int) -> list[ReceivedMessage]:
    """Return all messages of the topic."""
    found: list[ReceivedMessage] = []
    async with Puller(nameserver, settings=PullerSettings(consume_from="first")) as puller:
        await puller.assign(await puller.queues(TOPIC))
        while len(found) < count:
            polled = await puller.poll(timeout_ms=10_000, count_max=1_000)
            assert polled, f"only {len(found)} of {count} messages are there"
            found += [message for part in polled.values() for message in part]
        assert not await puller.poll(timeout_ms=300), "there are more"
    return found


async def handled_count(admin: Admin) -> int:
    """Return how many messages of the topic the group has handled."""
    return sum(
        one.committed_offset + one.acked_count
        for one in await admin.progress(GROUP)
        if one.queue.queue.topic == TOPIC
    )


async def work_under_fire(first: LocalCluster, second: LocalCluster, work: MirroredWork) -> None:
    """Mirror under load; kill the mirror, and a storage service of each cluster."""
    stop = asyncio.Event()
    async with (
        Admin(first.nameserver) as here,
        Admin(second.nameserver) as there,
        asyncio.TaskGroup() as tasks,
        work.members(first.nameserver, "first", "second"),
    ):
        await here.create_topic(TOPIC, QUEUES, retention_ms=86_400_000)
        sending = tasks.create_task(work.send(first.nameserver, stop))
        await work.proceed(50)
        async with running_mirror(first.nameserver, second.nameserver):
            await work.proceed(50)
        async with running_mirror(first.nameserver, second.nameserver):
            await first.kill("storage")
            await first.serving("storage")
            await work.proceed(50)
            await second.kill("storage")
            await second.serving("storage")
            await work.proceed(50)
            stop.set()
            await sending
            # What is sent back counts as acknowledged here, and as not handled there.
            await until(lambda: acked(here, len(work.sent) - len(HELD)), 60)
            work.paused = True
            await until(lambda: acked(there, len(work.handled)), 60)
            status = await Mirror(here, there, [TOPIC], [GROUP]).status()
            assert [one.lag for one in status.queues] == [0] * QUEUES
            (group,) = status.groups
            assert (group.state, group.target_lag > 0) == ("standby", True)


async def acked(admin: Admin, count: int) -> bool:
    return await handled_count(admin) == count


async def produce(nameserver: str, *bodies: bytes) -> None:
    async with Producer(nameserver) as producer:
        await producer.send_many(INVOICES, bodies, ordering_key="one")


async def handle_all(nameserver: str, seen: list[bytes], count: int, name: str) -> None:
    """Handle messages as a member until there are `count`."""
    work = MirroredWork(topic=INVOICES, group=CLERKS)

    async def note(message: ReceivedMessage) -> None:
        seen.append(message.body)

    work.handle = note  # type: ignore[method-assign]
    async with work.members(nameserver, name):
        await until(lambda: len(seen) >= count)


async def fail_over_and_back(a: LocalCluster, b: LocalCluster, config: Path) -> None:
    """Let a group go on in the other cluster and come back; no message returns or is repeated."""
    async with Admin(a.nameserver) as here, Admin(b.nameserver) as there:
        seen: list[bytes] = []
        await here.create_topic(INVOICES, 1)
        await produce(a.nameserver, b"a1", b"a2", b"a3")
        await handle_all(a.nameserver, seen, 3, "first")
        await produce(a.nameserver, b"a4")
        await show_plan(a.nameserver, b.nameserver, config)
        assert [one.name for one in await there.list_groups()] == []
        forth = Mirror(here, there, [INVOICES], [CLERKS])
        assert (await forth.run(once=True)).copied_count == 4
        await fail_over(there, CLERKS, by="ann")
        await produce(b.nameserver, b"b1")
        await handle_all(b.nameserver, seen, 5, "second")
        await refuse_what_can_not_be_mirrored(here, there, a)

        words = ("mirror", "run", INVOICES, "--to", b.nameserver, "--group", CLERKS, "--once")
        in_use = await baton(a.nameserver, *words)
        assert in_use.code == 0, in_use.err
        assert CLERKS in in_use.out
        await begin_standby(here, CLERKS, by="ann")
        back = await Mirror(there, here, [INVOICES], [CLERKS]).run(once=True)
        assert (back.copied_count, back.skipped_count, back.problems) == (1, 4, ())
        await produce(b.nameserver, b"b2")
        assert (await Mirror(there, here, [INVOICES], [CLERKS]).run(once=True)).copied_count == 1
        await fail_over(here, CLERKS, by="ann")
        await handle_all(a.nameserver, seen, 6, "third")
        assert seen == [b"a1", b"a2", b"a3", b"a4", b"b1", b"b2"]
        again = await Mirror(here, there, [INVOICES]).run(once=True)
        assert (again.copied_count, again.skipped_count) == (0, 2)


def write_context(config: Path, nameserver: str) -> None:
    config.write_text(f'[contexts.other]\nnameserver = "{nameserver}"\n')


async def show_plan(source: str, target: str, config: Path) -> None:
    """Ask for the plan by the command, with a context for the target."""
    write_context(config, target)
    words = ("mirror", "run", INVOICES, "--to", "other", "--group", CLERKS, "--dry-run")
    shown = await baton(source, "--config", str(config), *words)
    assert shown.code == 0, shown.err
    (plan,) = shown.json
    assert (plan["new_topics"], plan["new_standbys"]) == ([INVOICES], [CLERKS])
    assert (plan["message_count"], plan["problems"]) == (4, [])


async def refuse_what_can_not_be_mirrored(here: Admin, there: Admin, a: LocalCluster) -> None:
    with pytest.raises(InvalidArgument, match="is not a standby"):
        await fail_over(there, CLERKS, by="ann")
    async with MirroredWork(topic=INVOICES, group=CLERKS).members(a.nameserver, "live"):

        async def has_member() -> bool:
            return bool((await here.describe_group(CLERKS)).members)

        await until(has_member)
        with pytest.raises(GroupInUse, match="live"):
            await begin_standby(here, CLERKS, by="ann")
    await here.create_topic("wide", 3)
    await there.create_topic("wide", 2)
    with pytest.raises(TopicExists, match="has 2 writable queues; in the source it has 3"):
        await Mirror(here, there, ["wide"]).run(once=True)
    with pytest.raises(InvalidArgument, match="source and target are one cluster, first"):
        await Mirror(here, here, [INVOICES]).run(once=True)


@pytest.mark.long
async def test_group_fails_over_and_back_then_the_cluster_is_lost_and_its_mirror_goes_on(
    tmp_path: Path,
) -> None:
    work = MirroredWork(HELD)
    async with local_cluster(tmp_path / "b", cluster="second") as second:
        async with local_cluster(tmp_path / "a", cluster="first") as first:
            await fail_over_and_back(first, second, tmp_path / "config.toml")
            await work_under_fire(first, second, work)
        messages = await stored_messages(second.nameserver, len(work.sent))
        assert Counter(int(one.body) for one in messages) == Counter(work.sent), "mirrored twice"
        for one in messages:
            number = int(one.body)
            assert (one.tag, one.keys) == ("tag", (f"key-{number}",))
            assert one.properties["number"] == str(number)
        by_key: dict[int, list[int]] = {}
        for one in messages:
            by_key.setdefault(int(one.body) % 50, []).append(int(one.body))
        assert all(numbers == sorted(numbers) for numbers in by_key.values())
        async with Admin(second.nameserver) as admin:
            detail = await admin.describe_topic(TOPIC)
            assert detail.topic.retention_ms == 86_400_000
            group = await admin.describe_group(GROUP)
            assert group.pause is not None
            done = await baton(second.nameserver, "mirror", "failover", GROUP)
            assert done.code == 0, done.err
            work.paused, work.held = False, frozenset()
            async with work.members(second.nameserver, "third"):
                await until(lambda: set(work.handled) == work.sent, timeout_s=60)
    assert len(work.failed) >= len(work.sent) // 100 - 1, "too few messages waited for a retry"
    assert all(number % 100 == FAILS_ONCE for number in work.failed)
    assert {n for n, times in work.handled.items() if times > 1} == set(), "handled twice"
    assert set(work.handled) == work.sent, "lost"
