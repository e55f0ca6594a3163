"""The puller: reads queues and offsets that the caller chooses."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Literal, SupportsIndex, TypeVar

from batonmq._common import timeouts
from batonmq._common.aio import only_error
from batonmq._common.client_block import ClientBlock
from batonmq._connection.directory import CALL_TIMEOUT_S, ClientEnvironment, Directory
from batonmq._connection.routes import query_route, queues_of
from batonmq._connection.security import Security
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.prefetched_queue import (
    FetchedBatches,
    FetchSource,
    OutOfRangePolicy,
    PrefetchedQueue,
)
from batonmq._consumer.reader_calls import FetchLimits, ReaderCalls, ReadProgress
from batonmq._core.flow_control import ByteBudget, FlowLimits
from batonmq._core.names import check_group
from batonmq._core.queues import QueueRef
from batonmq._core.setting_checks import check_choice, check_positive
from batonmq._core.start_offset import TIMESTAMP_AGE_MS, ConsumeFrom, start_offset
from batonmq._core.subscription import Filter, TagFilter, parse_filter
from batonmq.errors import (
    BatonError,
    GroupMoved,
    InvalidArgument,
    NotLeader,
    OffsetAheadOfLog,
    OldEpoch,
    QueueNotFound,
    Retry,
)

T = TypeVar("T")
_OFFSET_MAX = (1 << 63) - 1
_REPEAT_S = 2 * CALL_TIMEOUT_S
"""Time limit of repetitions. An RPC that has timed out is repeated at least once."""
_OTHER_NODE = (NotLeader, OldEpoch, GroupMoved)
"""Refusals after which another node may serve the call."""
_ENDS = ("begin", "end")


@dataclass(frozen=True, slots=True)
class AtTime:
    """Position of the first message stored at or after a time, by storage's wall clock."""

    unix_ms: int


