"""Reads batches of queues for a mirror: in order, by their marks, and the last one with a mark."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from typing import NamedTuple

from baton.storage.v1 import query_service_pb2 as query_pb
from batonmq._core.mirror_map import OffsetRun
from batonmq._core.mirror_marks import MirrorMark, mark_of
from batonmq._core.queues import QueueRef
from batonmq._core.records import Header, check_batch, read_header
from batonmq.admin.admin import Admin
from batonmq.admin.reports import queue_to_pb
from batonmq.errors import OffsetOutOfRange, QueueNotFound, Unreachable

READ_BYTES = 4 * 1024 * 1024
READ_MESSAGES = 65_535
_WINDOW_FACTOR = 64
"""A search from the end looks at one message, then at 64 before it, then at 4,096, and so on."""


class StoredBatch(NamedTuple):
    """A batch with its header; checked, unless only headers were wanted."""

    header: Header
    raw: bytes


class Reading(NamedTuple):
    """Batches of a queue in order.

    Attributes:
        next_offset: Offset after the last scanned one.
    """

    batches: Sequence[StoredBatch]
    next_offset: int


class MarkedRun(NamedTuple):
    """Mirrored messages with consecutive offsets in the queue and in the source of the mark."""

    first_offset: int
    mark: MirrorMark

    @property
    def next_offset(self) -> int:
        """Offset in the queue after the last message."""
        return self.first_offset + self.mark.message_count

    def offset_run(self, *, reverse: bool = False) -> OffsetRun:
        """Return the run; `reverse` if the queue is the source and the mark names the target."""
        here, there = self.first_offset, self.mark.first_offset
        return OffsetRun(*((here, there) if reverse else (there, here)), self.mark.message_count)


class QueueLog:
    """Reads the queues of one cluster.

    Args:
        admin: Client of the cluster; the caller closes it.
    """

    def __init__(self, admin: Admin) -> None:
        self.admin = admin

    async def extent(self, queue: QueueRef) -> tuple[int, int]:
        """Return first and next offset of a queue.

        Raises:
            Unreachable: Its broker does not answer.
            QueueNotFound: Its broker does not have it.
        """
        extents = await self.extents([queue])
        if queue not in extents:
            raise QueueNotFound(f"no broker has queue {queue}", facts={"topic": queue.topic})
        return extents[queue]

    async def extents(self, queues: Sequence[QueueRef]) -> dict[QueueRef, tuple[int, int]]:
        """Return first and next offset of queues; those that no broker has are left out.

        Raises:
            Unreachable: A broker does not answer.
        """
        extents, problems = await self.admin.extents(queues)
        if problems:
            raise Unreachable("; ".join(problems))
        return extents

    async def read(
        self, queue: QueueRef, offset: int, messages_max: int = READ_MESSAGES, *, check: bool = True
    ) -> Reading:
        """Return batches from an offset on; from the first kept one if it is not kept any more.

        Raises:
            OffsetOutOfRange: The queue ends before the offset.
            BadBatch, BadChecksum: A batch is damaged.
        """
        while True:
            request = query_pb.ReadRequest(
                queue=queue_to_pb(queue),
                offset=offset,
                bytes_max=READ_BYTES,
                messages_max=messages_max,
            )

            async def ask(
                limit_s: float, request: query_pb.ReadRequest = request
            ) -> query_pb.ReadResponse:
                stub = await self.admin.directory.query(queue.broker)
                return await stub.Read(request, timeout=limit_s)

            try:
                answer = await self.admin.ask(ask)
            except OffsetOutOfRange:
                first_offset, _ = await self.extent(queue)
                if first_offset <= offset:
                    raise
                offset = first_offset
            else:
                break
        batches = [
            StoredBatch(check_batch(raw, stamped=True) if check else read_header(raw), raw)
            for raw in answer.batches
        ]
        ends = [batch.header.next_offset for batch in batches[-1:]]
        return Reading(batches, max([offset, answer.next_offset, *ends]))

    async def marked_runs(
        self, queue: QueueRef, source: int, first_offset: int, next_offset: int
    ) -> AsyncIterator[MarkedRun]:
        """Yield the runs in a range of a queue that have the marks of one source, in order.

        A long run costs few reads: its end is found by bisection. What has other marks or none is
        read whole.
        """
        offset = first_offset
        while offset < next_offset:
            reading = await self.read(queue, offset, check=False)
            if reading.next_offset <= offset:
                return
            runs, offset = _runs_in(reading.batches, source), reading.next_offset
            whole = await self.whole_run(queue, reading, source, next_offset)
            if whole is not None:
                runs, offset = [whole], max(offset, whole.next_offset)
            for run in runs:
                if run.first_offset < next_offset:
                    yield run

    async def whole_run(
        self, queue: QueueRef, reading: Reading, source: int, next_offset: int
    ) -> MarkedRun | None:
        """Return the run of which all batches of a reading are, as far as it goes; else None."""
        runs = _runs_in(reading.batches, source)
        count = sum(batch.header.count for batch in reading.batches)
        if len(runs) != 1 or runs[0].mark.message_count != count:
            return None
        (run,) = runs
        end = max(run.next_offset, await self._run_end(queue, run, next_offset))
        return run._replace(mark=run.mark._replace(message_count=end - run.first_offset))

    async def _run_end(self, queue: QueueRef, run: MarkedRun, next_offset: int) -> int:
        """Return the offset in the queue after the last message of a run, at most `next_offset`."""
        low, high, middle = run.next_offset, next_offset, next_offset - 1
        while low < high:
            batches = (await self.read(queue, middle, 1, check=False)).batches
            header = batches[0].header if batches else None
            mark = mark_of(header) if header is not None else None
            if header is None:  # removed meanwhile
                high = middle
            elif mark is not None and _continues(run, header.first_offset, mark):
                low = max(low, header.next_offset)
            else:
                high = min(high, middle, max(low, header.first_offset))
            middle = (low + high) // 2
        return min(low, next_offset)

    async def last_marked(
        self, queue: QueueRef, sources: Collection[int], first_offset: int, next_offset: int
    ) -> MarkedRun | None:
        """Return the last batch in a range of a queue with a mark of a source; None without one.

        Messages after it are read; those before it are not.
        """
        end, width = next_offset, 1
        while end > first_offset:
            begin = max(first_offset, end - width)
            found, offset = None, begin
            while offset < end:
                reading = await self.read(queue, offset, min(width, READ_MESSAGES), check=False)
                for header, _ in reading.batches:
                    mark = mark_of(header) if header.first_offset < end else None
                    if mark is not None and mark.source_id in sources:
                        found = MarkedRun(header.first_offset, mark)
                if reading.next_offset <= offset:
                    break
                offset = reading.next_offset
            if found is not None:
                return found
            end, width = begin, width * _WINDOW_FACTOR
        return None


def _continues(run: MarkedRun, offset: int, mark: MirrorMark) -> bool:
    """Return whether a batch belongs to a run: nothing is left out, and nothing is in between."""
    return (
        mark[:2] == run.mark[:2]
        and mark.first_offset - offset == run.mark.first_offset - run.first_offset
    )


def _runs_in(batches: Sequence[StoredBatch], source: int) -> list[MarkedRun]:
    runs: list[MarkedRun] = []
    for header, _ in batches:
        mark = mark_of(header)
        if mark is None or mark.source_id != source:
            continue
        if (
            runs
            and runs[-1].next_offset == header.first_offset
            and _continues(runs[-1], header.first_offset, mark)
        ):
            last = runs[-1].mark
            runs[-1] = runs[-1]._replace(
                mark=last._replace(message_count=last.message_count + mark.message_count)
            )
        else:
            runs.append(MarkedRun(header.first_offset, mark))
    return runs
