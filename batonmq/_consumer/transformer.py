"""Stores the outputs of inputs, each once, and acknowledges an input when its outputs are stored.

Outputs are sent in batches, across inputs. An input that an earlier owner may have started is
compared with what storage has first: see `OutputOpener`. If the queue is acquired anew, so are the
outputs that are still on their way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from batonmq._connection.routes import (
    follow_route,
    topic_epoch_of,
    wait_for_route,
    writable_queues_of,
)
from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.output_encoder import OutputEncoder, Pending
from batonmq._consumer.output_opener import KnownOutputs, OutputOpener
from batonmq._consumer.output_sender import BrokerOutputs
from batonmq._consumer.pending_inputs import PendingInputs
from batonmq._consumer.session import Session
from batonmq._core.compression import RecordCompressor
from batonmq._core.output_lanes import OutputLane, OutputQueue, TopicQueues
from batonmq._core.outputs import DEAD_LETTER_NUMBER, OutputHead, OutputSource, row_of
from batonmq._core.queue_progress import QueueProgress
from batonmq._core.queues import QueueRef
from batonmq._core.ranges import Range
from batonmq._core.retries import HandlingFailure
from batonmq.errors import (
    BatonError,
    DuplicateSequence,
    InvalidArgument,
    NotWritable,
    OutputMismatch,
    OutputsForgotten,
    ProducerFenced,
    QueueNotFound,
)

log = logging.getLogger(__name__)

CLOCK_SKEW_MS = 60_000
"""An input counts as older than forgotten outputs if it was stored at most so long after them: the
clocks of brokers differ."""
GROW_MESSAGES, GROW_BYTES, GROW_S = 500, 256 * 1024, 0.02
"""A batch waits for more outputs while more inputs wait for the handler: up to these sizes, and at
most so long after the first."""
PENDING_BYTES_MAX = 64 * 1024 * 1024
"""Bytes of outputs that wait; then no further input is accepted."""


class _QueueOutputs:
    """The outputs of one assigned queue.

    Attributes:
        pending: Inputs with outputs that are not stored, by their first offset, in the order of
            handling.
        token: Token under which the lane sends; another one than that of the queue means that the
            queue was acquired anew.
        known: What storage has, and the token under which it was opened.
        topic_id: Id of the topic of the inputs.
        answered: Set when a call with outputs of the lane has ended.
        settled: Not set while the outputs on their way are compared with storage anew.
    """

    def __init__(self, queue: AssignedQueue, topics: dict[str, TopicQueues]) -> None:
        self.queue = queue
        self.lane: OutputLane[PendingInputs] = OutputLane(topics)
        self.pending: dict[int, PendingInputs] = {}
        self.token = queue.token
        self.known: tuple[int, KnownOutputs] = (0, KnownOutputs())
        self.topic_id = 0
        self.opening = asyncio.Lock()
        self.answered, self.settled = asyncio.Event(), asyncio.Event()
        self.settled.set()


class RunOutputs:
    """The outputs of handler calls that are made one after the other, without waiting.

    Args:
        store: Called with the inputs, their offsets and their outputs when the calls have ended.
    """

    def __init__(
        self,
        progress: QueueProgress,
        topics: Sequence[str],
        store: Callable[[Sequence[ReceivedMessage], Sequence[Range], Sequence[Pending]], None],
    ) -> None:
        self._encoder, self._store = OutputEncoder(topics), store
        self._messages: list[ReceivedMessage] = []
        self._is_redelivered = progress.is_redelivered if progress.has_redelivered else None

    def add(self, message: ReceivedMessage, result: object) -> bool:
        """Add the outputs of an input; return False if that can't be done without waiting.

        It is False, too, if the result asks for a retry.

        Raises:
            InvalidArgument, LimitExceeded: See `OutputEncoder.add`.
        """
        is_redelivered = self._is_redelivered
        if message.redelivered or (is_redelivered is not None and is_redelivered(message.offset)):
            return False
        if not self._encoder.add(message, result):
            return False
        self._messages.append(message)
        return True

    def end(self, ranges: Sequence[Range]) -> None:
        """Store the outputs of the inputs, which have these offsets."""
        if self._messages:
            self._store(self._messages, ranges, self._encoder.end())


class Transformer:
    """Stores the outputs of a consumer's inputs.

    Args:
        topics: The output topics.
        dead_letters: Topic of the dead letters; empty if there are none.
        spawn: Runs a coroutine until the consumer ends.
    """

    def __init__(
        self,
        session: Session,
        topics: Sequence[str],
        dead_letters: str,
        spawn: Callable[[Coroutine[object, object, None]], object],
    ) -> None:
        self._session, self._spawn, self._names = session, spawn, topics
        self.dead_letters = dead_letters
        names = [*topics, dead_letters] if dead_letters else list(topics)
        self._topics = {name: TopicQueues() for name in names}
        self._opener = OutputOpener(session, names, spawn)
        self._senders: dict[str, BrokerOutputs] = {}
        self._queues: dict[QueueRef, _QueueOutputs] = {}
        self._by_lane: dict[OutputLane[Any], _QueueOutputs] = {}
        self._compressor = RecordCompressor()
        self._bytes, self._room = 0, asyncio.Event()
        self._room.set()
        self._growing: dict[OutputQueue[Any], None] = {}
        self._grown_timer: asyncio.TimerHandle | None = None

    async def begin(self) -> None:
        """Learn the queues of the output topics, and follow them from then on.

        Raises:
            TopicNotFound: An output topic does not exist.
            Unreachable: No nameserver answered in time.
        """
        for name in self._topics:
            timeout_ms = self._session.settings.start_timeout_ms
            self._apply(await wait_for_route(self._session.directory, name, timeout_ms))
            self._spawn(follow_route(self._session.directory, name, self._apply))

    @property
    def pending_count(self) -> int:
        """Number of handled inputs that wait until all of their outputs are stored."""
        return sum(
            len(pending.messages)
            for state in list(self._queues.values())
            for pending in list(state.pending.values())
        )

    async def accept(
        self,
        queue: AssignedQueue,
        message: ReceivedMessage,
        outputs: Sequence[Pending],
    ) -> PendingInputs | HandlingFailure | None:
        """Send the outputs of an input that is handled; the input is finished when they are stored.

        Returns:
            The input, or None if nothing of it is to be stored any more: it is finished now. A
            failure if the outputs differ from those that are stored.
        """
        state = self._state(queue)
        state.topic_id = message.topic_id
        await self._room.wait()
        missing: Sequence[Pending] | None = None
        try:
            while missing is None or not state.settled.is_set():
                await state.settled.wait()
                missing = await self._missing(state, message, outputs)
        except (OutputMismatch, OutputsForgotten) as error:
            return self._report(message, error)
        if not missing or not queue.counts(message):
            return None
        ranges = ((message.offset, message.offset + 1),)
        pending = PendingInputs((message,), ranges, outputs, missing)
        self._begin(state, pending)
        for one in missing:
            queue_of = state.lane.add(one)
            if queue_of is not None and not queue_of.scheduled:
                self.wake(queue_of)
        return pending

    def collect(self, queue: AssignedQueue) -> RunOutputs | None:
        """As `accept`, for calls that do not wait; None if their outputs can't be taken now."""
        state, progress = self._queues.get(queue.ref), queue.progress
        if state is None or progress is None:
            return None
        if not (self._room.is_set() and state.settled.is_set()):
            return None
        return RunOutputs(progress, self._names, partial(self._store_run, state))

    def _store_run(
        self,
        state: _QueueOutputs,
        messages: Sequence[ReceivedMessage],
        ranges: Sequence[Range],
        outputs: Sequence[Pending],
    ) -> None:
        if not outputs:
            state.queue.finish_ranges(messages[0], ranges)
            return
        self._begin(state, PendingInputs(messages, ranges, outputs, outputs))
        more = state.queue.buffer.ready
        for one in outputs:
            queue = state.lane.add(one)
            if queue is None or queue.scheduled:
                continue
            if more and queue.waiting_count < GROW_MESSAGES and queue.waiting_bytes < GROW_BYTES:
                self._wake_later(queue)
            else:
                self.wake(queue)

    def _begin(self, state: _QueueOutputs, pending: PendingInputs) -> None:
        state.pending[pending.first_offset] = pending
        self._bytes += pending.bytes_count
        if self._bytes >= PENDING_BYTES_MAX:
            self._room.clear()

    def _wake_later(self, queue: OutputQueue[Any]) -> None:
        """Let a batch grow, as more inputs of its queue wait; send it after `GROW_S` anyway."""
        self._growing[queue] = None
        if self._grown_timer is None:
            loop = asyncio.get_running_loop()
            self._grown_timer = loop.call_later(GROW_S, self._wake_grown)

    def _wake_grown(self) -> None:
        growing, self._growing, self._grown_timer = self._growing, {}, None
        self._wake_all(growing)

    def drop(self, ref: QueueRef) -> None:
        """Forget the outputs of a queue that is gone, or whose work does not count any more.

        A call with some of them may still be under way.
        """
        state = self._queues.pop(ref, None)
        if state is not None:
            state.lane.closed = True
            state.answered.set()
            del self._by_lane[state.lane]
            for pending in state.pending.values():
                self._free(pending)
            state.pending.clear()

    # ---- for the senders of the brokers: see `OutputResults`

    def encode(self, queue: OutputQueue[Any]) -> bytes | None:
        """See `OutputResults`."""
        state = self._by_lane.get(queue.lane)
        if state is None or not state.queue.held:
            return None
        if state.token != state.queue.token:
            self._renew(state)
            return None
        unix_ms = self._session.clock.unix_ms()
        return queue.take(self._head(state), unix_ms, self._compressor)

    def stored(self, queue: OutputQueue[Any]) -> None:
        """See `OutputResults`."""
        outputs = queue.stored()
        if self._session.metrics is not None:
            count = sum(map(len, outputs))
            self._session.metrics.outputs_stored(queue.queue.topic, count)
        state = self._by_lane.get(queue.lane)
        if state is not None:
            state.answered.set()
            self._finish(state, outputs)
            self._wake_all(state.lane.release_held(queue.queue.topic))

    def refused(self, queue: OutputQueue[Any], error: BatonError) -> bool:
        """See `OutputResults`."""
        state = self._by_lane.get(queue.lane)
        if state is None:
            return True
        state.answered.set()
        if isinstance(error, ProducerFenced | DuplicateSequence | OutputMismatch):
            # Another owner has stored outputs, or the queue was acquired anew meanwhile.
            log.info("outputs refused queue=%s: %s", state.queue.ref, error)
            state.known = (0, KnownOutputs())
            if isinstance(error, ProducerFenced) and state.token == state.queue.token:
                return False
            self._renew(state)
            return True
        gone = queue.queue not in self._topics[queue.queue.topic].queues
        # The epochs keep out what is still on its way: see `AppendRequest.topic_epochs`.
        not_stored = isinstance(error, NotWritable) and queue.topic_epoch is not None
        not_stored |= isinstance(error, NotWritable | QueueNotFound) and not queue.unsure
        if gone and not_stored:
            self._wake_all(state.lane.move(queue))
            return True
        return False

    def topic_epoch(self, topic: str) -> int | None:
        """See `OutputResults`."""
        return self._topics[topic].epoch

    def wake(self, queue: OutputQueue[Any]) -> None:
        """See `OutputResults`."""
        broker = queue.queue.broker
        sender = self._senders.get(broker)
        if sender is None:
            sender = self._senders[broker] = BrokerOutputs(broker, self._session, self)
            self._spawn(sender.run())
        sender.wake(queue)

    # ---- inputs

    def _state(self, queue: AssignedQueue) -> _QueueOutputs:
        state = self._queues.get(queue.ref)
        if state is None:
            if not queue.with_ownership:
                raise InvalidArgument(
                    f"group {self._session.group} has no owners of queues, so outputs can't be "
                    "stored once",
                    remedy="Switch the ownership of the group on, or use run and a producer.",
                )
            state = self._queues[queue.ref] = _QueueOutputs(queue, self._topics)
            self._by_lane[state.lane] = state
            queue.on_granted = lambda: self._renew(state)
        return state

    async def _missing(
        self,
        state: _QueueOutputs,
        message: ReceivedMessage,
        outputs: Sequence[Pending],
        *,
        sent: bool = False,
    ) -> Sequence[Pending]:
        """Return the outputs of an input that are not stored.

        Args:
            sent: Whether this member may have sent them already. An earlier owner may have if the
                input is redelivered.

        Raises:
            OutputMismatch: Other outputs of it are stored.
            OutputsForgotten: It is not known whether outputs of it are stored.
        """
        queue = state.queue
        while queue.counts(message) and queue.progress is not None:
            if queue.is_acknowledged(message):
                return ()  # another owner has stored its outputs
            sent = sent or message.redelivered or queue.progress.is_redelivered(message.offset)
            if not sent:
                return outputs
            token = queue.token
            known = await self._opened(state)
            if known is not None and token == queue.token:
                return _compare(message, outputs, known)
            if not queue.held:  # another owner handles it
                await asyncio.sleep(0.05)
        return ()

    async def _opened(self, state: _QueueOutputs) -> KnownOutputs | None:
        """Return what storage has under the present token; None if that ends meanwhile."""
        queue = state.queue
        async with state.opening:
            token, progress = queue.token, queue.progress
            if state.known[0] == token:
                return state.known[1]
            if progress is None or not token:
                return None
            head = self._head(state)
            known = await self._opener.open(head, lambda: queue.token == token and queue.held)
            if known is not None:
                state.known = token, known
            return known

    def _head(self, state: _QueueOutputs) -> OutputHead:
        """Return the head of a batch that is sent now."""
        queue, progress = state.queue, state.queue.progress
        assert progress is not None
        ref = queue.ref
        source = OutputSource(self._session.group, state.topic_id, ref.broker, ref.queue_id)
        return OutputHead(source, progress.reset_epoch, queue.token, progress.committed)

    def _finish(self, state: _QueueOutputs, outputs: Iterable[Pending]) -> None:
        """Finish the inputs whose last outputs these are."""
        for one in outputs:
            pending: PendingInputs = one.inputs
            if not pending.note_stored(len(one)):
                continue
            if state.pending.get(pending.first_offset) is not pending:
                continue
            del state.pending[pending.first_offset]
            self._free(pending)
            if not pending.awaited:
                state.queue.finish_ranges(pending.messages[0], pending.ranges)

    def _free(self, pending: PendingInputs) -> None:
        self._bytes -= pending.bytes_count
        if self._bytes < PENDING_BYTES_MAX:
            self._room.set()

    # ---- a queue that is acquired anew

    def _renew(self, state: _QueueOutputs) -> None:
        """Compare the outputs on their way with storage, under the present token."""
        if state.settled.is_set() and state.lane in self._by_lane:
            state.settled.clear()
            state.lane.closed = True
            self._spawn(self._renew_all(state))

    async def _renew_all(self, state: _QueueOutputs) -> None:
        queue = state.queue
        try:
            while state.lane.sending and state.lane in self._by_lane:
                state.answered.clear()
                await state.answered.wait()
            state.lane.clear()
            inputs = [one for pending in state.pending.values() for one in pending.split()]
            state.pending = {one.first_offset: one for one in inputs}
            for pending in inputs:
                await self._renew_one(state, pending)
        finally:
            state.settled.set()
        if state.lane in self._by_lane:
            state.token, state.lane.closed = queue.token, False
            self._wake_all(state.lane.queues)

    async def _renew_one(self, state: _QueueOutputs, pending: PendingInputs) -> None:
        queue, (message,) = state.queue, pending.messages
        try:
            missing = await self._missing(state, message, pending.outputs, sent=True)
        except (OutputMismatch, OutputsForgotten) as error:
            failure = self._report(message, error)
            if state.pending.pop(message.offset, None):
                self._free(pending)
                if pending.awaited:
                    pending.fail(failure)
                else:
                    queue.give_up(message)
            return
        if state.pending.get(message.offset) is not pending:
            return
        if not missing or not queue.counts(message):
            del state.pending[message.offset]
            self._free(pending)
            pending.note_stored(pending.left)
            if queue.counts(message) and not pending.awaited:
                queue.finish([message])
            return
        pending.wait_for(missing)
        for one in missing:
            state.lane.add(one)

    # ---- routes and reports

    def _apply(self, route: nameserver_pb.Route) -> None:
        name = route.topic.name
        self._topics[name].change(writable_queues_of(route))
        self._topics[name].epoch = topic_epoch_of(route)
        for state in self._queues.values():
            self._wake_all(state.lane.release_held(name))

    def _wake_all(self, queues: Iterable[OutputQueue[Any]]) -> None:
        for queue in queues:
            self.wake(queue)

    def _report(self, message: ReceivedMessage, error: BatonError) -> HandlingFailure:
        """Report that the outputs of an input are refused; return its failure."""
        log.error("outputs of %r refused: %s", message, error)
        if self._session.metrics is not None:
            self._session.metrics.output_refused(message.topic, error.reason)
        text = f"{type(error).__name__}: {error}"
        return HandlingFailure("failed", text, refused=error.reason)


