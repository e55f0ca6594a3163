"""Goal: the holds of a queue have its tokens with holder, time span and deliveries, and bounds of
deliveries that are not known exactly.

Method: the rules on a real table, the list over a real channel with a real disk, and the disk
after restarts and deletions.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq_server.offsets.codec import decode_token_change, encode_token_change
from batonmq_server.offsets.core.holds import (
    ACKED_RANGES_MAX,
    HOLDS_MAX,
    DeliveryReach,
    EndedToken,
    HoldEnd,
    TokenChange,
    link_holds,
)
from batonmq_server.offsets.core.values import Instant, QueueLimits
from batonmq_server.offsets.disk import LmdbDisk
from batonmq_server.offsets.persistence import (
    HOLDS,
    TokenChangeKey,
    entries_of,
    find_token_changes,
    recover_standalone,
)
from tests.offsets.rules_scene import (
    FORCED,
    IDLE,
    KEY,
    SAME_HOLDER,
    A,
    B,
    C,
    Scene,
    offsets,
)
from tests.offsets.service_calls import (
    TERM,
    Service,
    call,
    delete_topic_request,
    fence_item,
    queue,
    run,
)

NOW = Instant(1, 1)


def summary_of(
    scene: Scene, records: list[TokenChange]
) -> list[tuple[int, HoldEnd, DeliveryReach]]:
    """Return token, end and reach of each hold, newest first."""
    holds = link_holds(records, scene.queue.token, scene.queue.reach)
    return [(hold.began.token, hold.end, hold.reach) for hold in holds]


class Log:
    """A scene that records every token change."""

    def __init__(self) -> None:
        self.scene = Scene()
        self.records: list[TokenChange] = []

    def note(self) -> None:
        handover = self.scene.queue.token_change
        assert handover is not None
        self.records.append(handover)

    def holds(self) -> list[tuple[int, HoldEnd, DeliveryReach]]:
        return summary_of(self.scene, self.records)


def test_hold_has_the_cause_of_its_end_and_its_deliveries() -> None:
    log, scene = Log(), Scene()
    log.scene = scene
    scene.fence(A, 0)
    log.note()
    scene.record(1, 0, 10)
    scene.commit(1, 10)
    scene.fence(B, 1)
    log.note()
    scene.record(2, 10, 14)
    scene.fence(B, 2, SAME_HOLDER)
    log.note()
    scene.record(3, 14, 20)
    scene.now_ms += 30_000
    scene.fence(C, 3, IDLE)
    log.note()
    scene.record(4, 10, 12)
    scene.fence(A, 4, FORCED)
    log.note()
    scene.record(5, 10, 11)
    scene.reset(0)
    log.note()
    assert log.holds() == [
        (6, HoldEnd.NOTHING, DeliveryReach(0, 0)),
        (5, HoldEnd.RESET, DeliveryReach(11, 11)),
        (4, HoldEnd.FORCED, DeliveryReach(12, 12)),
        (3, HoldEnd.TIMED_OUT, DeliveryReach(20, 20)),
        (2, HoldEnd.RENEWED, DeliveryReach(14, 14)),
        (1, HoldEnd.PASSED, DeliveryReach(10, 10)),
    ]


def test_close_keeps_the_delivered_offset_of_the_hold() -> None:
    log = Log()
    log.scene.fence(A, 0)
    log.note()
    log.scene.record(1, 0, 10)
    log.scene.close(1, 4, unfinished=offsets((6, 7)))
    assert log.holds() == [(1, HoldEnd.NOTHING, DeliveryReach(10, 10))]
    log.scene.restart()
    assert log.holds() == [(1, HoldEnd.NOTHING, DeliveryReach(10, 10))], "a restart keeps it too"
    log.scene.fence(B, 1)
    log.note()
    assert log.holds() == [
        (2, HoldEnd.NOTHING, DeliveryReach(4, 4)),
        (1, HoldEnd.PASSED, DeliveryReach(10, 10)),
    ]


def test_delivered_offset_of_a_hold_is_bounded_after_a_restart() -> None:
    log = Log()
    log.scene.fence(A, 0)
    log.note()
    log.scene.record(1, 0, 10)
    log.scene.commit(1, 3)
    log.scene.restart()
    assert log.holds() == [(1, HoldEnd.NOTHING, DeliveryReach(3, 26))]
    log.scene.record(1, 8, 12)
    assert log.holds() == [(1, HoldEnd.NOTHING, DeliveryReach(12, 26))]


def test_hold_ends_when_the_next_one_begins() -> None:
    log = Log()
    log.scene.fence(A, 0)
    log.note()
    log.scene.now_ms += 500
    log.scene.fence(B, 1)
    log.note()
    newest, oldest = link_holds(log.records, 2, log.scene.queue.reach)
    assert (newest.began.holder, oldest.began.holder) == (B, A)
    assert newest.end_unix_ms == 0
    assert oldest.end_unix_ms == newest.began.unix_ms == oldest.began.unix_ms + 500


def test_acked_ranges_of_a_hold_are_bounded() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 300)
    acked = offsets(*((first, first + 1) for first in range(1, 201, 2)))
    scene.commit(1, 0, acked)
    scene.fence(B, 1, FORCED)
    assert scene.queue.token_change is not None
    assert scene.queue.token_change.acked.runs == acked.runs[:ACKED_RANGES_MAX]


def test_holds_stop_at_a_missing_record() -> None:
    log = Log()
    for token in range(4):
        log.scene.fence(A, token, FORCED)
        log.note()
    del log.records[1]
    assert [token for token, _, _ in log.holds()] == [4, 3]


def test_holds_of_deleted_progress_are_not_linked() -> None:
    log = Log()
    log.scene.fence(A, 0)
    log.note()
    log.scene.delete(4)
    log.scene.fence(B, 2)
    log.note()
    assert [token for token, _, _ in log.holds()] == [3]


def test_stored_token_change_keeps_every_field() -> None:
    ended_token = EndedToken(8, HoldEnd.TIMED_OUT, DeliveryReach(70, 2_070))
    for holder in (A, None):
        handover = TokenChange(
            9, holder, 1_700_000_000_000, 50, offsets((52, 60), (62, 63)), ended_token
        )
        assert decode_token_change(encode_token_change(handover)) == handover


# ---- over the channel


async def fence(service: Service, token: int, client_id: str, **fields: object) -> None:
    """Fence the queue with expected token `token`; the new one is `token + 1`."""
    item = fence_item(
        attempt=f"attempt-{token + 1}",
        expected_token=token,
        condition=pb.FENCE_CONDITION_FORCED,
        forced_by="admin",
        forced_reason="test",
        holder=queue_pb2.Incarnation(client_id=client_id, incarnation_id=1),
        **fields,
    )
    answer = await call(service, "Fence", pb.FenceRequest(term=TERM, items=[item]))
    assert answer.outcomes[0].fenced.token == token + 1


async def listed(service: Service) -> list[pb.Hold]:
    answer = await call(service, "ListHolds", pb.ListHoldsRequest(queue=queue()))
    assert answer.offsets_epoch == service.offsets.table.epoch
    return list(answer.holds)


async def test_holds_are_listed_newest_first(service: Service) -> None:
    await service.start_owner(delivered=10)
    acks = pb.CommitItem(queue=queue(), token=1, committed_offset=4, acked=[run(6, 8)])
    await call(service, "Commit", pb.CommitRequest(items=[acks]))
    await fence(service, 1, "client-b")
    newest, oldest = await listed(service)
    assert oldest == pb.Hold(
        token=1,
        holder=queue_pb2.Incarnation(client_id="client-a", incarnation_id=1),
        begin_unix_ms=oldest.begin_unix_ms,
        end_unix_ms=newest.begin_unix_ms,
        end=pb.HOLD_END_FORCED,
        delivered_offset=10,
        delivered_offset_max=10,
    )
    assert 0 < oldest.begin_unix_ms <= oldest.end_unix_ms
    assert newest == pb.Hold(
        token=2,
        holder=queue_pb2.Incarnation(client_id="client-b", incarnation_id=1),
        begin_unix_ms=newest.begin_unix_ms,
        committed_offset=4,
        acked=[run(6, 8)],
        delivered_offset=4,
        delivered_offset_max=4,
    )


async def test_queue_without_progress_has_no_holds(service: Service) -> None:
    assert await listed(service) == []


async def test_only_the_newest_holds_are_kept(service: Service) -> None:
    await service.start_owner(delivered=0)
    for token in range(1, HOLDS_MAX + 9):
        await fence(service, token, f"client-{token}")
    holds = await listed(service)
    last = HOLDS_MAX + 9
    assert [hold.token for hold in holds] == list(range(last, last - HOLDS_MAX, -1))
    stored = [key for key, _ in service.stored() if key.startswith(HOLDS)]
    assert len(stored) == HOLDS_MAX


@pytest.mark.parametrize("last", [2, HOLDS_MAX, HOLDS_MAX + 1, HOLDS_MAX + 5])
async def test_holds_of_a_deleted_topic_are_deleted(service: Service, last: int) -> None:
    """Only keys are written that may be stored: many queues may be deleted at once."""
    await service.start_owner()
    for token in range(1, last):
        await fence(service, token, f"client-{token}")
    entries = "baton_offsets_durable_entries_total"
    before = service.registry.get_sample_value(entries) or 0
    await call(service, "DeleteTopic", delete_topic_request())
    written = (service.registry.get_sample_value(entries) or 0) - before
    assert written == 2 + min(last, HOLDS_MAX), "the topic, the queue, and its holds"
    assert await listed(service) == []
    assert not [key for key, _ in service.stored() if key.startswith(HOLDS)]
    await fence(service, last + 1, "client-next")
    assert [hold.token for hold in await listed(service)] == [last + 2]


async def test_commit_writes_no_hold(service: Service) -> None:
    await service.start_owner()
    entries = "baton_offsets_durable_entries_total"
    before = service.registry.get_sample_value(entries) or 0
    acks = pb.CommitItem(queue=queue(), token=1, committed_offset=4)
    await call(service, "Commit", pb.CommitRequest(items=[acks]))
    assert service.registry.get_sample_value(entries) == before + 1


async def test_recovery_does_not_read_holds_and_they_stay_stored(tmp_path: Path) -> None:
    scene = Scene()
    scene.fence(A, 0)
    handover = scene.queue.token_change
    assert handover is not None
    with LmdbDisk(tmp_path) as disk:
        recover_standalone(disk, QueueLimits(), NOW)
        entries = entries_of(scene.table, scene.resets.history)
        await disk.write([*entries(KEY), *entries(TokenChangeKey(KEY, handover))])
    with LmdbDisk(tmp_path) as disk:
        _, table, _ = recover_standalone(disk, QueueLimits(), NOW)
        assert len(table) == 1
        assert not [key for key, _ in disk.read(skip=HOLDS) if key.startswith(HOLDS)]
        assert await find_token_changes(disk, KEY) == [handover]
        assert await find_token_changes(disk, KEY._replace(queue_id=31)) == []
