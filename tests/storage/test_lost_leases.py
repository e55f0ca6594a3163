"""A leader that loses its lease during a call.

Goal: the caller gets an error that says that the result is unknown, never one that promises that
nothing was changed. A call that was rejected before any change gets the latter.
Method: three real nodes in one process (tests/storage/replicas.py); the answer to a batch that is
already safe waits until the lease has expired. tests/offsets/test_replication.py tests the same for
offsets.
"""

from __future__ import annotations

import asyncio

import pytest

from batonmq_server.storage.flusher import Flusher
from tests.storage.batches import batch
from tests.storage.replicas import Scene
from tests.storage.test_replication import numbered, others, three
from tests.support.conditions import until
from tests.support.replica_nodes import LEASE_MS


async def test_batch_stored_when_the_lease_expired_is_not_reported_as_rejected(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await three(scene)
    await first.append(*numbered(0, 3))
    for name in others(scene, first):
        await scene.nodes[name].stop()
    await scene.wait_in_sync(first.name)
    safe, over, reached = asyncio.Event(), asyncio.Event(), Flusher.wait_until_safe

    async def late(flusher: Flusher, position: int) -> None:
        await reached(flusher, position)
        safe.set()
        await over.wait()

    async def lease_over() -> bool:
        return not await first.serves()

    with monkeypatch.context() as patch:
        patch.setattr(Flusher, "wait_until_safe", late)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(first.rejection(*numbered(3, 1), timeout_s=60))
            await safe.wait()
            first.session.cut = True
            first.session.node_clock.ahead_ms += LEASE_MS
            await until(lease_over)
            over.set()
    assert waiting.result().reason == "UNREACHABLE", "the batch is on the disk and may be confirmed"
    refused = await first.rejection(batch(b"later"))
    assert refused.reason in ("NOT_LEADER", "NO_QUORUM"), "this batch was not written"
    await first.crash()
    await scene.start(first.name)
    leader = await scene.leader()
    assert await leader.bodies() == [b"0", b"1", b"2", b"3"]
