"""Reads queues that the caller chooses, from places that the caller chooses."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, SupportsIndex, TypeVar

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.storage.v1 import query_service_pb2 as query_pb
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.aio import only_error
from batonmq._common.rpc import answered, error_from_pb
from batonmq._connection.directory import CALL_TIMEOUT_S, ClientEnvironment, Directory
from batonmq._connection.routes import query_route, queues_of
from batonmq._connection.security import Security
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.moved_group import raise_if_moved, repeat_while_moved
from batonmq._consumer.prefetched_queue import (
    FetchedBatches,
    FetchSource,
    KeptOffsets,
    OutOfRangePolicy,
    PrefetchedQueue,
)
from batonmq._consumer.queue_puller import NODE_UNAVAILABLE
from batonmq._consumer.session import queue_to_pb
from batonmq._core.epochs import SeenEpochs
from batonmq._core.flow_control import ByteBudget, FlowLimits
from batonmq._core.names import check_group
from batonmq._core.queues import QueueRef
from batonmq._core.start_offset import TIMESTAMP_AGE_MS, ConsumeFrom, start_offset
from batonmq._core.subscription import Filter, TagFilter, parse_filter
from batonmq.errors import (
    BatonError,
    Fenced,
    InvalidArgument,
    ModeChanged,
    OffsetAheadOfLog,
    QueueNotFound,
    UnknownQueue,
    Unreachable,
)

T = TypeVar("T")
COMMIT_ITEMS_MAX = 1_024
_PLACE_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class AtTime:
    """The first message stored at or after a time, by the wall clock of storage."""

    unix_ms: int


SeekTarget = int | AtTime | Literal["begin", "end"]
"""An offset, a time, the first message that is kept, or behind the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullerSettings:
    """How a puller behaves.

    Attributes:
        consume_from: Where a queue begins without committed offset and without `seek`: `last`
            (after the messages that are there), `first` or `timestamp`.
        start_unix_ms: For `timestamp`; 0 for half an hour before the start of the puller.
        out_of_range: What happens at an offset that the queue does not hold, because its messages
            are no longer kept or were never there: go on with the `earliest` or behind the
            `latest` message, or `error`: `poll` raises OffsetOutOfRange.
        prefetch_messages_max: Messages of one queue that wait for `poll`.
        prefetch_bytes_max: Bytes of bodies that wait, of all queues together.
        pull_messages_max: Messages taken by one fetch.
        pull_bytes_max: Bytes taken by one fetch, about.
        pull_hold_ms: How long storage holds a fetch that finds nothing; with a group only.
        read_idle_ms: Without a group nothing is held: so long the puller waits at the end of a
            queue before it looks again.
        security: How to use TLS; None for none.
    """

    consume_from: ConsumeFrom = "last"
    start_unix_ms: int = 0
    out_of_range: OutOfRangePolicy = "earliest"
    prefetch_messages_max: int = 1_000
    prefetch_bytes_max: int = 100 * 1024 * 1024
    pull_messages_max: int = 1_000
    pull_bytes_max: int = 1024 * 1024
    pull_hold_ms: int = 15_000
    read_idle_ms: int = 100
    security: Security | None = None