SeekTarget = int | AtTime | Literal["begin", "end"]
"""An offset, a time, the first message that is kept, or the end behind the last message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullerSettings:
    """Settings of a puller.

    Attributes:
        consume_from: Where a queue begins without committed offset and without `seek`: `last`
            (behind the messages that exist), `first` or `timestamp`.
        start_unix_ms: Start time for `timestamp`; 0 for half an hour before the puller was created.
        out_of_range: What to do at an offset that the queue does not hold, because its messages
            were removed or never existed: continue with the `earliest` message, or behind the
            `latest` one, or `error`: `poll` raises OffsetOutOfRange.
        prefetch_messages_max: Messages of one queue that wait for `poll`, at most.
        prefetch_bytes_max: Bytes of bodies that wait for `poll`, of all queues together, at most.
        pull_messages_max: Messages of one fetch, at most.
        pull_bytes_max: Bytes of one fetch, about.
        pull_hold_ms: How long storage holds a fetch that finds no message (long poll); only with a
            group.
        read_idle_ms: How long a puller without a group waits at the end of a queue before the next
            fetch.
        security: TLS settings; None for plain connections.

    Raises:
        InvalidArgument: A value is not possible, such as a limit of 0.
    """

    consume_from: ConsumeFrom = "last"
    start_unix_ms: int = 0
    out_of_range: OutOfRangePolicy = "earliest"
    prefetch_messages_max: int = 2_000
    prefetch_bytes_max: int = 100 * 1024 * 1024
    pull_messages_max: int = 2_000
    pull_bytes_max: int = 1024 * 1024
    pull_hold_ms: int = 15_000
    read_idle_ms: int = 100
    security: Security | None = None

    def __post_init__(self) -> None:
        """Check the settings."""
        check_choice("consume_from", self.consume_from, ("last", "first", "timestamp"))
        check_choice("out_of_range", self.out_of_range, ("earliest", "latest", "error"))
        check_positive(
            self,
            "prefetch_messages_max",
            "prefetch_bytes_max",
            "pull_messages_max",
            "pull_bytes_max",
            "pull_hold_ms",
            "read_idle_ms",
        )


class _RepeatedCalls:
    """Repeats the RPCs of one method call while no node serves them.

    The time limit is `_REPEAT_S` for all of them together. An RPC that is in flight at the limit
    still ends.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory, self._now_s = directory, asyncio.get_running_loop().time
        self._end_s = self._now_s() + _REPEAT_S

    async def answer(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the answer of a call.

        Raises:
            BatonError: The call was refused; or the error of the last try.
        """
        failures = 0
        while True:
            try:
                return await call()
            except BatonError as error:
                unserved = error.retry is Retry.SAME_CALL or isinstance(error, _OTHER_NODE)
                if not unserved or self._now_s() >= self._end_s:
                    raise
                await self._directory.pause(error, failures)
                failures += 1


class Puller:
    """Returns messages on request, for programs that assign queues themselves.

    Use it as an async context manager: `assign` queues, `poll` messages, `commit` offsets.

    With a group, the puller reads and commits the group's offsets. The group must have ownership
    off, because offsets can't tell two pullers of one queue apart: `baton group update NAME
    --ownership off`. A puller is not a member: no queue is assigned to it, and no list of members
    shows it.

    Without a group, the puller reads the queues only; the program keeps its own offsets.

    `poll` moves the position behind the messages that it returns. Messages that are not committed
    are delivered again to the next puller.

    Args:
        nameserver: host:port of a nameserver; several separated by commas.
        group: Name of the group; empty for none.
        filters: Topic to expression, as a consumer's subscriptions; topics that are not named are
            not filtered.
        environment: Clock, random numbers and transport, for tests.
    """

    def __init__(
        self,
        nameserver: str,
        group: str = "",
        settings: PullerSettings | None = None,
        *,
        filters: Mapping[str, str] | None = None,
        environment: ClientEnvironment | None = None,
    ) -> None:
        self._settings = settings or PullerSettings()
        secured = (environment or ClientEnvironment()).secured(self._settings.security)
        self._group = check_group(group) if group else ""
        self._filters = {topic: parse_filter(text) for topic, text in (filters or {}).items()}
        self._directory = Directory(nameserver, secured.random, secured.connect)
        self._calls = ReaderCalls(self._directory, secured, self._group)
        start_unix_ms = self._settings.start_unix_ms
        self._start_at_unix_ms = start_unix_ms or secured.clock.unix_ms() - TIMESTAMP_AGE_MS
        self._budget = ByteBudget(self._settings.prefetch_bytes_max)
        self._limits = FlowLimits(messages_max=self._settings.prefetch_messages_max, span_max=1)
        self._source = FetchSource(
            self._start,
            self._calls.kept,
            self._pull if group else self._read,
            0 if group else self._settings.read_idle_ms,
        )
        self._queues: dict[QueueRef, PrefetchedQueue] = {}
        self._tasks_by_queue: dict[QueueRef, asyncio.Task[None]] = {}
        self._reset_epochs: dict[QueueRef, int] = {}
        self._available = asyncio.Event()
        self._block, self._tasks = ClientBlock("Puller"), asyncio.TaskGroup()

    async def __aenter__(self) -> Puller:
        self._block.enter()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop fetching. Commits nothing: that is the caller's decision."""
        try:
            for task in self._tasks_by_queue.values():
                task.cancel()
            await self._tasks.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            if (only := only_error(group)) is not error:
                raise only from None
        finally:
            await self._directory.close()

    # ---- which queues

    async def queues(self, topic: str) -> tuple[QueueRef, ...]:
        """Return all queues of a topic, ascending.

        Raises:
            TopicNotFound: the topic does not exist.
            Unreachable: no nameserver has answered for about 10 s.
        """
        calls = _RepeatedCalls(self._directory)
        return queues_of(await calls.answer(partial(query_route, self._directory, topic)))

    @property
    def assignment(self) -> tuple[QueueRef, ...]:
        """The queues that this puller reads, ascending."""
        return tuple(sorted(self._queues))

    async def assign(self, queues: Iterable[QueueRef]) -> None:
        """Read these queues and no others. Queues that were assigned before keep their position.

        Raises:
            InvalidArgument: The puller is not in its block.
        """
        self._block.check()
        wanted = set(queues)
        gone = [self._tasks_by_queue.pop(queue) for queue in self._queues.keys() - wanted]
        for queue in self._queues.keys() - wanted:
            self._queues.pop(queue).end()
        for task in gone:
            task.cancel()
        if gone:
            await asyncio.wait(gone)
        for queue in sorted(wanted - self._queues.keys()):
            prefetched = PrefetchedQueue(
                queue,
                self._filters.get(queue.topic, TagFilter(None)),
                self._settings.out_of_range,
                self._budget,
                self._available.set,
            )
            self._queues[queue] = prefetched
            self._reset_epochs.pop(queue, None)
            self._tasks_by_queue[queue] = self._tasks.create_task(
                prefetched.run(self._source, self._limits, self._directory)
            )

    def pause(self, queue: QueueRef) -> None:
        """Leave an assigned queue out of `poll` until `resume`; fetched messages are kept."""
        self._assigned(queue).paused = True

    def resume(self, queue: QueueRef) -> None:
        """Include a paused queue in `poll` again."""
        self._assigned(queue).paused = False
        self._available.set()

    # ---- where in them

    async def seek(self, queue: QueueRef, to: SeekTarget) -> int:
        """Move the position of an assigned queue; return the new offset.

        With a group, the first seek of a queue after `assign` asks offsets, so that a commit is
        refused if an operator resets the group after it.

        Raises:
            TopicNotFound, QueueNotFound: the queue does not exist any more.
            InvalidArgument: `to` is not a valid offset, time or name; or the queue is not assigned.
            Unreachable: no node has served it for about 10 s; or the error of the last one, such as
                NotLeader, NotServing, NoQuorum, OldEpoch or Throttled.
        """
        self._assigned(queue)
        offset = None if isinstance(to, AtTime) or to in _ENDS else _checked_number(to)
        unix_ms = _checked_number(to.unix_ms) if isinstance(to, AtTime) else 0
        calls = _RepeatedCalls(self._directory)
        if self._group and queue not in self._reset_epochs:
            # A commit names the reset epoch of this moment, so a later reset makes it fail.
            await calls.answer(partial(self._committed, queue))
        if isinstance(to, AtTime):
            offset = await calls.answer(partial(self._calls.search, queue, unix_ms))
        elif offset is None:
            kept = await calls.answer(partial(self._calls.kept, queue))
            offset = kept.first_offset if to == "begin" else kept.next_offset
        self._assigned(queue).move(offset)
        self._notify_queues()
        return offset

    async def position(self, queue: QueueRef) -> int:
        """Return the offset behind the last message that `poll` returned of an assigned queue.

        Messages that the filter dropped count as returned. Waits until the start offset is known.

        Raises:
            BatonError: the start offset could not be found.
            InvalidArgument: the queue is not assigned.
        """
        assigned = self._assigned(queue)
        await assigned.known.wait()
        if assigned.position is None:
            assert assigned.error is not None
            raise assigned.error.with_traceback(None)
        return assigned.position

    def lost_count(self, queue: QueueRef) -> int:
        """Return how many messages of an assigned queue were removed before they were fetched."""
        return self._assigned(queue).lost_count

    # ---- messages

    async def poll(
        self, timeout_ms: int = 1_000, count_max: int = 500
    ) -> dict[QueueRef, list[ReceivedMessage]]:
        """Return the next messages by queue, in order per queue; empty if none arrived in time.

        Returns as soon as there is at least one message. The error of a queue is raised once, and
        then again whenever no other queue has a message.

        Args:
            timeout_ms: How long to wait for the first message; 0 returns only fetched messages.
            count_max: Messages of all queues together, at most.

        Raises:
            TopicNotFound, QueueNotFound: a queue does not exist any more; assign the others.
            OffsetOutOfRange: the offset is not kept, and `out_of_range` is `error`; seek.
            ModeChanged: the group has ownership on.
            GroupNotFound: the group does not exist.
            DataLoss: a stored batch is damaged; seek behind it.
        """
        try:
            async with timeouts.timeout(timeout_ms / 1000):
                while not (messages := self._take(count_max)):
                    self._available.clear()
                    await self._available.wait()
        except TimeoutError:
            return {}
        return messages

    def _take(self, count_max: int) -> dict[QueueRef, list[ReceivedMessage]]:
        # An error is raised at once: other queues may have messages for ever.
        self._raise_errors(again=False)
        messages: dict[QueueRef, list[ReceivedMessage]] = {}
        for queue, assigned in list(self._queues.items()):
            if count_max and not assigned.paused and (taken := assigned.take(count_max)):
                messages[queue] = taken
                count_max -= len(taken)
                self._queues[queue] = self._queues.pop(queue)  # behind the others in the next poll
        if messages:
            self._notify_queues()
        else:
            self._raise_errors(again=True)
        return messages

    def _raise_errors(self, *, again: bool) -> None:
        for assigned in self._queues.values():
            if not assigned.paused:
                assigned.raise_error(again=again)

    def _notify_queues(self) -> None:
        for assigned in self._queues.values():
            assigned.changed.set()

    # ---- the group

    async def committed(self, queue: QueueRef) -> int | None:
        """Return the group's committed offset on a queue, assigned or not; None without progress.

        Raises:
            InvalidArgument: the puller has no group.
            Unreachable: no node has served it for about 10 s; or the error of the last one, such as
                NotServing, NoQuorum, OldEpoch or Throttled.
        """
        self._need_group()
        return await _RepeatedCalls(self._directory).answer(partial(self._committed, queue))

    async def _committed(self, queue: QueueRef) -> int | None:
        committed, self._reset_epochs[queue] = await self._calls.committed(queue)
        return committed

    async def commit(self, offsets: Mapping[QueueRef, int] | None = None) -> None:
        """Commit that every message below these offsets is handled.

        Committed progress never goes back this way; `baton group reset-offsets` does that.

        Args:
            offsets: Offset by queue; by default the positions of all assigned queues.

        Raises:
            InvalidArgument: the puller has no group, or an offset is not from 0 to 2^63 - 1.
            TopicNotFound, QueueNotFound: a queue does not exist; nothing is committed.
            OffsetAheadOfLog: an offset is beyond the end of its queue; nothing is committed.
            Fenced: an operator reset the group on a queue; seek to `committed`. Other queues may
                be committed.
            ModeChanged: the group has ownership on, or is broadcasting.
            GroupNotFound: the group does not exist.
            Unreachable: no node has served it for about 10 s; or the error of the last one, such as
                NotServing, NoQuorum, OldEpoch or DiskFull. The commit may be repeated.
        """
        self._need_group()
        if offsets is None:
            known = {queue: assigned.position for queue, assigned in self._queues.items()}
            offsets = {queue: offset for queue, offset in known.items() if offset is not None}
        offsets = {queue: _checked_number(offset) for queue, offset in offsets.items()}
        calls = _RepeatedCalls(self._directory)
        await self._check_not_ahead(offsets, calls)
        for queue in offsets.keys() - self._reset_epochs.keys():
            await calls.answer(partial(self._committed, queue))
        progress = [
            (queue, ReadProgress(offset, self._reset_epochs[queue]))
            for queue, offset in offsets.items()
        ]
        await calls.answer(partial(self._calls.commit, progress))

    async def _check_not_ahead(
        self, offsets: Mapping[QueueRef, int], calls: _RepeatedCalls
    ) -> None:
        """Raise if an offset is beyond the end of its queue.

        Storage is asked only about offsets that no fetch has seen.
        """
        unseen = [
            queue
            for queue, offset in offsets.items()
            if queue not in self._queues or offset > self._queues[queue].end_offset
        ]
        for topic in sorted({queue.topic for queue in unseen}):
            counts = Counter(queue.broker for queue in await self.queues(topic))
            for queue in (one for one in unseen if one.topic == topic):
                if queue.queue_id >= (count := counts[queue.broker]):
                    raise QueueNotFound(
                        f"queue {queue} does not exist",
                        remedy="Commit queues that queues() returns.",
                        facts={"topic": topic, "queue_id": queue.queue_id, "queue_count": count},
                    )
        for queue in unseen:
            end = (await calls.answer(partial(self._calls.kept, queue))).next_offset
            if offsets[queue] > end:
                raise OffsetAheadOfLog(
                    f"offset {offsets[queue]} of queue {queue} is beyond its end, {end}",
                    remedy="Commit the offset after that of the last message that was handled.",
                    facts={"offset": offsets[queue], "next_offset": end},
                )
            if queue in self._queues:
                self._queues[queue].end_offset = end

    def _need_group(self) -> None:
        if not self._group:
            raise InvalidArgument(
                "this puller has no group",
                remedy="Give the puller a group, or keep the offsets in the program.",
                facts={"field": "group"},
            )

    # ---- storage

    async def _start(self, queue: QueueRef) -> int:
        committed = await self._committed(queue) if self._group else None
        if committed is not None:
            return committed
        start, searched_offset = self._settings.consume_from, 0
        if start == "timestamp":
            searched_offset = await self._calls.search(queue, self._start_at_unix_ms)
        kept = await self._calls.kept(queue)
        return start_offset(start, kept.first_offset, kept.next_offset, searched_offset)

    async def _read(
        self, queue: QueueRef, offset: int, wanted: Filter, bytes_max: int
    ) -> FetchedBatches:
        return await self._calls.read(queue, offset, wanted, self._fetch_limits(bytes_max))

    async def _pull(
        self, queue: QueueRef, offset: int, wanted: Filter, bytes_max: int
    ) -> FetchedBatches:
        hold_ms = self._settings.pull_hold_ms
        return await self._calls.pull(queue, offset, wanted, self._fetch_limits(bytes_max), hold_ms)

    def _fetch_limits(self, bytes_max: int) -> FetchLimits:
        return FetchLimits(
            min(bytes_max, self._settings.pull_bytes_max), self._settings.pull_messages_max
        )

    def _assigned(self, queue: QueueRef) -> PrefetchedQueue:
        assigned = self._queues.get(queue)
        if assigned is None:
            raise InvalidArgument(
                f"queue {queue} is not assigned",
                remedy="Call assign() with it first.",
                facts={"field": "queue"},
            )
        return assigned


def _checked_number(value: SupportsIndex | str) -> int:
    """Return an offset or a time as an int that fits into a request."""
    number = value.__index__() if isinstance(value, SupportsIndex) else -1
    if not 0 <= number <= _OFFSET_MAX:
        raise InvalidArgument(
            f"{value!r} is not a valid offset or time: both are from 0 to 2^63 - 1",
            remedy='Give an offset, AtTime(unix_ms=...), "begin" or "end".',
            facts={"field": "to"},
        )
    return number
