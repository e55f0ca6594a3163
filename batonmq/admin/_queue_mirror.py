"""Copies one queue to its queue in the target, and keeps the map of their offsets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Literal

from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.backoff import Backoff
from batonmq._common.rpc import error_from_pb
from batonmq._core.mirror_map import OffsetMap, OffsetRun
from batonmq._core.mirror_marks import (
    MirrorMark,
    learned_mark,
    mark_of,
    marked_batch,
    next_mark,
)
from batonmq._core.queues import QueueRef
from batonmq._core.ranges import subtract
from batonmq.admin._queue_log import QueueLog, Reading
from batonmq.errors import (
    BatonError,
    DuplicateSequence,
    InvalidArgument,
    OffsetAheadOfLog,
    ProducerFenced,
    Retry,
    SequenceGap,
    Unreachable,
)

log = logging.getLogger(__name__)

APPEND_BATCHES_MAX = 1_024
APPEND_BYTES_MAX = 8 * 1024 * 1024
APPEND_TIMEOUT_S = 15.0
ONCE_FAILURES_MAX = 30
"""Failures without progress after which a mirror that shall end gives up."""
QUIET_FAILURES = 3
"""A request in transit explains so many rejected batches in a row."""
BACKOFF = Backoff(first_ms=50, delay_ms_max=2_000)
_BEHIND = (DuplicateSequence, SequenceGap, ProducerFenced)
"""Errors which say that the target has another end than this mirror knows."""


Start = Literal["", "first", "end"]
"""Where a mirror begins if the target can't say how far it is; empty for nowhere."""