class Puller:
    """Messages on request, for programs that deal out queues themselves. An async context manager.

    With a group its committed offsets are read and moved. The group needs ownership off, as
    nothing tells two pullers of a queue apart: `baton group update NAME --ownership off`. A
    puller is no member: it gets no queue by itself and shows in no list of members.

    Without a group nothing is read or moved but what is in the queues: for programs that keep
    their own offsets.

    A `poll` that has returned messages has moved the position behind them; what is not committed
    comes again to the next puller.

    Args:
        nameserver: host:port of a nameserver; several separated by commas.
        group: Empty for none.
        filters: Topic to expression, as a consumer's; everything of topics that are not named.
        surroundings: Clock, randomness and transport; the real ones by default.
    """

    def __init__(
        self,
        nameserver: str,
        group: str = "",
        settings: PullerSettings | None = None,
        *,
        filters: Mapping[str, str] | None = None,
        surroundings: ClientEnvironment | None = None,
    ) -> None:
        self._settings = settings or PullerSettings()
        outside = (surroundings or ClientEnvironment()).secured(self._settings.security)
        self._group = check_group(group) if group else ""
        self._filters = {topic: parse_filter(text) for topic, text in (filters or {}).items()}
        self._random = outside.random
        self._directory = Directory(nameserver, outside.random, outside.connect)
        start_unix_ms = self._settings.start_unix_ms
        self._begin_unix_ms = start_unix_ms or outside.clock.unix_ms() - TIMESTAMP_AGE_MS
        self._budget = ByteBudget(self._settings.prefetch_bytes_max)
        self._limits = FlowLimits(messages_max=self._settings.prefetch_messages_max, span_max=1)
        self._source = FetchSource(
            self._begin,
            self._extent,
            self._pull if group else self._read,
            0 if group else self._settings.read_idle_ms,
        )
        self._lanes: dict[QueueRef, PrefetchedQueue] = {}
        self._running: dict[QueueRef, asyncio.Task[None]] = {}
        self._reset_epochs: dict[QueueRef, int] = {}
        self._readers: dict[QueueRef, str] = {}
        self._epochs = SeenEpochs()
        self._available = asyncio.Event()
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Puller:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop fetching. Nothing is committed that `commit` was not called for."""
        try:
            for task in self._running.values():
                task.cancel()
            await self._tasks.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            if (only := only_error(group)) is not error:
                raise only from None
        finally:
            await self._directory.close()

    # ---- which queues

    async def queues(self, topic: str) -> tuple[QueueRef, ...]:
        """All queues of a topic, ascending.

        Raises:
            TopicNotFound: there is no such topic.
        """
        return queues_of(await query_route(self._directory, topic))

    @property
    def assignment(self) -> tuple[QueueRef, ...]:
        """The queues that are read, ascending."""
        return tuple(sorted(self._lanes))

    async def assign(self, queues: Iterable[QueueRef]) -> None:
        """Read these queues and no others. Those that stay go on where they are."""
        wanted = set(queues)
        gone = [self._running.pop(queue) for queue in self._lanes.keys() - wanted]
        for queue in self._lanes.keys() - wanted:
            self._lanes.pop(queue).end()
        for task in gone:
            task.cancel()
        if gone:
            await asyncio.wait(gone)
        for queue in sorted(wanted - self._lanes.keys()):
            wish = self._filters.get(queue.topic, TagFilter(None))
            policy = self._settings.out_of_range
            lane = PrefetchedQueue(queue, wish, policy, self._budget, self._available.set)
            self._lanes[queue] = lane
            self._running[queue] = self._tasks.create_task(
                lane.run(self._source, self._limits, self._directory)
            )

    def pause(self, queue: QueueRef) -> None:
        """Return nothing of an assigned queue until `resume`; what was fetched ahead is kept."""
        self._lane(queue).paused = True

    def resume(self, queue: QueueRef) -> None:
        """Return messages of the queue again."""
        self._lane(queue).paused = False
        self._available.set()

    # ---- where in them

    async def seek(self, queue: QueueRef, to: SeekTarget) -> int:
        """Go on with another message of an assigned queue; its offset.

        Raises:
            TopicNotFound, QueueNotFound: the queue is gone.
            InvalidArgument: `to` is no place.
            Unreachable: storage did not answer.
        """
        lane = self._lane(queue)
        if isinstance(to, AtTime):
            offset = await self._search(queue, _checked_place(to.unix_ms))
        elif to in ("begin", "end"):
            extent = await self._extent(queue)
            offset = extent.first_offset if to == "begin" else extent.next_offset
        else:
            offset = _checked_place(to)
        lane.move(offset)
        self._look_again()
        return offset

    async def position(self, queue: QueueRef) -> int:
        """Offset behind the last message that `poll` has returned of an assigned queue.

        Messages that the filter has dropped count as returned. Waits until it is known where the
        queue begins.

        Raises:
            BatonError: the place to begin at could not be found; it says why.
        """
        lane = self._lane(queue)
        await lane.known.wait()
        if lane.position is None:
            assert lane.error is not None
            raise lane.error.with_traceback(None)
        return lane.position

    def lost_count(self, queue: QueueRef) -> int:
        """Messages of an assigned queue that were no longer kept when their turn came, so far."""
        return self._lane(queue).lost_count

    # ---- messages

    async def poll(
        self, timeout_ms: int = 1_000, count_max: int = 500
    ) -> dict[QueueRef, list[ReceivedMessage]]:
        """The next messages by queue, those of one queue in order; empty if none came in time.

        Returns as soon as there are some.

        Args:
            timeout_ms: Wait so long for the first one; 0 takes only what is there.
            count_max: At most so many, of all queues together.

        Raises:
            TopicNotFound, QueueNotFound: a queue is gone: assign the others.
            OffsetOutOfRange: by `out_of_range`; seek.
            ModeChanged: the queues of the group are owned.
            GroupNotFound: there is no such group.
            DataLoss: a stored batch is damaged; seek behind it.
        """
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                while not (found := self._take(count_max)):
                    self._available.clear()
                    await self._available.wait()
        except TimeoutError:
            return {}
        return found

    def _take(self, count_max: int) -> dict[QueueRef, list[ReceivedMessage]]:
        found: dict[QueueRef, list[ReceivedMessage]] = {}
        for queue, lane in list(self._lanes.items()):
            if count_max and not lane.paused and (taken := lane.take(count_max)):
                found[queue] = taken
                count_max -= len(taken)
                self._lanes[queue] = self._lanes.pop(queue)  # the others have their turn first
        if found:
            self._look_again()
            return found
        for lane in self._lanes.values():
            if lane.error is not None and not lane.paused:
                raise lane.error.with_traceback(None)
        return {}

    def _look_again(self) -> None:
        for lane in self._lanes.values():
            lane.changed.set()

    # ---- the group

    async def committed(self, queue: QueueRef) -> int | None:
        """Where the group is on a queue, assigned or not; None if it has no progress there.

        Raises:
            InvalidArgument: the puller has no group.
        """
        self._need_group()

        async def ask() -> offsets_pb.QueryOutcome:
            name, stub = await self._directory.offsets_leader(self._group)
            request = offsets_pb.QueryRequest(
                offsets_epoch=self._epochs.of(name), queues=[self._key(queue)]
            )
            answer = await self._answered(stub.Query(request, timeout=CALL_TIMEOUT_S))
            self._see_epoch(name, answer.offsets_epoch)
            (outcome,) = answer.outcomes
            raise_if_moved([outcome])
            return outcome

        outcome = await repeat_while_moved(self._directory, ask)
        if not outcome.HasField("error"):
            self._reset_epochs[queue] = outcome.progress.reset_epoch
            return outcome.progress.committed_offset
        error = error_from_pb(outcome.error)
        if not isinstance(error, UnknownQueue):
            raise error
        self._reset_epochs[queue] = error.detail.reset_epoch or 0
        return None

    async def commit(self, offsets: Mapping[QueueRef, int] | None = None) -> None:
        """Make it durable that everything below is handled, of the queues that are named.

        Progress never moves back this way; `baton group reset-offsets` does that.

        Args:
            offsets: By default the positions of all assigned queues.

        Raises:
            InvalidArgument: the puller has no group, or an offset is none.
            TopicNotFound, QueueNotFound: there is no such queue; nothing is committed.
            OffsetAheadOfLog: the queue does not reach so far; nothing is committed.
            Fenced: the group was reset on a queue meanwhile: seek to what `committed` says. Other
                queues may be committed.
            ModeChanged: the queues of the group are owned, or it is broadcasting.
            GroupNotFound: there is no such group.
            Unreachable: offsets did not answer; repeating it is harmless.
        """
        self._need_group()
        if offsets is None:
            known = {queue: lane.position for queue, lane in self._lanes.items()}
            offsets = {queue: place for queue, place in known.items() if place is not None}
        offsets = {queue: _checked_place(offset) for queue, offset in offsets.items()}
        await self._check_inside(offsets)
        for queue in offsets.keys() - self._reset_epochs.keys():
            await self.committed(queue)
        items = [
            offsets_pb.CommitItem(
                queue=self._key(queue),
                reset_epoch=self._reset_epochs[queue],
                committed_offset=offset,
            )
            for queue, offset in offsets.items()
        ]
        for start in range(0, len(items), COMMIT_ITEMS_MAX):
            await self._commit(items[start : start + COMMIT_ITEMS_MAX])

    async def _check_inside(self, offsets: Mapping[QueueRef, int]) -> None:
        """Refuse what no queue reaches; of queues that are read, fetching tells how far they do."""
        unseen = [
            queue
            for queue, offset in offsets.items()
            if queue not in self._lanes or offset > self._lanes[queue].end_offset
        ]
        for topic in sorted({queue.topic for queue in unseen}):
            there = Counter(queue.broker for queue in await self.queues(topic))
            for queue in (one for one in unseen if one.topic == topic):
                if queue.queue_id >= (count := there[queue.broker]):
                    raise QueueNotFound(
                        f"there is no queue {queue}",
                        remedy="Commit queues that queues() names.",
                        facts={"topic": topic, "queue_id": queue.queue_id, "queue_count": count},
                    )
        for queue in unseen:
            end = (await self._extent(queue)).next_offset
            if offsets[queue] > end:
                raise OffsetAheadOfLog(
                    f"offset {offsets[queue]} of queue {queue} is beyond its end, {end}",
                    remedy="Commit the offset behind the last message that is handled.",
                    facts={"offset": offsets[queue], "next_offset": end},
                )
            if queue in self._lanes:
                self._lanes[queue].end_offset = end

    async def _commit(self, items: list[offsets_pb.CommitItem]) -> None:
        async def ask() -> Sequence[offsets_pb.CommitOutcome]:
            name, stub = await self._directory.offsets_leader(self._group)
            request = offsets_pb.CommitRequest(offsets_epoch=self._epochs.of(name), items=items)
            answer = await self._answered(stub.Commit(request, timeout=CALL_TIMEOUT_S))
            self._see_epoch(name, answer.offsets_epoch)
            raise_if_moved(answer.outcomes)
            return answer.outcomes

        for outcome in await repeat_while_moved(self._directory, ask):
            if outcome.HasField("error"):
                error = error_from_pb(outcome.error)
                if isinstance(error, Fenced):
                    error.remedy = "Seek to what committed() says, and go on from there."
                raise self._with_remedy(error)

    def _see_epoch(self, offsets_set: str, epoch: int) -> None:
        if not self._epochs.saw(offsets_set, epoch):
            raise Unreachable("an offsets node of an older epoch has answered")

    def _key(self, queue: QueueRef) -> queue_pb2.GroupQueue:
        return queue_pb2.GroupQueue(group=self._group, queue=queue_to_pb(queue))

    def _need_group(self) -> None:
        if not self._group:
            raise InvalidArgument(
                "this puller has no group",
                remedy="Name one, or keep offsets yourself.",
                facts={"field": "group"},
            )

    # ---- storage

    async def _begin(self, queue: QueueRef) -> int:
        committed = await self.committed(queue) if self._group else None
        if committed is not None:
            return committed
        place, found = self._settings.consume_from, 0
        if place == "timestamp":
            found = await self._search(queue, self._begin_unix_ms)
        extent = await self._extent(queue)
        return start_offset(place, extent.first_offset, extent.next_offset, found)

    async def _search(self, queue: QueueRef, unix_ms: int) -> int:
        request = query_pb.SearchOffsetRequest(queue=queue_to_pb(queue), unix_ms=unix_ms)
        stub = await self._directory.query(queue.broker)
        answer = await self._answered(stub.SearchOffset(request, timeout=CALL_TIMEOUT_S))
        return answer.offset

    async def _extent(self, queue: QueueRef) -> KeptOffsets:
        request = pb.QueryOffsetsRequest(queues=[queue_to_pb(queue)])
        stub = await self._directory.storage(queue.broker)
        answer = await self._answered(stub.QueryOffsets(request, timeout=CALL_TIMEOUT_S))
        (outcome,) = answer.outcomes
        if outcome.HasField("error"):
            raise error_from_pb(outcome.error)
        return KeptOffsets(outcome.offsets.first_offset, outcome.offsets.next_offset)

    async def _read(
        self, queue: QueueRef, offset: int, wanted: Filter, bytes_max: int
    ) -> FetchedBatches:
        request = query_pb.ReadRequest(
            queue=queue_to_pb(queue),
            offset=offset,
            expression=wanted.canonical(),
            bytes_max=min(bytes_max, self._settings.pull_bytes_max),
            messages_max=self._settings.pull_messages_max,
        )
        stub = await self._directory.query(queue.broker)
        answer = await self._answered(stub.Read(request, timeout=CALL_TIMEOUT_S))
        extent = KeptOffsets(answer.queue_first_offset, answer.queue_next_offset)
        return FetchedBatches(tuple(answer.batches), answer.next_offset, 0, extent)

    async def _pull(
        self, queue: QueueRef, offset: int, wanted: Filter, bytes_max: int
    ) -> FetchedBatches:
        hold_ms = self._settings.pull_hold_ms
        request = pb.PullRequest(
            queue=self._key(queue),
            offset=offset,
            pull_id=self._random.getrandbits(63),
            expression=wanted.canonical(),
            bytes_max=min(bytes_max, self._settings.pull_bytes_max),
            messages_max=self._settings.pull_messages_max,
            hold_ms=hold_ms,
        )
        reader = self._readers.get(queue, "")
        stub = await self._directory.reader(queue.broker, reader)
        limit_s = hold_ms / 1000 + CALL_TIMEOUT_S
        try:
            answer = await self._answered(stub.Pull(request, timeout=limit_s))
        except NODE_UNAVAILABLE:
            self._readers[queue] = self._directory.next_reader(queue.broker, reader)
            raise
        self._readers[queue] = answer.next_node_id
        extent = KeptOffsets(answer.queue_first_offset, answer.queue_next_offset)
        # An answer to a pull that found nothing names no place.
        next_offset = max(answer.next_offset, offset)
        return FetchedBatches(tuple(answer.batches), next_offset, answer.lost_count, extent)

    def _lane(self, queue: QueueRef) -> PrefetchedQueue:
        lane = self._lanes.get(queue)
        if lane is None:
            raise InvalidArgument(
                f"queue {queue} is not assigned",
                remedy="Name it in assign() first.",
                facts={"field": "queue"},
            )
        return lane

    async def _answered(self, call: Awaitable[T]) -> T:
        try:
            return await answered(call)
        except BatonError as error:
            self._directory.invalidate(error)
            self._with_remedy(error)
            raise

    def _with_remedy(self, error: BatonError) -> BatonError:
        if isinstance(error, ModeChanged):
            error.remedy = (
                f"A puller needs a clustering group without ownership: baton group update "
                f"{self._group} --ownership off, or another group."
            )
        return error


def _checked_place(place: SupportsIndex | str) -> int:
    """A place that fits into a request."""
    number = place.__index__() if isinstance(place, SupportsIndex) else -1
    if not 0 <= number <= _PLACE_MAX:
        raise InvalidArgument(
            f"{place!r} is no offset and no time: these go from 0 to 2^63 - 1",
            remedy='Name an offset, AtTime(unix_ms=...), "begin" or "end".',
            facts={"field": "to"},
        )
    return number
