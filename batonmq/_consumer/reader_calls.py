"""Calls of a reader that assigns queues itself: without ownership, nothing in flight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.storage.v1 import query_service_pb2 as query_pb
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.rpc import answered, error_from_pb
from batonmq._connection.directory import CALL_TIMEOUT_S, ClientEnvironment, Directory
from batonmq._consumer.moved_group import raise_if_moved, repeat_while_moved
from batonmq._consumer.prefetched_queue import FetchedBatches, KeptOffsets
from batonmq._consumer.queue_puller import NODE_UNAVAILABLE
from batonmq._consumer.session import queue_to_pb
from batonmq._core.epochs import SeenEpochs
from batonmq._core.queues import QueueRef
from batonmq._core.reader_choice import ReaderChoice
from batonmq._core.subscription import Filter
from batonmq.errors import BatonError, Fenced, ModeChanged, UnknownQueue, Unreachable

COMMIT_ITEMS_MAX = 1_024
T = TypeVar("T")


class ReadProgress(NamedTuple):
    """Progress of a group on a queue.

    Attributes:
        committed_offset: None without progress.
        reset_epoch: What a commit that continues from here must name.
    """

    committed_offset: int | None
    reset_epoch: int


class FetchLimits(NamedTuple):
    """Limits of one fetch: bytes, about, and messages."""

    bytes_max: int
    messages_max: int


class ReaderCalls:
    """Reads queues, and reads and commits the offsets of a group that has no ownership.

    Args:
        group: Empty for none: then only `read`, `kept` and `search` are possible.
    """

    def __init__(self, directory: Directory, environment: ClientEnvironment, group: str) -> None:
        self._directory, self._group = directory, group
        self._random, self._clock = environment.random, environment.clock
        self._readers: defaultdict[QueueRef, ReaderChoice] = defaultdict(ReaderChoice)
        self._epochs = SeenEpochs()

    # ---- storage

    async def search(self, queue: QueueRef, unix_ms: int) -> int:
        """Return the first offset that was stored at or after a time, by storage's wall clock."""
        request = query_pb.SearchOffsetRequest(queue=queue_to_pb(queue), unix_ms=unix_ms)
        stub = await self._directory.query(queue.broker)
        answer = await self._answered(stub.SearchOffset(request, timeout=CALL_TIMEOUT_S))
        return answer.offset

    async def kept(self, queue: QueueRef) -> KeptOffsets:
        """Return the offsets that a queue holds."""
        request = pb.QueryOffsetsRequest(queues=[queue_to_pb(queue)])
        stub = await self._directory.storage(queue.broker)
        answer = await self._answered(stub.QueryOffsets(request, timeout=CALL_TIMEOUT_S))
        (outcome,) = answer.outcomes
        if outcome.HasField("error"):
            raise error_from_pb(outcome.error)
        return KeptOffsets(outcome.offsets.first_offset, outcome.offsets.next_offset)

    async def read(
        self, queue: QueueRef, offset: int, wanted: Filter, limits: FetchLimits
    ) -> FetchedBatches:
        """Return what a queue holds from `offset` on, at once."""
        request = query_pb.ReadRequest(
            queue=queue_to_pb(queue),
            offset=offset,
            expression=wanted.canonical(),
            bytes_max=limits.bytes_max,
            messages_max=limits.messages_max,
        )
        reader = self._readers[queue]
        with self._other_node_on_failure(queue):
            stub = await self._directory.query(queue.broker, reader.node_id)
            answer = await self._answered(stub.Read(request, timeout=CALL_TIMEOUT_S))
            await self._note_reader(queue, answer.next_node_id, answer.next_offset > offset)
        kept = KeptOffsets(answer.queue_first_offset, answer.queue_next_offset)
        return FetchedBatches(tuple(answer.batches), answer.next_offset, 0, kept)

    async def pull(
        self, queue: QueueRef, offset: int, wanted: Filter, limits: FetchLimits, hold_ms: int
    ) -> FetchedBatches:
        """Return what a queue holds from `offset` on; wait up to `hold_ms` for a message.

        Raises:
            ModeChanged: The group has ownership on, or is broadcasting.
            GroupNotFound: The group does not exist.
        """
        reader = self._readers[queue]
        request = pb.PullRequest(
            queue=self._key(queue),
            offset=offset,
            pull_id=self._random.getrandbits(63),
            expression=wanted.canonical(),
            bytes_max=limits.bytes_max,
            messages_max=limits.messages_max,
            hold_ms=reader.hold_ms(hold_ms),
        )
        limit_s = request.hold_ms / 1000 + CALL_TIMEOUT_S
        with self._other_node_on_failure(queue):
            stub = await self._directory.reader(queue.broker, reader.node_id)
            answer = await self._answered(stub.Pull(request, timeout=limit_s))
            await self._note_reader(queue, answer.next_node_id, answer.next_offset > offset)
        kept = KeptOffsets(answer.queue_first_offset, answer.queue_next_offset)
        # The answer to a pull that found nothing has next_offset 0.
        next_offset = max(answer.next_offset, offset)
        return FetchedBatches(tuple(answer.batches), next_offset, answer.lost_count, kept)

    async def _note_reader(self, queue: QueueRef, next_node_id: str, received: bool) -> None:
        reader, now_ms = self._readers[queue], self._clock.monotonic_ms()
        if reader.answered(next_node_id, now_ms, received=received):
            reader.checked(has_leader=await self._directory.has_leader(queue.broker))

    @contextmanager
    def _other_node_on_failure(self, queue: QueueRef) -> Iterator[None]:
        """If the node of a queue does not serve, use another one for the next call."""
        reader = self._readers[queue]
        try:
            yield
        except NODE_UNAVAILABLE:
            reader.failed(self._directory.next_reader(queue.broker, reader.node_id))
            raise

    # ---- offsets

    async def committed(self, queue: QueueRef) -> ReadProgress:
        """Return the group's progress on a queue.

        Raises:
            Unreachable: Offsets did not answer.
        """

        async def query() -> offsets_pb.QueryOutcome:
            name, stub = await self._directory.offsets_leader(self._group)
            request = offsets_pb.QueryRequest(
                offsets_epoch=self._epochs.of(name), queues=[self._key(queue)]
            )
            answer = await self._answered(stub.Query(request, timeout=CALL_TIMEOUT_S))
            self._check_epoch(name, answer.offsets_epoch)
            (outcome,) = answer.outcomes
            raise_if_moved([outcome])
            return outcome

        outcome = await repeat_while_moved(self._directory, query)
        if not outcome.HasField("error"):
            return ReadProgress(outcome.progress.committed_offset, outcome.progress.reset_epoch)
        error = error_from_pb(outcome.error)
        if not isinstance(error, UnknownQueue):
            raise error
        return ReadProgress(None, error.detail.reset_epoch or 0)

    async def commit(self, progress: Sequence[tuple[QueueRef, ReadProgress]]) -> list[int]:
        """Commit that every message below the offsets is handled; return what is committed now.

        Committed progress never goes back: a lower offset changes nothing.

        Raises:
            Fenced: An operator reset the group on a queue. Other queues may be committed.
            ModeChanged: The group has ownership on, or is broadcasting.
            GroupNotFound: The group does not exist.
            Unreachable: Offsets did not answer; the commit may be repeated.
        """
        items = [
            offsets_pb.CommitItem(
                queue=self._key(queue),
                reset_epoch=each.reset_epoch,
                committed_offset=each.committed_offset or 0,
            )
            for queue, each in progress
        ]
        committed: list[int] = []
        for start in range(0, len(items), COMMIT_ITEMS_MAX):
            committed += await self._commit(items[start : start + COMMIT_ITEMS_MAX])
        return committed

    async def _commit(self, items: list[offsets_pb.CommitItem]) -> list[int]:
        async def commit() -> Sequence[offsets_pb.CommitOutcome]:
            name, stub = await self._directory.offsets_leader(self._group)
            request = offsets_pb.CommitRequest(offsets_epoch=self._epochs.of(name), items=items)
            answer = await self._answered(stub.Commit(request, timeout=CALL_TIMEOUT_S))
            self._check_epoch(name, answer.offsets_epoch)
            raise_if_moved(answer.outcomes)
            return answer.outcomes

        outcomes = await repeat_while_moved(self._directory, commit)
        for outcome in outcomes:
            if outcome.HasField("error"):
                error = error_from_pb(outcome.error)
                if isinstance(error, Fenced):
                    error.remedy = (
                        "Seek to the offset that committed() returns, and continue there."
                    )
                raise self._with_remedy(error)
        return [outcome.committed.committed_offset for outcome in outcomes]

    def _check_epoch(self, offsets_set: str, epoch: int) -> None:
        if not self._epochs.observe(offsets_set, epoch):
            raise Unreachable("an offsets node of an older epoch answered")

    def _key(self, queue: QueueRef) -> queue_pb2.GroupQueue:
        return queue_pb2.GroupQueue(group=self._group, queue=queue_to_pb(queue))

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
                "A puller needs a clustering group without ownership. Run baton group update "
                f"{self._group} --ownership off, or choose another group."
            )
        return error
