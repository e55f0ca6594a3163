"""Goal: a described lock is complete, and a queue is owned again after a forced release.

Method: a real cluster whose members read.
"""

from __future__ import annotations

import asyncio

import pytest

from batonmq._consumer.message import ReceivedMessage
from batonmq._core.queues import QueueRef
from batonmq.admin.admin import Admin
from batonmq.admin.locks import Locks
from batonmq.admin.operation import Operation
from batonmq.errors import UnknownQueue
from tests.client.group import handle_all, scene
from tests.support.conditions import until

pytestmark = pytest.mark.e2e
OPERATION = Operation("tester", "a test")


async def test_described_lock_has_owner_lease_and_token(nameserver: str) -> None:
    async with scene(nameserver, 1) as at, Admin(nameserver) as admin:
        queue = QueueRef(at.topic, "broker-0", 0)
        without_owner = await Locks(admin).describe(at.group, queue)
        assert (
            without_owner.lock.state,
            without_owner.lock.token,
            without_owner.lock.client_id,
        ) == ("free", 0, None)
        async with handle_all(at, "c1"):

            async def owned() -> bool:
                return (await Locks(admin).describe(at.group, queue)).lock.client_id == "c1"

            await until(owned)
            lock = await Locks(admin).describe(at.group, queue)
            assert lock.lock.state == "held"
            assert lock.lock.token > 0
            assert lock.lock.subscription_generation > 0
            assert 0 < lock.lease_left_ms <= 30_000
            assert (lock.pending_step, lock.owner_evicted) == ("", False)
            assert lock.lock.queue_id == 0
        after = await Locks(admin).describe(at.group, queue)
        assert (after.lock.state, after.lease_left_ms) == ("free", 0)


async def test_live_owner_acquires_a_queue_again_after_a_forced_release(nameserver: str) -> None:
    async with scene(nameserver, 1) as at, Admin(nameserver) as admin:
        queue, proceed = QueueRef(at.topic, "broker-0", 0), asyncio.Event()
        await at.send(["x"])
        async with at.consumer("c1") as consumer, asyncio.TaskGroup() as tasks:

            async def handle(message: ReceivedMessage) -> None:
                at.note(consumer, message)
                if len(at.handled) == 1:
                    await proceed.wait()

            tasks.create_task(consumer.run(handle))
            await until(lambda: len(at.handled) == 1)
            before = await Locks(admin).describe(at.group, queue)
            released = await Locks(admin).force_release(at.group, queue, OPERATION)
            assert (released.client_id, released.maybe_seen_count) == ("c1", 1)
            assert released.token > before.lock.token

            async def owned_again() -> bool:
                lock = (await Locks(admin).describe(at.group, queue)).lock
                return lock.client_id == "c1" and lock.token > released.token

            await until(owned_again)
            proceed.set()

            async def caught_up() -> bool:
                return await at.lag() == 0

            await until(caught_up)
            assert at.bodies["x"] == 1
            consumer.stop()


async def test_forced_release_of_a_queue_without_progress_is_refused(nameserver: str) -> None:
    async with scene(nameserver, 1) as at, Admin(nameserver) as admin:
        with pytest.raises(UnknownQueue):
            await Locks(admin).force_release(at.group, QueueRef(at.topic, "broker-0", 0), OPERATION)


async def test_release_all_releases_no_queue_of_a_running_client(nameserver: str) -> None:
    async with scene(nameserver, 2) as at, Admin(nameserver) as admin, handle_all(at, "c1-release"):

        async def owned() -> bool:
            locks = await admin.list_locks(at.group)
            return [lock.client_id for lock in locks] == ["c1-release"] * 2

        await until(owned)
        released = await Locks(admin).release_all("c1-release", at.group)
        assert released.released_count == 0
        assert released.kept == tuple(
            (at.group, QueueRef(at.topic, "broker-0", queue_id)) for queue_id in range(2)
        )
        await at.send(["x"])
        await until(lambda: at.bodies["x"] == 1)
        unknown_client = await Locks(admin).release_all("unknown")
        assert (
            unknown_client.incarnation_ids,
            unknown_client.released_count,
            unknown_client.kept,
        ) == ((), 0, ())
