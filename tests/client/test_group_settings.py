"""Settings of a group that an operator changes while members run, on a real cluster.

Goal: members follow at once. A pause loses and repeats nothing; a reset replays everything from its
offset; a group without ownership delivers and commits without locks; a replaced subscription
applies to members that did not request it; a staged one applies when the last old member has left.
Method: real services; each test has its own topic and group; handlers wait for events of the test.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from random import Random
from typing import Literal

import pytest

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from batonmq._connection.directory import Directory
from batonmq.admin.admin import Admin
from tests.client.group import Scene, handle_all, scene
from tests.support.conditions import until

pytestmark = pytest.mark.e2e


async def reset(at: Scene, to: int, op_id: str = "r1") -> None:
    """Reset the group on queue 0 of its topic."""
    queue = queue_pb2.QueueRef(topic=at.topic, broker="broker-0", queue_id=0)
    item = offsets_pb.ResetItem(
        queue=queue_pb2.GroupQueue(group=at.group, queue=queue), to_offset=to
    )
    request = offsets_pb.ResetRequest(op_id=op_id, by="test", reason="replay", items=[item])
    directory = Directory(at.nameserver, Random(1))
    stub = await directory.offsets(at.group)
    (outcome,) = (await stub.Reset(request, timeout=10)).outcomes
    assert outcome.HasField("step")
    await directory.close()


async def test_pause_stops_deliveries_and_nothing_else_until_the_group_is_resumed(
    nameserver: str,
) -> None:
    async with scene(nameserver) as at, Admin(nameserver) as admin:
        await at.send([str(n) for n in range(20)])
        async with handle_all(at, "a") as consumer:
            await until(lambda: len(at.handled) == 20)
            await admin.pause_group(at.group, "ann", "deploy")
            await until(lambda: consumer._session.view.paused)
            await at.send([str(n) for n in range(20, 40)])
            await until(lambda: _committed(at, 20))
            other = Scene(nameserver, at.topic)
            async with handle_all(other, "witness"):
                await until(lambda: len(other.handled) == 40)
            assert len(at.handled) == 20
            assert len(consumer.assignment) == 4
            await admin.resume_group(at.group, "ann")
            await until(lambda: len(at.handled) == 40)
        assert set(at.bodies.values()) == {1}
        assert not any(one.redelivered for one in at.handled)
        assert [e.kind for _, e in at.events].count("granted") == 4


async def _handled_and_committed(at: Scene, count: int) -> None:
    await until(lambda: len(at.handled) == count)
    await until(lambda: _committed(at, count))


async def _committed(at: Scene, count: int) -> bool:
    async with Admin(at.nameserver) as admin:
        rows = (await admin.group_progress(at.group)).queues
    return sum(row.committed_offset or 0 for row in rows) == count


async def test_reset_under_a_running_member_replays_flagged_messages(
    nameserver: str,
) -> None:
    async with scene(nameserver, queue_count=1) as at:
        await at.send([str(n) for n in range(5)], queue_id=0)
        async with handle_all(at, "a"):
            await until(lambda: len(at.handled) == 5)
            await until(lambda: _committed(at, 5))
            await reset(at, to=2)
            await at.send(["5"], queue_id=0)
            await until(lambda: at.bodies["5"])
            assert at.by("a") == ["0", "1", "2", "3", "4", "2", "3", "4", "5"]
            assert [one.body for one in at.handled if one.redelivered] == ["2", "3", "4"]
            await until(lambda: _committed(at, 6))


async def test_members_without_ownership_share_and_commit_without_locks(
    nameserver: str,
) -> None:
    async with scene(nameserver) as at, Admin(nameserver) as admin:
        await admin.update_group(at.group, ownership="off")
        await at.send([str(n) for n in range(40)])
        async with handle_all(at, "a") as a:
            await until(lambda: len(at.handled) == 40)
            await until(lambda: _committed(at, 40))
            async with handle_all(at, "b") as b:
                await until(lambda: len(a.assignment) == len(b.assignment) == 2)
                await at.send([str(n) for n in range(40, 80)])
                await until(lambda: set(at.bodies) == {str(n) for n in range(80)})
                await until(lambda: _committed(at, 80))
        assert await admin.list_locks(at.group) == ()
        assert {event.token for _, event in at.events} == {0}
        async with handle_all(at, "c") as c:
            await until(lambda: len(c.assignment) == 4)
            await at.send(["last"])
            await until(lambda: at.bodies["last"])
        assert at.by("c") == ["last"]


async def test_group_switches_ownership_while_it_has_no_member(
    nameserver: str,
) -> None:
    async with scene(nameserver, queue_count=1) as at, Admin(nameserver) as admin:
        modes: list[Literal["on", "off"]] = ["off", "on", "off", "on"]
        for number, mode in enumerate(modes):
            await admin.update_group(at.group, ownership=mode)
            await at.send([str(number)], queue_id=0)
            async with handle_all(at, f"m{number}"):
                await _handled_and_committed(at, number + 1)
        assert dict(at.bodies) == {"0": 1, "1": 1, "2": 1, "3": 1}


async def test_replaced_subscription_applies_to_members_that_requested_another(
    nameserver: str,
) -> None:
    async with scene(nameserver, queue_count=2) as at, Admin(nameserver) as admin:
        await admin.update_group(at.group, policy="warn")
        async with handle_all(at, "old", "a") as old:
            await until(lambda: len(old.assignment) == 2)
            assert old.verdict.kind == "accepted"
            async with handle_all(at, "new", "b") as new:
                assert new.verdict.kind == "replaced"
                await until(lambda: old.verdict.kind == "overruled")
                await until(lambda: len(old.assignment) == len(new.assignment) == 1)
                for queue_id in (0, 1):
                    await at.send([f"a:{queue_id}", f"b:{queue_id}"], queue_id=queue_id)
                await until(lambda: len(at.handled) == 2)
        assert set(at.bodies) == {"b:0", "b:1"}


async def test_staged_member_waits_for_the_last_old_one_and_each_gets_only_its_messages(
    nameserver: str,
) -> None:
    async with scene(nameserver, queue_count=2) as at, Admin(nameserver) as admin:
        await admin.update_group(at.group, policy="staged")
        async with AsyncExitStack() as life_of_new:
            async with handle_all(at, "old", "a") as old:
                await until(lambda: len(old.assignment) == 2)
                new = await life_of_new.enter_async_context(handle_all(at, "new", "b"))
                assert new.verdict.kind == "staged"
                (difference,) = new.verdict.differences
                assert (difference.newcomer_value, difference.member_value) == ("b", "a")
                await at.send(["b:1", "a:2"], queue_id=0)
                await until(lambda: at.bodies["a:2"])
                assert (len(old.assignment), new.assignment) == (2, ())
            await until(lambda: len(new.assignment) == 2 and new.verdict.kind == "accepted")
            await at.send(["a:3", "b:4"], queue_id=0)
            await until(lambda: at.bodies["b:4"])
        assert (at.by("old"), at.by("new")) == (["a:2"], ["b:4"])
