"""Redrives dead letters: sends copies in batched requests, at a bounded rate, each copy once.

A copy is its own batch. Its producer id is derived from the dead letter, so storage stores it once,
also if several redrives send it at the same time; the id of a redrive with `again` is part of it. A
redriven dead letter is then acknowledged for the group that records redrives, so that other
redrives pass it over.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.aio import without_group
from batonmq._common.rpc import error_from_pb
from batonmq._connection.routes import query_route, writable_queues_of
from batonmq._consumer.moved_group import raise_if_moved
from batonmq._core.dead_letters import (
    REDRIVE_ID,
    REDRIVEN_FROM,
    DeadLetter,
    copy_of,
    destination,
    redrive_producer_id,
)
from batonmq._core.queue_sender import ONE_BATCH_EPOCH
from batonmq._core.queues import QueueRef
from batonmq._core.ranges import of_sorted
from batonmq._core.records import STORED_PROPERTIES_BYTES_MAX, BatchBuilder, encode_record
from batonmq._core.retries import Origin, dead_letter_topic, retry_topic, with_origin_key
from batonmq.admin.admin import Admin
from batonmq.admin.message_queries import MessageQueries, StoredMessage
from batonmq.admin.operation import Operation
from batonmq.admin.reports import queue_to_pb
from batonmq.errors import (
    BatonError,
    Fenced,
    GroupNotFound,
    InvalidArgument,
    NotSubscribed,
    NotWritable,
    TopicNotFound,
    Unreachable,
)

LETTERS_PER_STEP = 500
BYTES_PER_STEP = 8 * 1024 * 1024
STEPS_PER_S = 5
"""Steps per second if a rate is set; fewer if a step would have less than one dead letter."""
_KNOWN_WITHIN_S = 10.0
"""Time within which all services know a new group."""
_PAUSE_S = 0.1
COPIES_MAX = 1_000
SEARCHES_AT_ONCE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveOptions:
    """Options of a redrive.

    Attributes:
        operation: Operator and reason; `op_id` is the id of the redrive.
        to_topic: Send to the original topic, so to every group that reads it. By default the
            copies go to the retry topic of the group, so no other group receives them.
        again: Also send dead letters that were redriven before.
        resumed: Whether an earlier run with the same `op_id` may have sent some that are not
            recorded as redriven. Storage is searched for their copies then, because the queue of a
            copy may be another one now: queues of the topic may have been added or moved.
        per_s: Maximum number of dead letters per second; None for no limit.
    """

    operation: Operation
    to_topic: bool = False
    again: bool = False
    resumed: bool = False
    per_s: float | None = None

    def __post_init__(self) -> None:
        if self.per_s is not None and self.per_s <= 0:
            raise InvalidArgument(
                f"per_s must be positive, got {self.per_s}", facts={"field": "per_s"}
            )


@dataclass(frozen=True, slots=True)
class RedriveResult:
    """The result for one dead letter.

    Attributes:
        outcome: `redriven`; `repeated`: an earlier run of this redrive had sent it, or another
            redrive that runs at the same time; `passed_over`: another redrive had sent it before;
            `refused`: see `error`.
        message_id: Id of the copy; empty if there is none.
        queue: Queue of the copy, at `offset`.
    """

    letter: DeadLetter
    outcome: str
    message_id: str = ""
    queue: QueueRef | None = None
    offset: int | None = None
    error: BatonError | None = None


@dataclass(frozen=True, slots=True)
class _RedriveCopy:
    letter: DeadLetter
    queue: QueueRef
    batch: bytes


class Redriver:
    """One run of a redrive."""

    def __init__(self, admin: Admin, group: str, order: RedriveOptions) -> None:
        self._admin, self._group, self._order = admin, group, order
        self._queries = MessageQueries(admin)
        self._queues: dict[str, tuple[QueueRef, ...]] = {}
        self._reset_epochs: dict[QueueRef, int] = defaultdict(int)
        self._record_group_exists = False

    async def run(self, letters: AsyncIterator[DeadLetter]) -> AsyncGenerator[RedriveResult, None]:
        """See `DeadLetters.redrive`."""
        if not self._order.to_topic:
            await self._check_reads_retries()
        count_max, pace = LETTERS_PER_STEP, 0.0
        if self._order.per_s is not None:
            count_max = max(1, min(count_max, int(self._order.per_s / STEPS_PER_S)))
            pace = 1 / self._order.per_s
        loop = asyncio.get_running_loop()
        waiting: list[DeadLetter] = []
        size, next_s = 0, loop.time()
        async for letter in letters:
            if letter.redriven and not self._order.again:
                yield RedriveResult(letter, "passed_over")
                continue
            waiting.append(letter)
            size += len(letter.body)
            if len(waiting) < count_max and size < BYTES_PER_STEP:
                continue
            await asyncio.sleep(max(0.0, next_s - loop.time()))
            next_s = max(next_s, loop.time()) + pace * len(waiting)
            async for done in self._step(waiting):
                yield done
            waiting, size = [], 0
        if waiting:
            await asyncio.sleep(max(0.0, next_s - loop.time()))
            async for done in self._step(waiting):
                yield done

    async def _check_reads_retries(self) -> None:
        topic = retry_topic(self._group)
        group = await self._admin.describe_group(self._group)
        if topic not in {each.topic for each in group.subscriptions}:
            raise NotSubscribed(
                f"group {self._group} does not read {topic}: it would not receive the copies",
                remedy="Start its consumers with send_back, or redrive with to_topic.",
                facts={"group": self._group, "topic": topic},
            )

    async def _step(self, letters: Sequence[DeadLetter]) -> AsyncGenerator[RedriveResult, None]:
        """Send dead letters, record the stored ones, and yield the result of each.

        Raises:
            BatonError: A broker did not answer; what the others have stored is recorded.
        """
        done = await self._sent_before(letters) if self._order.resumed else []
        before = {one.letter.message_id for one in done}
        copies = defaultdict[str, list[_RedriveCopy]](list)
        for letter in letters:
            if letter.message_id in before:
                continue
            try:
                copy = await self._copy(letter)
            except BatonError as error:
                if isinstance(error, Unreachable):
                    raise
                done.append(RedriveResult(letter, "refused", error=error))
            else:
                copies[copy.queue.broker].append(copy)
        failures: list[BatonError] = []

        async def send(broker: str, some: Sequence[_RedriveCopy]) -> None:
            try:
                done.extend(await self._append(broker, some))
            except BatonError as error:
                failures.append(error)

        async with asyncio.TaskGroup() as tasks:
            for broker, some in copies.items():
                tasks.create_task(send(broker, some))
        await self._record([each.letter for each in done if each.outcome != "refused"])
        for each in done:
            yield each
        if failures:
            raise failures[0]

    async def _sent_before(self, letters: Sequence[DeadLetter]) -> list[RedriveResult]:
        """Return the results of dead letters that were sent already.

        With `again` those that other redrives have sent do not count.
        """
        turns = asyncio.Semaphore(SEARCHES_AT_ONCE)

        async def find(letter: DeadLetter) -> RedriveResult | None:
            async with turns:
                for copy in await find_copies(self._queries, letter):
                    own = copy.properties.get(REDRIVE_ID) == self._order.operation.op_id
                    if own or not self._order.again:
                        place = copy.message_id, copy.queue, copy.offset
                        return RedriveResult(letter, "repeated", *place)
            return None

        with without_group():
            async with asyncio.TaskGroup() as tasks:
                calls = [tasks.create_task(find(letter)) for letter in letters]
        return [found for call in calls if (found := call.result()) is not None]

    async def _copy(self, letter: DeadLetter) -> _RedriveCopy:
        order = self._order
        operation = order.operation
        topic = retry_topic(self._group)
        if order.to_topic:
            if letter.origin is None:
                raise InvalidArgument(f"dead letter {letter.message_id} has no origin")
            topic = letter.origin.queue.topic
        once = redrive_producer_id(operation.op_id if order.again else "", letter.message_id)
        queue = destination(letter, await self._queues_of(topic), once)
        message = copy_of(
            letter, operation.op_id, operation.by, operation.reason, to_topic=order.to_topic
        )
        builder = BatchBuilder()
        record = encode_record(message, properties_bytes_max=STORED_PROPERTIES_BYTES_MAX)
        builder.add(message, record)
        batch = builder.encode(
            topic=queue.topic,
            queue_id=queue.queue_id,
            producer=(once, ONE_BATCH_EPOCH),
            sequence=0,
            born_unix_ms=letter.born_unix_ms,
        )
        return _RedriveCopy(letter, queue, batch)

    async def _queues_of(self, topic: str) -> tuple[QueueRef, ...]:
        if topic not in self._queues:
            route = await self._admin.ask(lambda _: query_route(self._admin.directory, topic))
            self._queues[topic] = writable_queues_of(route)
        if not self._queues[topic]:
            raise NotWritable(f"topic {topic} has no writable queue", facts={"topic": topic})
        return self._queues[topic]

    async def _append(self, broker: str, copies: Sequence[_RedriveCopy]) -> list[RedriveResult]:
        request = pb.AppendRequest(
            batches=[copy.batch for copy in copies], durability=pb.DURABILITY_FSYNCED
        )

        async def ask(limit_s: float) -> pb.AppendResponse:
            stub = await self._admin.directory.storage(broker)
            return await stub.Append(request, timeout=limit_s)

        answer = await self._admin.ask(ask)
        return [
            _outcome(copy, outcome) for copy, outcome in zip(copies, answer.outcomes, strict=True)
        ]

    # ---- record of redriven dead letters

    async def _record(self, letters: Sequence[DeadLetter]) -> None:
        """Record durably that dead letters were redriven."""
        offsets = defaultdict[QueueRef, list[int]](list)
        for letter in letters:
            offsets[letter.queue].append(letter.offset)
        if not offsets:
            return
        record_group = dead_letter_topic(self._group)
        if not self._record_group_exists:
            await self._admin.update_group(record_group, ownership="off")
            self._record_group_exists = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _KNOWN_WITHIN_S
        while True:
            refused = await self._commit(record_group, offsets)
            for queue, error in refused.items():
                if isinstance(error, Fenced):
                    self._reset_epochs[queue] = error.detail.reset_epoch or 0
                elif not isinstance(error, GroupNotFound) or loop.time() > deadline:
                    raise error
            if not refused:
                return
            offsets = defaultdict(list, {queue: offsets[queue] for queue in refused})
            await asyncio.sleep(_PAUSE_S)

    async def _commit(
        self, record_group: str, offsets: Mapping[QueueRef, Sequence[int]]
    ) -> dict[QueueRef, BatonError]:
        """Acknowledge offsets; return the error of each rejected queue."""
        items = [
            offsets_pb.CommitItem(
                queue=queue_pb2.GroupQueue(group=record_group, queue=queue_to_pb(queue)),
                reset_epoch=self._reset_epochs[queue],
                acked=[
                    queue_pb2.OffsetRange(first_offset=first, next_offset=end)
                    for first, end in of_sorted(sorted(some))
                ],
            )
            for queue, some in offsets.items()
        ]
        request = offsets_pb.CommitRequest(items=items)

        async def ask(limit_s: float) -> offsets_pb.CommitResponse:
            stub = await self._admin.directory.offsets(record_group)
            answer = await stub.Commit(request, timeout=limit_s)
            raise_if_moved(answer.outcomes)
            return answer

        outcomes = (await self._admin.ask(ask)).outcomes
        return {
            queue: error_from_pb(outcome.error)
            for queue, outcome in zip(offsets, outcomes, strict=True)
            if outcome.HasField("error")
        }


async def find_copies(queries: MessageQueries, letter: DeadLetter) -> list[StoredMessage]:
    """Return the copies of a dead letter that redrives have sent, as far as they are stored."""
    origin = letter.origin or Origin(letter.queue, letter.offset, letter.message_id)
    key = with_origin_key(letter.keys, origin)[-1]
    copies = list[StoredMessage]()
    for topic in {retry_topic(letter.group), origin.queue.topic}:
        with suppress(TopicNotFound):
            found = await queries.with_key(topic, key, count_max=COPIES_MAX)
            copies += (
                one
                for one in found.messages
                if one.properties.get(REDRIVEN_FROM) == letter.message_id
            )
    return copies


def _outcome(copy: _RedriveCopy, outcome: pb.AppendOutcome) -> RedriveResult:
    if outcome.HasField("error"):
        return RedriveResult(copy.letter, "refused", error=error_from_pb(outcome.error))
    receipt, queue = outcome.receipt, copy.queue
    return RedriveResult(
        copy.letter,
        "repeated" if receipt.duplicate else "redriven",
        f"{queue.broker}-{receipt.position:x}-0",
        queue,
        receipt.first_offset,
    )
