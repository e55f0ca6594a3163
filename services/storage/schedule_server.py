"""The servicer of ScheduleService: stores scheduled batches and cancels them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import grpc.aio

from baton.storage.v1 import schedule_service_pb2 as pb
from baton.storage.v1 import schedule_service_pb2_grpc as pb_grpc
from batonmq._common.aio import in_steps
from batonmq._common.rpc import error_to_pb
from batonmq._core.delays import check_deliver_time, deliver_time
from batonmq._core.records import read_header
from batonmq.errors import BatonError, InvalidArgument, NotScheduled, WrongBroker
from batonmq_server.runtime.access.guard import PermissionCheck
from batonmq_server.runtime.access.owner import owner_of
from batonmq_server.runtime.access.permissions import produce
from batonmq_server.storage import validation
from batonmq_server.storage.appender import Appender
from batonmq_server.storage.core import outputs, schedule, transactions
from batonmq_server.storage.core.checks import (
    CheckedBatch,
    LocalTopic,
    check,
    check_no_outputs,
    check_queue,
    check_takes,
)
from batonmq_server.storage.core.delay_queue import DelayKey
from batonmq_server.storage.core.producers import QueueKey, StoreReceipt
from batonmq_server.storage.core.schedule import (
    FIRST,
    ScheduledBatch,
    encode_scheduled,
    encode_withdrawn,
)
from batonmq_server.storage.tier_reader import LocalReads, RemoteReads
from batonmq_server.storage.topic_cache import TopicCache

SYSTEM_TOPICS: Mapping[str, LocalTopic | BatonError] = {
    schedule.TOPIC: LocalTopic(schedule.TOPIC_ID, schedule.QUEUE_COUNT),
    transactions.TOPIC: LocalTopic(schedule.TOPIC_ID, transactions.QUEUE_COUNT),
    outputs.TOPIC: LocalTopic(schedule.TOPIC_ID, outputs.QUEUE_COUNT),
}
LISTED_MAX = 1_000
LISTED_BYTES = 2 * 1024 * 1024
"""Batches, and bytes of batches, after which a page of scheduled batches ends."""
_POSITION_BITS = 64
_ID = re.compile(r"([a-z0-9-]{1,63})-([0-9a-f]{1,32})")

Context = grpc.aio.ServicerContext[Any, Any]
_Topics = Mapping[str, LocalTopic | BatonError]


class ScheduleServicer(pb_grpc.ScheduleServiceServicer):
    """Serves ScheduleService; see the proto.

    Args:
        changed: Called after a batch was scheduled.
        require: Raises unless the caller may write to the topic of the batch that it cancels; None
            if authorization is off.
        tier: Fetches what the log has only in the object store; None without a store.
    """

    def __init__(
        self,
        appender: Appender,
        topics: TopicCache,
        changed: Callable[[], None],
        require: PermissionCheck | None = None,
        identity_of: Callable[[Context], str] = lambda _: "",
        *,
        tier: RemoteReads | None = None,
    ) -> None:
        self._tier = tier or LocalReads()
        self._appender, self._topics, self._changed = appender, topics, changed
        self._require, self._identity_of = require, identity_of
        self._store = appender.store
        self._withdrawing: dict[DelayKey, int] = {}

    async def Schedule(self, request: pb.ScheduleRequest, context: Context) -> pb.ScheduleResponse:
        """See the proto."""
        validation.check_batches([item.batch for item in request.items])
        self._appender.flusher.check()
        now_unix_ms = self._appender.clock.unix_ms()
        owner = owner_of(self._identity_of(context))
        items = [_checked(item, owner, now_unix_ms) async for item in in_steps(request.items)]
        names = {item.checked.header.topic for item in items if isinstance(item, _Item)}
        topics = await self._topics.find_all(names)
        times = await self._remote_times(items, topics)
        outcomes = self._schedule(items, self._topics.with_changes(topics), times)
        if stored := [one.receipt for one in outcomes if isinstance(one, _Stored)]:
            self._changed()
            await self._appender.flusher.wait_until_safe(max(one.next_position for one in stored))
        return pb.ScheduleResponse(outcomes=[self._outcome(one) for one in outcomes])

    async def CancelScheduled(
        self, request: pb.CancelScheduledRequest, context: Context
    ) -> pb.CancelScheduledResponse:
        """See the proto."""
        key = decode_id(request.schedule_id, self._appender.broker)
        position = self._store.schedule.waiting.position(key)
        if self._require is not None and position is not None:
            topic = schedule.read_scheduled_topic(self._store.log, position)
            self._require(context, produce(topic))
        await self._appender.flusher.wait_until_safe(self._withdraw(key, request.schedule_id))
        return pb.CancelScheduledResponse()

    async def ListScheduled(
        self, request: pb.ListScheduledRequest, context: Context
    ) -> pb.ListScheduledResponse:
        """See the proto."""
        self._appender.flusher.check()
        # What was delivered before this listing is visible once the log is safe up to here: so a
        # caller that reads the ends of the queues afterwards misses no message.
        end_position = self._store.log.next_position
        waiting = self._store.schedule.waiting.by_position(request.position, LISTED_MAX)
        answer, size = pb.ListScheduledResponse(), 0
        batches = schedule.read_scheduled(self._store.log, [one.position for one in waiting])
        for entry, batch in zip(waiting, batches, strict=False):
            if isinstance(batch, BatonError):
                raise batch
            answer.batches.add(
                batch=batch.batch,
                deliver_unix_ms=entry.deliver_unix_ms,
                number=entry.schedule_id,
                topic_id=batch.topic_id,
            )
            size += len(batch.batch)
            if size >= LISTED_BYTES:
                break
        listed = len(answer.batches)
        if listed and (listed < len(waiting) or listed == LISTED_MAX):
            answer.next_position = waiting[listed - 1].position + 1
        await self._appender.flusher.wait_until_safe(end_position)
        return answer

    def _withdraw(self, key: DelayKey, schedule_id: str) -> int:
        """Cancel a scheduled batch; return the position up to which the log must be safe.

        If another call has cancelled it already and that is not safe yet, both wait for the same
        position.

        Raises:
            NotScheduled, DiskFull, NotServing: the batch was not cancelled.
        """
        safe = self._store.readable_position
        self._withdrawing = {k: end for k, end in self._withdrawing.items() if end > safe}
        if key in self._withdrawing:
            return self._withdrawing[key]
        if key not in self._store.schedule.waiting:
            raise NotScheduled(f"no scheduled batch has the id {schedule_id}")
        (outcome,) = self._appender.append([checked(encode_withdrawn([key]))], SYSTEM_TOPICS)
        if isinstance(outcome, BatonError):
            raise outcome
        self._withdrawing[key] = outcome.next_position
        return outcome.next_position

    async def _remote_times(
        self, items: Sequence[_Item | BatonError], topics: _Topics
    ) -> dict[int, int | BatonError]:
        """Return the delivery times of repeated batches that are only in the object store.

        They are found by position; instead of one that can't be read now there is the error.
        """
        times: dict[int, int | BatonError] = {}
        for item in items:
            topic = topics[item.checked.header.topic] if isinstance(item, _Item) else None
            if isinstance(item, BatonError) or not isinstance(topic, LocalTopic):
                continue
            header = item.checked.header
            try:
                queue = topic.topic_id, header.queue_id
                earlier = self._store.schedule.earlier(header, queue)
            except BatonError:  # `_schedule` reports it
                continue
            if earlier is None or self._store.log.stored(earlier.position) is None:
                continue
            try:
                time = partial(self._time, earlier, item.deliver_unix_ms)
                times[earlier.position] = await self._tier.reading(time)
            except BatonError as error:
                times[earlier.position] = error
        return times

    def _schedule(
        self,
        items: list[_Item | BatonError],
        topics: _Topics,
        times: Mapping[int, int | BatonError],
    ) -> list[_Stored | BatonError]:
        outcomes: dict[int, _Stored | BatonError] = {}
        run = _ScheduleRun()
        for index, item in enumerate(items):
            try:
                if isinstance(item, BatonError):
                    raise item
                header = item.checked.header
                topic = topics[header.topic]
                if isinstance(topic, BatonError):
                    raise topic
                queue = check_queue(header.topic, topic, header.queue_id)
                if header.producer_id in run.producers:
                    outcomes |= self._write(run)
                    run = _ScheduleRun()
                earlier = self._store.schedule.earlier(header, queue)
                if earlier is None:
                    check_takes(item.checked, topic)
                    run.add(index, item, queue)
                else:
                    time = times.get(earlier.position)
                    if isinstance(time, BatonError):
                        raise time
                    time = self._time(earlier, item.deliver_unix_ms) if time is None else time
                    outcomes[index] = _Stored(earlier, time)
            except BatonError as error:
                outcomes[index] = error
        outcomes |= self._write(run)
        return [outcomes[index] for index in range(len(items))]

    def _write(self, run: _ScheduleRun) -> dict[int, _Stored | BatonError]:
        results = self._appender.append([batch for _, _, batch in run.admitted], SYSTEM_TOPICS)
        return {
            index: _Stored(one, deliver_unix_ms) if isinstance(one, StoreReceipt) else one
            for (index, deliver_unix_ms, _), one in zip(run.admitted, results, strict=True)
        }

    def _time(self, receipt: StoreReceipt, asked_unix_ms: int) -> int:
        """Return the delivery time that an earlier attempt has stored for a batch.

        If the log no longer has it, the time of this attempt is returned.

        Raises:
            DataLoss: the log is damaged there.
            NotCached: the batch has to be fetched from the object store first.
        """
        log = self._store.log
        if receipt.position < log.first_position:
            return asked_unix_ms
        (batch,) = schedule.read_scheduled(log, [receipt.position])
        if isinstance(batch, BatonError):
            raise batch
        return batch.deliver_unix_ms

    def _outcome(self, outcome: _Stored | BatonError) -> pb.ScheduleOutcome:
        metrics = self._appender.metrics
        if isinstance(outcome, BatonError):
            metrics.refused_batches.labels(outcome.reason).inc()
            return pb.ScheduleOutcome(error=error_to_pb(outcome))
        receipt, deliver_unix_ms = outcome.receipt, outcome.deliver_unix_ms
        if receipt.duplicate:
            metrics.duplicate_batches.inc()
        key = deliver_unix_ms, receipt.position
        return pb.ScheduleOutcome(
            receipt=pb.ScheduleReceipt(
                schedule_id=encode_id(key, self._appender.broker),
                deliver_unix_ms=deliver_unix_ms,
                duplicate=receipt.duplicate,
            )
        )


def encode_id(key: DelayKey, broker: str) -> str:
    """Return the schedule id of a batch: the broker, and delivery time and position in hex."""
    deliver_unix_ms, schedule_id = key
    return f"{broker}-{deliver_unix_ms << _POSITION_BITS | schedule_id:x}"


def decode_id(schedule_id: str, broker: str) -> DelayKey:
    """Inverse of `encode_id`.

    Raises:
        InvalidArgument: it is not a schedule id.
        WrongBroker: it is a schedule id of another broker.
    """
    found = _ID.fullmatch(schedule_id)
    if found is None:
        raise InvalidArgument(
            f"{schedule_id[:100]!r} is not a schedule id",
            remedy="Use the schedule id of the receipt unchanged.",
            facts={"field": "schedule_id"},
        )
    if found[1] != broker:
        raise WrongBroker(
            f"the request is for broker {found[1]}, this is broker {broker}",
            facts={"asked": found[1], "actual": broker},
        )
    number = int(found[2], 16)
    return number >> _POSITION_BITS, number & (1 << _POSITION_BITS) - 1


def checked(batch: bytes, owner: int = 0) -> CheckedBatch:
    """Return a batch of the system topic as checked: this node has encoded it."""
    return CheckedBatch(replace(read_header(batch), owner=owner), batch)


@dataclass(frozen=True, slots=True)
class _Item:
    deliver_unix_ms: int
    checked: CheckedBatch


@dataclass(frozen=True, slots=True)
class _Stored:
    receipt: StoreReceipt
    deliver_unix_ms: int


@dataclass(slots=True)
class _ScheduleRun:
    """Batches that are written together: index, time and batch; at most one of each producer."""

    admitted: list[tuple[int, int, CheckedBatch]] = field(default_factory=list)
    producers: set[int] = field(default_factory=set)

    def add(self, index: int, item: _Item, queue: QueueKey) -> None:
        scheduled = ScheduledBatch(item.deliver_unix_ms, queue[0], FIRST, item.checked.batch)
        batch = checked(encode_scheduled(scheduled), item.checked.header.owner)
        self.admitted.append((index, item.deliver_unix_ms, batch))
        if item.checked.header.producer_id:
            self.producers.add(item.checked.header.producer_id)


def _checked(item: pb.ScheduleItem, owner: int, now_unix_ms: int) -> _Item | BatonError:
    try:
        if item.HasField("delay_ms"):
            deliver_unix_ms = deliver_time(now_unix_ms, delay_ms=item.delay_ms)
        else:
            deliver_unix_ms = check_deliver_time(item.deliver_unix_ms, now_unix_ms)
        return _Item(deliver_unix_ms, check_no_outputs(check(item.batch, owner)))
    except BatonError as error:
        return error
