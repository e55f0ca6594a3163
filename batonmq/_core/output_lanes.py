"""The outputs of one input queue on their way to storage. Pure.

A lane has the outputs of one input queue, an output queue those of them that go to one queue of a
topic, in order, with at most one batch in flight. So no batch overtakes a repeated one.

Outputs with an ordering key go to the queue of their key. If the queues of the topic change, such
outputs wait in the lane until all earlier ones are stored. Outputs without a key fill one batch
after the other, each for the next queue of the topic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from batonmq._core.compression import RecordCompressor
from batonmq._core.keyed_queues import KeyedQueues
from batonmq._core.outputs import OutputHead, OutputRow, encode_head, encode_rows
from batonmq._core.queues import QueueRef
from batonmq._core.records import BatchBuilder, Message

Input = TypeVar("Input")

BATCH_BYTES = 1024 * 1024
BATCH_MESSAGES_MAX = 5_000
_BARE = Message(b"")


class PendingOutput(Generic[Input]):
    """An output that is not known to be stored.

    Attributes:
        input: What the caller knows its input by.
        topic: Topic to which it goes.
        row: Which output it is.
        record: The encoded message.
        message: Its tag and keys, for a message that has any; else None.
    """

    __slots__ = ("input", "message", "ordering_key", "record", "row", "topic")

    def __init__(
        self,
        input: Input,
        row: OutputRow,
        topic: str,
        ordering_key: str | None,
        message: Message | None,
        record: bytes,
    ) -> None:
        self.input, self.row, self.topic = input, row, topic
        self.ordering_key, self.message, self.record = ordering_key, message, record


class TopicQueues:
    """The queues of an output topic that take messages, by the newest route.

    Attributes:
        version: Rises when the queues change.
    """

    def __init__(self) -> None:
        self.version = 0
        self.queues: tuple[QueueRef, ...] = ()
        self.keyed: KeyedQueues | None = None
        self._turn = 0

    def change(self, queues: tuple[QueueRef, ...]) -> None:
        """Replace the queues."""
        if queues != self.queues:
            self.queues, self.version = queues, self.version + 1
            self.keyed = KeyedQueues(queues) if queues else None

    def next(self) -> QueueRef:
        """Return the queue whose turn it is."""
        self._turn += 1
        return self.queues[self._turn % len(self.queues)]


@dataclass(slots=True, eq=False)
class OutputQueue(Generic[Input]):
    """Outputs of a lane for one queue.

    Attributes:
        in_flight: The outputs of the batch that was sent; they stay together when it is repeated.
        unsure: Whether an attempt to send these may have succeeded.
        sending: Whether a call with them is under way.
        backing_off: Whether the next attempt has to wait.
        scheduled: Whether a sender is about to take its next batch.
    """

    lane: OutputLane[Input]
    queue: QueueRef
    waiting: deque[PendingOutput[Input]] = field(default_factory=deque)
    in_flight: list[PendingOutput[Input]] = field(default_factory=list)
    unsure: bool = False
    sending: bool = False
    backing_off: bool = False
    scheduled: bool = False
    failures: int = 0
    waiting_bytes: int = 0

    @property
    def ready(self) -> bool:
        """Whether a batch can be sent now."""
        idle = not self.sending and not self.backing_off
        return idle and not self.lane.closed and bool(self.in_flight or self.waiting)

    def add(self, output: PendingOutput[Input]) -> None:
        """Add an output behind the others."""
        self.waiting.append(output)
        self.waiting_bytes += len(output.record)

    def take(self, head: OutputHead, born_unix_ms: int, compressor: RecordCompressor) -> bytes:
        """Return the next batch, which is then in flight; a repeated one has the same outputs.

        Args:
            head: Head of the batch, as of now. A repeated batch may have a newer one.
        """
        assert self.ready
        outputs = self.in_flight
        if not outputs:
            size = 0
            while self.waiting and len(outputs) < BATCH_MESSAGES_MAX:
                size += len(self.waiting[0].record)
                if outputs and size > BATCH_BYTES:
                    break
                outputs.append(self.waiting.popleft())
            self.waiting_bytes -= sum(len(one.record) for one in outputs)
            self.lane.turn_over(self)
        self.sending = True
        builder = BatchBuilder(compressor)
        if all(one.message is None for one in outputs):
            builder.add_many([one.record for one in outputs])
        else:
            for one in outputs:
                builder.add(one.message or _BARE, one.record)
        return builder.encode(
            topic=self.queue.topic,
            queue_id=self.queue.queue_id,
            born_unix_ms=born_unix_ms,
            outputs=(encode_head(head), encode_rows([one.row for one in outputs], head.floor)),
        )

    def stored(self) -> Sequence[PendingOutput[Input]]:
        """Note that the batch in flight is stored, and return its outputs."""
        outputs, self.in_flight = self.in_flight, []
        self.sending = self.unsure = False
        self.failures = 0
        self.lane.settled(outputs)
        return outputs

    def failed(self, *, unsure: bool) -> None:
        """Note that the batch in flight has failed; it waits to be sent again."""
        self.sending, self.backing_off = False, True
        self.failures += 1
        self.unsure = self.unsure or unsure

    def clear(self) -> Sequence[PendingOutput[Input]]:
        """Remove all outputs, and return them in order."""
        outputs = [*self.in_flight, *self.waiting]
        self.in_flight = []
        self.waiting.clear()
        self.waiting_bytes = self.failures = 0
        self.unsure = False
        self.lane.settled(outputs)
        return outputs


class OutputLane(Generic[Input]):
    """The outputs of one input queue.

    Args:
        topics: The output topics by name.

    Attributes:
        closed: Whether nothing is sent, because the outputs have to be compared with storage first.
    """

    def __init__(self, topics: dict[str, TopicQueues]) -> None:
        self._topics = topics
        self._queues: dict[QueueRef, OutputQueue[Input]] = {}
        self._turns: dict[str, OutputQueue[Input]] = {}
        self._versions: dict[str, int] = {}
        self._keyed_counts: dict[str, int] = {}
        self._held: dict[str, deque[PendingOutput[Input]]] = {}
        self.closed = False

    @property
    def sending(self) -> bool:
        """Whether a call with outputs of the lane is under way."""
        return any(one.sending for one in self._queues.values())

    def add(self, output: PendingOutput[Input]) -> OutputQueue[Input] | None:
        """Add an output behind the others; return its queue, or None if it waits for others."""
        topic = self._topics[output.topic]
        if output.ordering_key is None:
            queue = self._turns.get(output.topic)
            if queue is None and topic.queues:
                queue = self._turns[output.topic] = self._queue(topic.next())
        else:
            queue = self._queue_of_key(output, topic)
        if queue is None:
            self._held.setdefault(output.topic, deque()).append(output)
        else:
            queue.add(output)
        return queue

    def _queue_of_key(
        self, output: PendingOutput[Input], topic: TopicQueues
    ) -> OutputQueue[Input] | None:
        assert output.ordering_key is not None
        name = output.topic
        if self._held.get(name):
            return None
        if self._versions.get(name) != topic.version:
            if self._keyed_counts.get(name):
                return None
            self._versions[name] = topic.version
        if topic.keyed is None:
            return None
        self._keyed_counts[name] = self._keyed_counts.get(name, 0) + 1
        return self._queue(topic.keyed.of(output.ordering_key))

    def _queue(self, ref: QueueRef) -> OutputQueue[Input]:
        queue = self._queues.get(ref)
        if queue is None:
            queue = self._queues[ref] = OutputQueue(self, ref)
        return queue

    def turn_over(self, queue: OutputQueue[Input]) -> None:
        """Note that a batch of a queue is full: outputs without a key go to the next queue."""
        if self._turns.get(queue.queue.topic) is queue:
            del self._turns[queue.queue.topic]

    def settled(self, outputs: Iterable[PendingOutput[Input]]) -> None:
        """Note that outputs have left their queue."""
        if self._keyed_counts:
            for one in outputs:
                if one.ordering_key is not None:
                    self._keyed_counts[one.topic] -= 1

    def release_held(self, topic: str) -> list[OutputQueue[Input]]:
        """Add the outputs that wait for others, as far as possible; return their queues."""
        held = self._held.get(topic)
        if not held:
            return []
        self._held[topic] = deque()
        queues: dict[OutputQueue[Input], None] = {}
        for output in held:
            if (queue := self.add(output)) is not None:
                queues[queue] = None
        return list(queues)

    def move(self, queue: OutputQueue[Input]) -> list[OutputQueue[Input]]:
        """Route the outputs of a queue anew; return the queues to which they were added.

        Outputs with a key wait until all others with a key are stored, and in front of later ones.
        """
        outputs, topic = queue.clear(), queue.queue.topic
        self.turn_over(queue)
        queues: dict[OutputQueue[Input], None] = {}
        keyed = [one for one in outputs if one.ordering_key is not None]
        if keyed:
            self._held.setdefault(topic, deque()).extendleft(reversed(keyed))
        for one in outputs:
            if one.ordering_key is None and (to := self.add(one)) is not None:
                queues[to] = None
        if not self._keyed_counts.get(topic):
            queues |= dict.fromkeys(self.release_held(topic))
        return list(queues)

    def clear(self) -> list[PendingOutput[Input]]:
        """Remove all outputs that are not being sent, and return them; those of a key in order."""
        outputs: list[PendingOutput[Input]] = []
        for queue in self._queues.values():
            if not queue.sending:
                outputs += queue.clear()
        for held in self._held.values():
            outputs += held
            held.clear()
        self._turns.clear()
        return outputs

    @property
    def queues(self) -> Sequence[OutputQueue[Input]]:
        """The queues that have, or had, outputs."""
        return list(self._queues.values())