class QueueMirror:
    """Copies one queue.

    What the target has is read from its log, at the start and after each error. So a repeated start
    needs no other state, and a batch that was stored without an answer is found.

    Attributes:
        source, target: The queues.
        offset: Offset in the source of the next message to copy or to skip.
        source_end: Last known end of the source.
        target_first: Last known first offset of the target.
        forward: Map of the messages that were copied.
        own: Map of the messages of the target that another mirror has copied to the source.
        copied_count, removed_count, skipped_count: Messages since the start: copied; removed by the
            retention of the source before they were copied; of other clusters, and so not copied.
        problem: Why the last attempt failed; empty if it did not.
    """

    def __init__(
        self,
        logs: tuple[QueueLog, QueueLog],
        queues: tuple[QueueRef, QueueRef],
        ids: tuple[int, int],
        turns: asyncio.Semaphore,
        *,
        include_mirrored: bool = False,
        start: Start = "",
    ) -> None:
        self._source_log, self._target_log = logs
        self.source, self.target = queues
        self._source_id, self._target_id = ids
        self._turns, self._random = turns, logs[1].admin.directory.random
        self._include_mirrored, self._start = include_mirrored, start
        self.offset = self.source_end = self.target_first = 0
        self.forward, self.own = OffsetMap(), OffsetMap()
        self.copied_count = self.removed_count = self.skipped_count = 0
        self.problem = ""
        self.grown = asyncio.Event()
        self._last: MirrorMark | None = None
        self._learned: MirrorMark | None = None
        self._fence_epoch: int | None = None
        self._marked = self._begun = False
        self._target_seen = 0
        self._handled: int | None = None
        self._known = self._lost = False

    @property
    def lag(self) -> int:
        """Messages of the source that were not copied or skipped yet, as far as it is known."""
        return max(0, self.source_end - self.offset)

    async def open(self, handled_offset: int | None) -> None:
        """Find out where to continue, and read the map of what is not handled in the target.

        Args:
            handled_offset: Groups have handled all messages of the target below it; None if no
                progress is translated.
        """
        self._handled = handled_offset
        self.forward, self.own, self.offset, self._last = OffsetMap(), OffsetMap(), 0, None
        self._marked = self._begun = False
        first, end = await self._target_log.extent(self.target)
        begin = end
        if handled_offset is not None:
            begin = min(max(first, handled_offset), end)
        self._target_seen = begin
        await self._find_end()
        if self._last is not None and handled_offset is None:
            return
        found = await self._target_log.last_marked(self.target, [self._source_id], first, begin)
        if found is not None and self._last is None:
            self._continue_after(found.mark)
        if handled_offset is not None and self._last is not None:
            # What the target has produced since then is behind that batch in the source, too.
            await self._find_own(0 if found is None else found.mark.next_offset)

    async def run(self, until_offset: int | None = None) -> None:
        """Copy until cancelled, or until all messages below an offset are copied.

        Raises:
            BatonError: The copy shall end, and fails again and again, or for good.
        """
        failures = 0
        while until_offset is None or self.offset < until_offset:
            self.grown.clear()
            try:
                async with self._turns:
                    moved = await self._step()
            except BatonError as error:
                self._known = False
                self._lost = self._lost or isinstance(error, SequenceGap)
                self._note(error, failures)
                for_good = error.retry is Retry.NEVER and not isinstance(error, _BEHIND)
                if until_offset is not None and (for_good or failures >= ONCE_FAILURES_MAX):
                    raise
                delay_ms = BACKOFF.delay_ms(failures, self._random, error.retry_after_ms)
                await asyncio.sleep(delay_ms / 1000)
                failures += 1
                continue
            failures, self.problem = 0, ""
            if not moved and (until_offset is None or self.offset < until_offset):
                await self.grown.wait()

    def note_end(self, end: int) -> None:
        """Note the end of the source; wake the copy if there is something new."""
        self.source_end = end
        if end > self.offset:
            self.grown.set()

    def _note(self, error: BatonError, failures: int) -> None:
        if isinstance(error, _BEHIND) and failures < QUIET_FAILURES:
            log.debug("reading the end again queue=%s: %s", self.target, error)
            return
        problem = f"{error.reason}: {error.message}"
        if problem != self.problem:
            log.warning("queue not mirrored, trying again queue=%s: %s", self.source, problem)
        self.problem = problem

    # ---- where to continue

    async def _find_end(self) -> None:
        """Read from the target what is stored behind the part that is known."""
        first, end = await self._target_log.extent(self.target)
        begin = min(max(first, self._target_seen), end)
        async for run in self._target_log.marked_runs(self.target, self._source_id, begin, end):
            self.forward.add(run.offset_run())
            self._continue_after(run.mark)
        self.target_first, self._target_seen = first, end

    def _continue_after(self, mark: MirrorMark) -> None:
        self._last, self._marked, self._learned, self._fence_epoch = mark, True, None, None
        self.offset = max(self.offset, mark.next_offset)

    async def _find_own(self, offset: int) -> None:
        """Find the messages of the target in the source, from an offset to where it continues."""
        first, _ = await self._source_log.extent(self.source)
        begin = max(first, offset)
        unknown = subtract([(begin, self.offset)] if begin < self.offset else [],
                           self.forward.source_ranges())  # fmt: skip
        for part in unknown:
            async for run in self._source_log.marked_runs(self.source, self._target_id, *part):
                self.own.add(run.offset_run(reverse=True))

    async def _find_place(self) -> None:
        """Find out again where to continue, after an error.

        Raises:
            OffsetAheadOfLog: The source ends before what the target has of it.
            InvalidArgument: Retention of the target may have removed what says how far it is.
        """
        _, end = await self._target_log.extent(self.target)
        if self._lost or end < self._target_seen:  # an unclean election of the target
            await self.open(self._handled)
            self._lost = False
        else:
            await self._find_end()
        first, end = await self._source_log.extent(self.source)
        if not self._marked:
            self._begin(first, end)
        if self.offset > end:
            raise OffsetAheadOfLog(
                f"queue {self.source} ends at {end}, and the target has its messages up to "
                f"{self.offset}: the source has lost messages",
                remedy="The source had an unclean election. Keep the messages of the target, and "
                "mirror to a new topic.",
                facts={"offset": self.offset, "end": end},
            )
        self._known = True

    def _begin(self, first: int, end: int) -> None:
        """Choose where to begin in a source, as the target has none of its messages."""
        if self._learned is not None:
            self._last, self.offset, self._begun = self._learned, self._learned.first_offset, True
        if self._begun:
            return
        if self.target_first and first < end and not self._start:
            raise InvalidArgument(
                f"the target has no message of queue {self.source}, and retention has removed "
                f"{self.target_first} messages there: it is not known what was mirrored",
                remedy="Add --start=first to copy what the source still has, or --start=end to "
                "copy only new messages. The target remembers for 7 days what was mirrored: these "
                "messages are neither copied again nor left out.",
                facts={"field": "start", "first": first, "end": end},
            )
        self.offset = end if self.target_first and self._start == "end" else first
        self._begun = True

    # ---- one step

    async def _step(self) -> bool:
        """Copy one reading; return whether there was something."""
        if not self._known:
            await self._find_place()
        reading = await self._source_log.read(self.source, self.offset)
        if not reading.batches and reading.next_offset <= self.offset:
            return False
        own = await self._source_log.whole_run(
            self.source, reading, self._target_id, self.source_end
        )
        if own is not None and own.first_offset == self.offset:
            self.own.add(own.offset_run(reverse=True))
            self.skipped_count += own.mark.message_count
            self.offset = own.next_offset
        else:
            await self._copy(reading)
        return True

    async def _copy(self, reading: Reading) -> None:
        """Append what was produced in the source, and skip what other mirrors have brought."""
        waiting: list[tuple[bytes, MirrorMark]] = []
        size, last, offset = 0, self._last, self.offset
        for header, raw in reading.batches:
            if header.next_offset <= offset:
                continue
            removed, offset = max(0, header.first_offset - offset), header.next_offset
            self.removed_count += removed
            if removed:
                log.warning(
                    "%d messages were removed before they were mirrored queue=%s next_offset=%d",
                    removed, self.source, header.first_offset,
                )  # fmt: skip
            found = mark_of(header)
            is_own = found is not None and found.source_id == self._target_id
            if found is not None and (is_own or not self._include_mirrored):
                self.skipped_count += header.count
                if is_own:
                    run = OffsetRun(header.first_offset, found.first_offset, header.count)
                    self.own.add(run)
                continue
            mark = last = next_mark(last, self._source_id, header)
            if self._fence_epoch is not None:  # so that storage compares the sequence
                mark = last = mark._replace(epoch=self._fence_epoch)
            waiting.append((marked_batch(raw, header, self.target.queue_id, mark), mark))
            size += len(raw)
            # The first batch goes alone: its outcome says what storage knows of the queue.
            is_full = size >= APPEND_BYTES_MAX or len(waiting) == APPEND_BATCHES_MAX
            if is_full or not self._marked:
                await self._append(waiting)
                waiting, size = [], 0
        if waiting:
            await self._append(waiting)
        self.offset = max(self.offset, offset, reading.next_offset)

    async def _append(self, batches: Sequence[tuple[bytes, MirrorMark]]) -> None:
        request = pb.AppendRequest(
            batches=[batch for batch, _ in batches], durability=pb.DURABILITY_FSYNCED
        )
        admin = self._target_log.admin

        async def ask(limit_s: float) -> pb.AppendResponse:
            stub = await admin.directory.storage(self.target.broker)
            return await stub.Append(request, timeout=limit_s)

        answer = await admin.ask(ask, timeout_s=APPEND_TIMEOUT_S)
        if len(answer.outcomes) != len(batches):
            raise Unreachable(f"{len(answer.outcomes)} outcomes for {len(batches)} batches")
        for (_, mark), outcome in zip(batches, answer.outcomes, strict=True):
            if outcome.HasField("error"):
                error = error_from_pb(outcome.error)
                self._learn(error, mark)
                raise error
            target_offset = outcome.receipt.first_offset
            self.forward.add(OffsetRun(mark.first_offset, target_offset, mark.message_count))
            self._target_seen = target_offset + mark.message_count
            self._continue_after(mark)
            self.copied_count += mark.message_count

    def _learn(self, error: BatonError, mark: MirrorMark) -> None:
        """Note what a rejection says about the end of the mirrored messages.

        It is used if no mark of them is left in the target.
        """
        if not isinstance(error, _BEHIND):
            return
        if isinstance(error, ProducerFenced):
            if "current" in error.facts:
                self._fence_epoch = int(error.facts["current"])
                self._learned = learned_mark(mark, epoch=self._fence_epoch)
        elif "expected" in error.facts:
            self._fence_epoch = None
            self._learned = learned_mark(mark, expected=int(error.facts["expected"]))