def _compare(
    message: ReceivedMessage, outputs: Sequence[Pending], known: KnownOutputs
) -> Sequence[Pending]:
    """Return the outputs of an input that storage does not have.

    Raises:
        OutputMismatch: Storage has other outputs of the input.
        OutputsForgotten: It is not known whether storage has outputs of the input.
    """
    stored = known.of(message.offset)
    if DEAD_LETTER_NUMBER in stored:
        return ()
    if message.store_unix_ms <= known.forgotten_unix_ms + CLOCK_SKEW_MS and known.forgotten_unix_ms:
        raise OutputsForgotten(
            f"outputs of {message!r} may have been stored and forgotten",
            facts={"offset": message.offset, "forgotten_unix_ms": known.forgotten_unix_ms},
        )
    rows = [[row_of(*row) for row in zip(one.keys, one.digests, strict=True)] for one in outputs]
    digests = {row.number: row.digest for of_queue in rows for row in of_queue}
    if DEAD_LETTER_NUMBER in digests:
        return outputs
    for number, digest in sorted(stored.items()):
        if digests.get(number) != digest:
            made = "made no such output" if number not in digests else "made another output"
            raise OutputMismatch(
                f"output {number} of {message!r} is stored, and the handler {made}",
                facts={"offset": message.offset, "number": number},
            )
    parts = [
        one.part([index for index, row in enumerate(of_queue) if row.number not in stored])
        for one, of_queue in zip(outputs, rows, strict=True)
    ]
    return [part for part in parts if len(part)]
