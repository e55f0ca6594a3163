"""Goal: a scheduled batch is delivered once, at its time, whatever happens to topic, disk or clock.

Method: servicer and deliverer on a disk in memory, round by round, with a clock that the test sets;
a restart is a new node on the same disk.
"""

from __future__ import annotations

import asyncio
import errno

import pytest

from baton.common.v1 import error_pb2
from baton.storage.v1 import schedule_service_pb2 as pb
from batonmq._core.delays import AHEAD_MS_MAX
from batonmq._core.records import Message, decode_records, read_header
from batonmq.errors import (
    BatonError,
    DataLoss,
    DataLossDetail,
    DiskFull,
    DuplicateSequence,
    InvalidArgument,
    LimitExceeded,
    NoQuorum,
    NotScheduled,
    NotServing,
    NotWritable,
    WrongBroker,
)
from batonmq_server.storage.core.checks import LocalTopic
from batonmq_server.storage.core.retention import DiskUsage
from batonmq_server.storage.schedule_server import decode_id, encode_id
from batonmq_server.storage.scheduled_deliverer import UNDELIVERED_MAX
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage.batches import NOW, TOPIC, TOPIC_ID, batch, read_spec
from tests.storage.schedule_scene import SEGMENT_BYTES, new_scene

HOUR_MS = 3_600_000
FILL = b"x" * (SEGMENT_BYTES // 2)


def reasons(outcomes: list[pb.ScheduleOutcome]) -> list[str]:
    return [
        error_pb2.Reason.Name(one.error.reason).removeprefix("REASON_")
        if one.HasField("error")
        else "stored"
        for one in outcomes
    ]


async def test_batch_is_delivered_at_its_time_unchanged() -> None:
    message = Message(b"body", tag="paid", keys=("a", "b"), properties={"x": "y"})
    async with new_scene() as scene:
        receipt = await scene.schedule(batch(message, b"second", queue_id=3), NOW + 5_000)
        assert (receipt.deliver_unix_ms, receipt.duplicate) == (NOW + 5_000, False)
        scene.clock.pass_ms(4_999)
        await scene.deliver()
        assert scene.bodies(3) == []
        scene.clock.pass_ms(1)
        await scene.deliver()
        assert scene.bodies(3) == [b"body", b"second"]
        reading = scene.store.read((TOPIC_ID, 3), read_spec())
        assert reading is not None
        record = next(decode_records(reading.batches[0], read_header(reading.batches[0]), [0]))
        assert (record.tag, record.keys, record.properties) == ("paid", ("a", "b"), {"x": "y"})
        assert scene.waiting() == 0
        assert scene.metric("appended_messages_total") == 2


async def test_batch_with_a_past_time_is_delivered_at_once() -> None:
    async with new_scene() as scene:
        await scene.schedule(batch(b"a"), 1)
        await scene.deliver()
        assert scene.bodies() == [b"a"]


async def test_earlier_batches_are_delivered_first_whatever_the_order_of_scheduling() -> None:
    async with new_scene() as scene:
        for after in (30, 10, 20, 10):
            await scene.schedule(batch(b"%d" % after), NOW + after)
        scene.clock.pass_ms(HOUR_MS)
        await scene.deliver()
        assert scene.bodies() == [b"10", b"10", b"20", b"30"]


async def test_retry_gets_the_first_receipt_even_after_delivery_and_restart() -> None:
    raw = batch(b"a", producer=(5, 1))
    async with new_scene() as scene:
        first = await scene.schedule(raw, NOW + 10)
        again = await scene.schedule(raw, NOW + 999)
        assert (again.schedule_id, again.deliver_unix_ms) == (first.schedule_id, NOW + 10)
        assert (first.duplicate, again.duplicate) == (False, True)
        outcomes = await scene.outcomes(
            *((batch(b"b", producer=(6, 1)), NOW + 20) for _ in range(2))
        )
        assert [one.receipt.duplicate for one in outcomes] == [False, True]
        scene.clock.pass_ms(100)
        await scene.deliver()
        disk = scene.disk.killed()
    async with new_scene(disk, scene.clock) as scene:
        again = await scene.schedule(raw, NOW + 10)
        assert (again.schedule_id, again.duplicate) == (first.schedule_id, True)
        await scene.deliver()
        assert scene.bodies() == [b"a", b"b"]


async def test_delay_counts_from_the_first_attempt_by_the_clock_of_storage() -> None:
    """The delivery time beside it is that of a sender whose clock is an hour behind or ahead."""
    raw = batch(b"a", producer=(5, 1))
    async with new_scene() as scene:
        first = await scene.schedule_after(raw, 10_000, sender_unix_ms=NOW - HOUR_MS)
        assert (first.deliver_unix_ms, first.duplicate) == (NOW + 10_000, False)
        scene.clock.pass_ms(9_999)
        again = await scene.schedule_after(raw, 7, sender_unix_ms=NOW + HOUR_MS)
        assert (again.schedule_id, again.deliver_unix_ms) == (first.schedule_id, NOW + 10_000)
        assert again.duplicate
        await scene.deliver()
        assert scene.bodies() == []
        scene.clock.pass_ms(1)
        await scene.deliver()
        assert scene.bodies() == [b"a"]
        at_once = await scene.schedule_after(batch(b"b"), 0, sender_unix_ms=NOW + HOUR_MS)
        assert at_once.deliver_unix_ms == NOW + 10_000
        await scene.deliver()
        assert scene.bodies() == [b"a", b"b"]


@pytest.mark.parametrize(
    ("delay_ms", "kind"), [(-1, InvalidArgument), (AHEAD_MS_MAX + 1, LimitExceeded)]
)
async def test_bad_delay_is_rejected(delay_ms: int, kind: type[BatonError]) -> None:
    async with new_scene() as scene:
        with pytest.raises(kind):
            await scene.schedule_after(batch(b"a"), delay_ms, sender_unix_ms=NOW)
        assert scene.waiting() == 0


async def test_scheduled_batch_of_another_identity_takes_no_sequence_and_fences_none() -> None:
    async with new_scene() as scene:
        await scene.schedule(batch(b"a", producer=(5, 1)), NOW + 10)
        scene.identity = "stranger"
        for epoch, sequence in ((1, 1), (9_999, 0)):
            raw = batch(b"forged", producer=(5, epoch), sequence=sequence)
            await scene.schedule(raw, NOW + 10)
        disk = scene.disk.killed()
    async with new_scene(disk, scene.clock) as scene:
        receipt = await scene.schedule(batch(b"b", producer=(5, 1), sequence=1), NOW + 10)
        assert not receipt.duplicate
        with pytest.raises(DuplicateSequence, match="other content"):
            await scene.schedule(batch(b"c", producer=(5, 1), sequence=1), NOW + 10)


async def test_producer_errors_are_those_of_append() -> None:
    async with new_scene() as scene:
        for sequence in range(6):
            await scene.schedule(batch(b"x", producer=(5, 2), sequence=sequence), NOW)
        outcomes = await scene.outcomes(
            (batch(b"x", producer=(5, 2), sequence=7), NOW),
            (batch(b"x", producer=(5, 1), sequence=6), NOW),
            (batch(b"x", producer=(5, 2), sequence=0), NOW),
        )
        assert reasons(outcomes) == ["SEQUENCE_GAP", "PRODUCER_FENCED", "DUPLICATE_SEQUENCE"]
        with pytest.raises(DuplicateSequence):
            await scene.schedule(batch(b"x", producer=(5, 2), sequence=0), NOW)


async def test_bad_item_is_rejected_alone() -> None:
    async with new_scene() as scene:
        end = scene.store.log.next_position
        refused = await scene.outcomes(
            (b"junk", NOW),
            (batch(b"a", topic="missing"), NOW),
            (batch(b"a", queue_id=8), NOW),
            (batch(b"a"), 0),
            (batch(b"a"), -5),
            (batch(b"a"), NOW + AHEAD_MS_MAX + 1),
        )
        assert reasons(refused) == [
            "BAD_BATCH", "TOPIC_NOT_FOUND", "QUEUE_NOT_FOUND", "INVALID_ARGUMENT",
            "INVALID_ARGUMENT", "LIMIT_EXCEEDED",
        ]  # fmt: skip
        assert refused[5].error.facts["limit"] == str(AHEAD_MS_MAX)
        assert scene.store.log.next_position == end
        outcomes = await scene.outcomes((b"junk", NOW), (batch(b"a"), NOW + AHEAD_MS_MAX))
        assert reasons(outcomes) == ["BAD_BATCH", "stored"]


async def test_request_without_items_or_with_too_many_is_rejected() -> None:
    async with new_scene() as scene:
        with pytest.raises(InvalidArgument):
            await scene.outcomes()
        with pytest.raises(LimitExceeded):
            await scene.outcomes(*((batch(b"a"), NOW) for _ in range(1_025)))


async def test_batch_with_a_receipt_survives_a_power_cut() -> None:
    async with new_scene() as scene:
        await scene.schedule(batch(b"a"), NOW + 1)
        disk = scene.disk.power_cut(lambda _: 0)
    async with new_scene(disk, scene.clock) as scene:
        scene.clock.pass_ms(1)
        await scene.deliver()
        assert scene.bodies() == [b"a"]


async def test_cancelled_batch_is_never_delivered_even_after_a_restart() -> None:
    async with new_scene() as scene:
        kept = await scene.schedule(batch(b"kept"), NOW + 1)
        receipt = await scene.schedule(batch(b"cancelled"), NOW + 1)
        await scene.cancel(receipt.schedule_id)
        with pytest.raises(NotScheduled):
            await scene.cancel(receipt.schedule_id)
        disk = scene.disk.power_cut(lambda _: 0)
    async with new_scene(disk, scene.clock) as scene:
        with pytest.raises(NotScheduled):
            await scene.cancel(receipt.schedule_id)
        scene.clock.pass_ms(1)
        await scene.deliver()
        assert scene.bodies() == [b"kept"]
        with pytest.raises(NotScheduled):
            await scene.cancel(kept.schedule_id)


@pytest.mark.parametrize(
    ("schedule_id", "kind"),
    [
        ("", InvalidArgument),
        ("broker", InvalidArgument),
        ("broker-a-", InvalidArgument),
        ("Broker-5", InvalidArgument),
        ("broker-a-0x5", InvalidArgument),
        ("broker-a-5 ", InvalidArgument),
        ("broker-a-1_0", InvalidArgument),
        ("broker-a-" + "f" * 33, InvalidArgument),
        ("broker-b-5", WrongBroker),
        ("broker-a-5", NotScheduled),
        ("broker-a-" + "f" * 32, NotScheduled),
    ],
)
async def test_unknown_schedule_id_is_rejected(schedule_id: str, kind: type[BatonError]) -> None:
    async with new_scene() as scene:
        await scene.schedule(batch(b"a"), NOW + 1)
        end = scene.store.log.next_position
        with pytest.raises(kind):
            await scene.cancel(schedule_id)
        assert scene.store.log.next_position == end
        assert scene.waiting() == 1


def test_schedule_id_is_decoded_as_it_was_encoded() -> None:
    for key in ((1, 0), (NOW, (1 << 63) - 1), (NOW + AHEAD_MS_MAX, 12_345)):
        assert decode_id(encode_id(key, "broker-a"), "broker-a") == key
    assert encode_id((0x18BCFE56800, 0x2A), "broker-a") == "broker-a-18bcfe56800000000000000002a"


async def test_cancellation_during_a_delivery_succeeds_or_is_rejected() -> None:
    async with new_scene() as scene, asyncio.TaskGroup() as tasks:
        receipt = await scene.schedule(batch(b"cancelled"), NOW)
        await scene.schedule(batch(b"delivered"), NOW)
        scene.topics.lookup_started.clear()
        scene.topics.gate.clear()
        delivering = tasks.create_task(scene.deliver())
        await scene.topics.lookup_started.wait()
        await scene.cancel(receipt.schedule_id)
        scene.topics.gate.set()
        await delivering
        assert scene.bodies() == [b"delivered"]
        assert scene.waiting() == 0


async def test_clock_that_steps_back_delivers_nothing_early_and_one_that_steps_ahead_delivers() -> (
    None
):
    async with new_scene() as scene:
        await scene.schedule(batch(b"first"), NOW + 1_000)
        scene.clock.now_unix_ms = NOW + 1_000
        await scene.deliver()
        await scene.schedule(batch(b"second"), NOW + 1_500)
        for unix_ms in (NOW - HOUR_MS, NOW + 1_499):
            scene.clock.now_unix_ms = unix_ms
            await scene.deliver()
            assert scene.bodies() == [b"first"]
        scene.clock.now_unix_ms = NOW + HOUR_MS
        await scene.deliver()
        assert scene.bodies() == [b"first", b"second"]


@pytest.mark.parametrize("recreated", [False, True])
async def test_batch_of_a_deleted_topic_is_not_delivered_and_that_is_reported(
    recreated: bool,
) -> None:
    async with new_scene() as scene:
        await scene.schedule(batch(b"lost"), NOW + 1)
        if recreated:
            scene.topics.topics[TOPIC] = LocalTopic(TOPIC_ID + 1, 8)
        else:
            del scene.topics.topics[TOPIC]
        scene.clock.pass_ms(1)
        await scene.deliver()
        assert scene.waiting() == 0
        assert scene.metric("undeliverable_batches_total", reason="TOPIC_NOT_FOUND") == 1
        disk = scene.disk.power_cut(lambda _: 0)
    async with new_scene(disk, scene.clock) as scene:
        await scene.deliver()
        assert scene.bodies() == []
        assert scene.metric("undeliverable_batches_total", reason="TOPIC_NOT_FOUND") == 0


async def test_batch_whose_topic_has_no_queues_on_this_broker_is_not_delivered() -> None:
    async with new_scene() as scene:
        await scene.schedule(batch(b"lost"), NOW)
        scene.topics.topics[TOPIC] = LocalTopic(TOPIC_ID, 0)
        await scene.deliver()
        assert scene.waiting() == 0
        assert scene.metric("undeliverable_batches_total", reason="QUEUE_NOT_FOUND") == 1


async def test_batch_of_a_closed_queue_is_delivered_to_an_open_one() -> None:
    async with new_scene() as scene:
        await scene.schedule(batch(b"a", queue_id=5), NOW)
        scene.topics.topics[TOPIC] = LocalTopic(TOPIC_ID, 8, write_queue_count=4)
        await scene.deliver()
        assert (scene.bodies(5), scene.bodies(1)) == ([], [b"a"])


async def test_batch_of_a_topic_that_leaves_this_broker_is_delivered_to_a_retiring_queue() -> None:
    async with new_scene() as scene:
        await scene.schedule(batch(b"a", queue_id=5), NOW)
        scene.topics.topics[TOPIC] = LocalTopic(TOPIC_ID, 8, write_queue_count=0)
        await scene.deliver()
        assert (scene.waiting(), scene.bodies(5)) == (0, [b"a"])
        with pytest.raises(NotWritable):
            await scene.schedule(batch(b"b"), NOW)


async def test_read_only_topic_gets_accepted_batches_and_no_new_ones() -> None:
    async with new_scene() as scene:
        await scene.schedule(batch(b"a"), NOW)
        scene.topics.topics[TOPIC] = LocalTopic(TOPIC_ID, 8, writable=False)
        with pytest.raises(NotWritable):
            await scene.schedule(batch(b"b"), NOW)
        await scene.deliver()
        assert scene.bodies() == [b"a"]


async def test_batch_whose_topic_is_unknown_waits_and_the_others_are_delivered() -> None:
    async with new_scene() as scene:
        scene.topics.topics["other"] = LocalTopic(9, 1)
        await scene.schedule(batch(b"other", topic="other"), NOW)
        await scene.schedule(batch(b"a"), NOW)
        scene.topics.errors["other"] = NoQuorum("etcd is away")
        await scene.deliver()
        assert (scene.bodies(), scene.waiting()) == ([b"a"], 1)
        del scene.topics.errors["other"]
        await scene.deliver()
        assert scene.waiting() == 1  # it is not retried at once
        scene.clock.pass_ms(1_000)
        await scene.deliver()
        assert scene.waiting() == 0
        assert scene.store.offsets((9, 0)).next_offset == 1


async def test_batch_that_waits_for_its_topic_can_be_cancelled() -> None:
    async with new_scene() as scene:
        receipt = await scene.schedule(batch(b"a"), NOW)
        scene.topics.errors[TOPIC] = NoQuorum("etcd is away")
        await scene.deliver()
        await scene.cancel(receipt.schedule_id)
        scene.topics.errors.clear()
        scene.clock.pass_ms(1_000)
        await scene.deliver()
        assert scene.bodies() == []


async def test_number_of_undelivered_due_batches_is_bounded() -> None:
    async with new_scene() as scene:
        for _ in range(UNDELIVERED_MAX // 1_024 + 1):
            await scene.outcomes(*((batch(b"a"), NOW) for _ in range(1_024)))
        scene.topics.errors[TOPIC] = NoQuorum("etcd is away")
        await scene.deliver()
        assert len(scene.store.schedule.waiting.taken) == UNDELIVERED_MAX
        scene.topics.errors.clear()
        scene.clock.pass_ms(1_000)
        await scene.deliver()
        assert scene.waiting() == 0
        assert scene.store.offsets((TOPIC_ID, 0)).next_offset == UNDELIVERED_MAX + 1_024


async def test_delivery_waits_on_a_full_disk_and_continues_when_there_is_space() -> None:
    async with new_scene() as scene:
        await scene.schedule(batch(b"a"), NOW)
        room, scene.disk.room = scene.disk.room, 0
        scene.retention.observe(DiskUsage(95, 5), 0, 1)
        await scene.deliver()
        assert (scene.bodies(), scene.waiting()) == ([], 1)
        with pytest.raises(DiskFull):
            await scene.schedule(batch(b"b"), NOW)
        scene.disk.room = room
        scene.retention.observe(DiskUsage(5, 95), 0, 2)
        await scene.deliver()
        assert (scene.bodies(), scene.waiting()) == ([b"a"], 0)


async def test_delivery_without_space_for_a_segment_waits_and_happens_once() -> None:
    async with new_scene(MemoryDisk(room=2 * SEGMENT_BYTES)) as scene:
        accepted: list[bytes] = []
        while True:
            (outcome,) = await scene.outcomes((batch(b"%d" % len(accepted), FILL[:500]), NOW))
            if outcome.HasField("error"):
                break
            accepted.append(b"%d" % len(accepted))
        assert reasons([outcome]) == ["DISK_FULL"]
        scene.retention.observe(DiskUsage(50, 1 << 20), 0, 1)
        await scene.due.deliver()
        assert scene.waiting() == len(accepted)
        scene.disk.room = 1 << 30
        scene.retention.observe(DiskUsage(50, 1 << 20), 0, 2)
        scene.clock.pass_ms(1_000)
        await scene.deliver()
        assert scene.waiting() == 0
        assert scene.bodies()[::2] == accepted


async def test_many_due_batches_share_few_writes_and_syncs() -> None:
    syncs = []

    async def counted(call, argument) -> None:  # type: ignore[no-untyped-def]
        syncs.append(1)
        call(argument)

    async with new_scene(in_thread=counted) as scene:
        for _ in range(2):
            await scene.outcomes(*((batch(b"a"), NOW) for _ in range(1_000)))
        syncs.clear()
        await scene.deliver()
        assert scene.store.offsets((TOPIC_ID, 0)).next_offset == 2_000
        assert len(syncs) < 30


async def test_very_long_batches_are_delivered_a_few_at_a_time_in_order() -> None:
    async with new_scene() as scene:
        scene.store.log._segment_bytes = 1 << 26  # space for the longest batches
        bodies = [bytes([n]) * (3 << 20) for n in range(8)]
        for n, body in enumerate(bodies):
            await scene.schedule(batch(body), NOW + n)
        scene.clock.pass_ms(100)
        assert await scene.due.deliver()
        assert 0 < scene.waiting() < 8
        await scene.deliver()
        assert [body[0] for body in scene.bodies()] == list(range(8))


async def test_failed_sync_returns_no_receipt() -> None:
    with pytest.raises(BaseExceptionGroup) as ended:
        async with new_scene() as scene:
            scene.store.log._create() if not scene.store.log._segments else None
            for file in scene.disk.files.values():
                file.failure = OSError(errno.EIO, "broken")
            with pytest.raises((NotServing, OSError)):
                await scene.schedule(batch(b"a"), NOW)
            with pytest.raises(NotServing):
                await scene.schedule(batch(b"b"), NOW)
            await asyncio.sleep(0)
    assert ended.group_contains(OSError)


async def test_old_waiting_batch_is_rewritten_and_frees_its_segment() -> None:
    async with new_scene() as scene:
        receipt = await scene.schedule(batch(b"cancelled"), NOW + 40 * HOUR_MS)
        kept = await scene.schedule(batch(b"kept", producer=(5, 1)), NOW + 40 * HOUR_MS)
        await scene.schedule(batch(FILL), NOW)
        await scene.schedule(batch(FILL), NOW)
        await scene.deliver()
        await scene.rewrite_old()
        assert scene.store.schedule.waiting.oldest_position() == 0
        scene.clock.pass_ms(24 * HOUR_MS)
        end = scene.store.log.next_position
        await scene.rewrite_old()
        oldest = scene.store.schedule.waiting.oldest_position()
        assert oldest is not None
        assert oldest >= end
        disk = scene.disk.power_cut(lambda _: 0)
    async with new_scene(disk, scene.clock) as scene:
        assert scene.waiting() == 2
        await scene.cancel(receipt.schedule_id)
        again = await scene.schedule(batch(b"kept", producer=(5, 1)), NOW + 40 * HOUR_MS)
        assert (again.schedule_id, again.duplicate) == (kept.schedule_id, True)
        scene.clock.pass_ms(16 * HOUR_MS - 1)
        await scene.deliver()
        assert scene.bodies() == [FILL, FILL]
        scene.clock.pass_ms(1)
        await scene.deliver()
        assert scene.bodies() == [FILL, FILL, b"kept"]


async def test_recovery_from_a_checkpoint_restores_the_waiting_batches() -> None:
    async with new_scene() as scene:
        receipt = await scene.schedule(batch(b"before"), NOW + 10)
        await scene.schedule(batch(b"delivered"), NOW)
        scene.node.checkpointing.run()
        await scene.schedule(batch(b"after"), NOW + 20)
        await scene.deliver()
        disk = scene.disk.killed()
    async with new_scene(disk, scene.clock) as scene:
        assert scene.node.report.checkpoint_position > 0
        assert scene.waiting() == 2
        scene.clock.pass_ms(10)
        await scene.deliver()
        with pytest.raises(NotScheduled):
            await scene.cancel(receipt.schedule_id)
        scene.clock.pass_ms(10)
        await scene.deliver()
        assert scene.bodies() == [b"delivered", b"before", b"after"]


async def test_damaged_scheduled_batch_is_not_delivered_and_that_is_reported() -> None:
    async with new_scene() as scene:
        await scene.schedule(batch(b"damaged"), NOW)
        await scene.schedule(batch(b"good"), NOW)
        (log,) = (file for path, file in scene.disk.files.items() if path.startswith("log/"))
        log.content[200] ^= 1
        await scene.deliver()
        assert scene.bodies() == [b"good"]
        assert scene.waiting() == 0
        assert scene.metric("undeliverable_batches_total", reason="DATA_LOSS") == 1


@pytest.mark.parametrize("at", [1, 30, 200])
async def test_damaged_waiting_batch_blocks_neither_retention_nor_the_node(at: int) -> None:
    async with new_scene() as scene:
        await scene.schedule(batch(b"damaged"), NOW + 40 * HOUR_MS)
        await scene.schedule(batch(b"good"), NOW + 40 * HOUR_MS)
        await scene.schedule(batch(FILL), NOW)
        await scene.schedule(batch(FILL), NOW)
        await scene.deliver()
        scene.disk.files[f"log/{0:020d}"].content[at] ^= 1
        scene.clock.pass_ms(24 * HOUR_MS)
        end = scene.store.log.next_position
        await scene.rewrite_old()
        oldest = scene.store.schedule.waiting.oldest_position()
        assert oldest is not None
        assert oldest >= end
        assert scene.waiting() == 1
        assert scene.metric("undeliverable_batches_total", reason="DATA_LOSS") == 1


async def test_unreadable_scheduled_batch_is_not_delivered_and_the_others_are() -> None:
    async with new_scene() as scene:
        for number in range(3):
            await scene.schedule(batch(b"%d" % number * 1_000), NOW + number)
        first, read = scene.store.log.first_position, scene.store.log.read

        def unreadable(position: int, bytes_max: int) -> bytes:
            if position == first:
                raise DataLoss("the log can't be read", detail=DataLossDetail(position=position))
            return read(position, bytes_max)

        scene.store.log.read = unreadable  # type: ignore[method-assign]
        scene.clock.pass_ms(10)
        await scene.deliver()
        assert [body[:1] for body in scene.bodies()] == [b"1", b"2"]
        assert scene.waiting() == 0
