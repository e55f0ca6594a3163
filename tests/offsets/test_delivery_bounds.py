"""Goal: after a restart, the exact delivered offset replaces the reserved bound, and no smaller
offset does.

Method: one queue with restarts (protocol 6.8, stories 22 and 24), and the reader of the ends of
logs with storage nodes that answer as programmed, on a clock that the test sets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from baton.storage.v1 import storage_service_pb2 as storage_pb
from batonmq._common.rpc import error_to_pb
from batonmq._core.epochs import SeenEpochs
from batonmq.errors import BatonError, NoQuorum, QueueNotFound, Unreachable
from batonmq_server.offsets import log_end_reader
from batonmq_server.offsets.codec import decode_progress
from batonmq_server.offsets.core.values import HolderPosition
from batonmq_server.offsets.log_end_reader import LogEndReader
from tests.offsets.rules_scene import IDLE, KEY, SAME_HOLDER, A, B, Scene, offsets


def restarted(*, acked: int = 20) -> Scene:
    """Return a queue with [0, 20) delivered to A under token 1, in the epoch after a crash."""
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 20)
    scene.commit(1, acked)
    scene.restart()
    assert scene.queue.delivered_offset == 36
    return scene


def state(scene: Scene, received: int, *, token: int = 1, epoch: int = 2) -> None:
    scene.table.note_received(KEY, token, HolderPosition(received, epoch))


def test_position_of_the_holder_replaces_the_bound() -> None:
    scene = restarted(acked=5)
    state(scene, 20)
    assert scene.queue.exact
    assert scene.queue.in_flight() == offsets((5, 20))
    assert scene.queue.known_in_flight() == offsets((5, 20))


def test_queue_of_a_holder_that_has_handled_everything_is_drained_again() -> None:
    scene = restarted()
    state(scene, 20)
    assert scene.queue.drained
    assert not scene.fence(B, 1).maybe_seen


def test_position_that_names_another_epoch_has_no_effect() -> None:
    scene = restarted()
    state(scene, 20, epoch=1)
    state(scene, 20, epoch=3)
    assert scene.queue.delivered_offset == 36


def test_position_under_another_token_has_no_effect() -> None:
    scene = restarted()
    state(scene, 20, token=2)
    assert scene.queue.delivered_offset == 36


def test_story_22_late_position_from_before_a_crash_has_no_effect() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 10)  # the earlier pull has position 0 and is in flight
    scene.restart()
    state(scene, 0, epoch=1)
    scene.now_ms += 30_000
    assert not offsets((0, 10)).difference(scene.fence(B, 1, IDLE).maybe_seen)


def test_story_23_delivery_of_an_older_epoch_is_not_counted_after_a_position() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 20)
    scene.commit(1, 20)
    scene.record(1, 20, 25)  # from memory: below the bound
    scene.restart()
    state(scene, 20)
    assert scene.queue.drained, "the holder must not use the delivery of [20, 25)"
    seen = SeenEpochs()
    assert seen.observe("offsets", 2)
    assert not seen.observe("offsets", 1), "the holder does not use the older epoch"


def test_position_does_not_lower_what_this_epoch_has_recorded() -> None:
    scene = restarted()
    scene.record(1, 20, 25)
    state(scene, 20)
    assert scene.queue.delivered_offset == 25
    state(scene, 0)
    assert scene.queue.delivered_offset == 25, "an exact value stays"


def test_position_counts_after_the_holder_acquired_its_queue_again() -> None:
    scene = restarted(acked=10)
    scene.fence(A, 1, SAME_HOLDER, resume=offsets((10, 15)))
    assert scene.queue.delivered_offset == 36
    state(scene, 15, token=2)
    assert scene.queue.in_flight() == offsets((10, 15))


def test_log_end_bounds_what_a_fence_flags() -> None:
    scene = restarted(acked=18)
    scene.table.note_log_end(KEY, 1, 22)
    scene.now_ms += 30_000
    assert scene.fence(B, 1, IDLE).maybe_seen == offsets((18, 22))


def test_log_end_does_not_lower_what_this_epoch_has_recorded() -> None:
    scene = restarted()
    scene.record(1, 20, 25)
    scene.table.note_log_end(KEY, 1, 22)
    assert scene.queue.delivered_offset == 25


def test_log_end_read_for_an_earlier_token_has_no_effect() -> None:
    scene = restarted()
    scene.fence(A, 1, SAME_HOLDER)
    scene.table.note_log_end(KEY, 1, 20)
    assert scene.queue.delivered_offset == 36


def test_progress_from_another_replica_set_keeps_its_bound_until_the_next_epoch() -> None:
    scene = restarted()
    assert scene.stored is not None
    scene.table.restore(KEY, decode_progress(KEY, scene.stored), scene.now)
    state(scene, 20)
    scene.table.note_log_end(KEY, 1, 20)
    assert scene.queue.delivered_offset == 36
    assert not scene.table.inexact()
    scene.restart()
    state(scene, 20, epoch=3)
    assert scene.queue.drained


def test_bound_of_a_queue_without_reserve_is_exact_after_a_restart() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 5)
    scene.close(1, 5)
    scene.restart()
    assert scene.queue.exact
    assert not scene.table.inexact()


# ---- the reader


class SetClock:
    """A clock that the test sets."""

    now_ms = 50_000

    def monotonic_ms(self) -> int:
        return self.now_ms


class Broker:
    """The leader of a broker.

    Each call gets the next answer: an error, or an age and the end, or the error, of each queue.
    """

    def __init__(self, answers: Sequence[BaseException | tuple[int, int | BatonError]]) -> None:
        self.answers, self.queue_counts = list(answers), list[int]()

    async def QueryOffsets(
        self, request: storage_pb.QueryOffsetsRequest, **_: float
    ) -> storage_pb.QueryOffsetsResponse:
        self.queue_counts.append(len(request.queues))
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        age_ms, end = answer
        if isinstance(end, BatonError):
            outcome = storage_pb.QueryOffsetsOutcome(error=error_to_pb(end))
        else:
            outcome = storage_pb.QueryOffsetsOutcome(
                offsets=storage_pb.QueueOffsets(next_offset=end)
            )
        return storage_pb.QueryOffsetsResponse(
            outcomes=[outcome for _ in request.queues], leader_age_ms=age_ms
        )


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> tuple[SetClock, list[float]]:
    """The clock, and the pauses that the reader has made on it."""
    clock, seconds_slept = SetClock(), list[float]()
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        seconds_slept.append(seconds)
        clock.now_ms += int(1_000 * seconds)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return clock, seconds_slept


async def read(scene: Scene, broker: Any, clock: SetClock, settle_ms: int) -> None:
    await LogEndReader(scene.table, lambda _: broker, clock, settle_ms).run()  # type: ignore[arg-type]


async def test_reader_lowers_the_bounds_of_a_new_epoch(
    pauses: tuple[SetClock, list[float]],
) -> None:
    scene, broker = restarted(), Broker([(0, 20)])
    await read(scene, broker, pauses[0], 0)
    assert scene.queue.drained
    assert broker.queue_counts == [1]


async def test_reader_calls_no_broker_if_all_bounds_are_exact(
    pauses: tuple[SetClock, list[float]],
) -> None:
    scene, broker = Scene(), Broker([])
    scene.fence(A, 0)
    await read(scene, broker, pauses[0], 0)
    assert broker.queue_counts == []


async def test_reader_waits_for_the_lease_and_the_advances_of_an_older_epoch(
    pauses: tuple[SetClock, list[float]],
) -> None:
    scene = restarted()
    await read(scene, Broker([(0, 20)]), pauses[0], 5_000)
    assert pauses[1] == [7.0]


async def test_story_24_end_of_the_log_from_a_deposed_leader_is_not_taken(
    pauses: tuple[SetClock, list[float]],
) -> None:
    scene = restarted(acked=10)
    scene.commit(1, 10)
    # The node led 500 ms before the older epoch was over, then another one delivered up to 20.
    broker = Broker([(500, 12), (500, 20)])
    await read(scene, broker, pauses[0], 5_000)
    assert scene.queue.in_flight() == offsets((10, 20))
    assert pauses[1] == [7.0, log_end_reader.RETRY_S]


async def test_reader_repeats_the_call_to_a_broker_that_did_not_answer(
    pauses: tuple[SetClock, list[float]],
) -> None:
    scene = restarted()
    await read(scene, Broker([Unreachable("no leader"), (0, 20)]), pauses[0], 0)
    assert scene.queue.drained


async def test_reader_asks_again_for_a_queue_that_its_broker_does_not_know_yet(
    pauses: tuple[SetClock, list[float]],
) -> None:
    scene, broker = restarted(), Broker([(0, NoQuorum("etcd: no answer")), (0, 20)])
    await read(scene, broker, pauses[0], 0)
    assert scene.queue.drained
    assert broker.queue_counts == [1, 1]


async def test_reader_leaves_out_a_queue_that_was_removed(
    pauses: tuple[SetClock, list[float]],
) -> None:
    scene, broker = restarted(), Broker([(0, QueueNotFound("removed"))])
    await read(scene, broker, pauses[0], 0)
    assert not scene.queue.exact
    assert broker.queue_counts == [1]


async def test_reader_ends_when_the_holder_has_sent_its_position(
    pauses: tuple[SetClock, list[float]],
) -> None:
    scene = restarted()

    class Slow(Broker):
        async def QueryOffsets(self, request: Any, **_: float) -> Any:
            state(scene, 20)
            return await super().QueryOffsets(request)

    broker = Slow([Unreachable("no leader")])
    await read(scene, broker, pauses[0], 0)
    assert scene.queue.drained
    assert broker.answers == []
