"""The outputs of one input queue on their way to storage. Pure.

A lane has the outputs of one input queue, an output queue those of them that go to one queue of a
topic, in order, with at most one batch in flight. So no batch overtakes a repeated one. Outputs
that were made together and go to one queue stay together, as columns: an output is no object.

Outputs with an ordering key go to the queue of their key. If the queues of the topic change, such
outputs wait in the lane until all earlier ones are stored. Outputs without a key fill one batch
after the other, each for the next queue of the topic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Generic, TypeVar

from batonmq._core.compression import RecordCompressor
from batonmq._core.keyed_queues import KeyedQueues
from batonmq._core.outputs import OutputHead, encode_head, encode_rows
from batonmq._core.queues import QueueRef
from batonmq._core.records import BatchBuilder, Message

Input = TypeVar("Input")

BATCH_BYTES = 1024 * 1024
BATCH_MESSAGES_MAX = 5_000
PIECE_BYTES = 256 * 1024
PIECE_MESSAGES_MAX = 1_024
"""Outputs that are made together are sent together up to these sizes: a batch has room for them and
one more output of any size."""
_BARE = Message(b"")


class PendingOutputs(Generic[Input]):
    """Outputs that are not known to be stored and go to one queue, one behind the other.

    Attributes:
        inputs: What the caller knows their inputs by.
        topic: Topic to which they go.
        ordering_key: The ordering key of each of them.
        keys: `row_key` of each.
        digests: Digest of each; set when there are no more.
        records: Each one, encoded.
        messages: Tag and keys of the first ones; the others have none.
        bytes_count: Bytes of the records.
    """

    __slots__ = (
        "bytes_count", "digests", "inputs", "keys", "messages", "ordering_key", "records", "topic",
    )  # fmt: skip

    def __init__(self, inputs: Input, topic: str, ordering_key: str | None = None) -> None:
        self.inputs, self.topic, self.ordering_key = inputs, topic, ordering_key
        self.keys: list[int] = []
        self.digests: list[int] = []
        self.records: list[bytes] = []
        self.messages: list[Message] = []
        self.bytes_count = 0

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def full(self) -> bool:
        """Whether no more are added: they are sent together."""
        return self.bytes_count >= PIECE_BYTES or len(self.keys) >= PIECE_MESSAGES_MAX

    def add(self, key: int, record: bytes, message: Message | None = None) -> None:
        """Add an output.

        Args:
            message: Its tag and keys, if it has any.
        """
        if message is not None:
            self.messages += [_BARE] * (len(self.keys) - len(self.messages))
            self.messages.append(message)
        self.keys.append(key)
        self.records.append(record)
        self.bytes_count += len(record)

    def part(self, indexes: Sequence[int]) -> PendingOutputs[Input]:
        """Return those at `indexes`, ascending."""
        part = PendingOutputs(self.inputs, self.topic, self.ordering_key)
        for index in indexes:
            message = self.messages[index] if index < len(self.messages) else None
            part.add(self.keys[index], self.records[index], message)
            part.digests.append(self.digests[index])
        return part


class TopicQueues:
    """The queues of an output topic that take messages, by the newest route.

    Attributes:
        version: Rises when the queues change.
        epoch: Of the topic; None if its newest route does not say.
    """

    def __init__(self) -> None:
        self.version = 0
        self.epoch: int | None = None
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
        topic_epoch: Epoch of the topic that attempts have named; see `epoch_to_name`.
        sending: Whether a call with them is under way.
        backing_off: Whether the next attempt has to wait.
        scheduled: Whether a sender is about to take its next batch.
    """

    lane: OutputLane[Input]
    queue: QueueRef
    waiting: deque[PendingOutputs[Input]] = field(default_factory=deque)
    in_flight: list[PendingOutputs[Input]] = field(default_factory=list)
    unsure: bool = False
    topic_epoch: int | None = None
    sending: bool = False
    backing_off: bool = False
    scheduled: bool = False
    failures: int = 0
    waiting_bytes: int = 0
    waiting_count: int = 0

    @property
    def ready(self) -> bool:
        """Whether a batch can be sent now."""
        idle = not self.sending and not self.backing_off
        return idle and not self.lane.closed and bool(self.in_flight or self.waiting)

    def add(self, outputs: PendingOutputs[Input]) -> None:
        """Add outputs behind the others."""
        self.waiting.append(outputs)
        self.waiting_bytes += outputs.bytes_count
        self.waiting_count += len(outputs)

    def take(self, head: OutputHead, born_unix_ms: int, compressor: RecordCompressor) -> bytes:
        """Return the next batch, which is then in flight; a repeated one has the same outputs.

        Args:
            head: Head of the batch, as of now. A repeated batch may have a newer one.
        """
        assert self.ready
        if not self.in_flight:
            self._fill()
        self.sending = True
        builder, keys, digests = BatchBuilder(compressor), list[int](), list[int]()
        for outputs in self.in_flight:
            keys += outputs.keys
            digests += outputs.digests
            if not outputs.messages:
                builder.add_many(outputs.records)
                continue
            messages = chain(outputs.messages, repeat(_BARE))
            for record, message in zip(outputs.records, messages, strict=False):
                builder.add(message, record)
        return builder.encode(
            topic=self.queue.topic,
            queue_id=self.queue.queue_id,
            born_unix_ms=born_unix_ms,
            outputs=(encode_head(head), encode_rows(keys, digests, head.floor)),
        )

    def _fill(self) -> None:
        """Put the next outputs in flight."""
        size = count = 0
        while self.waiting:
            outputs = self.waiting[0]
            size += outputs.bytes_count
            count += len(outputs)
            if self.in_flight and (size > BATCH_BYTES or count > BATCH_MESSAGES_MAX):
                break
            self.in_flight.append(self.waiting.popleft())
            self.waiting_bytes -= outputs.bytes_count
            self.waiting_count -= len(outputs)
        self.lane.turn_over(self)

    def stored(self) -> Sequence[PendingOutputs[Input]]:
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

    def clear(self) -> Sequence[PendingOutputs[Input]]:
        """Remove all outputs, and return them in order."""
        outputs = [*self.in_flight, *self.waiting]
        self.in_flight = []
        self.waiting.clear()
        self.waiting_bytes = self.waiting_count = self.failures = 0
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
        self._held: dict[str, deque[PendingOutputs[Input]]] = {}
        self.closed = False

    @property
    def sending(self) -> bool:
        """Whether a call with outputs of the lane is under way."""
        return any(one.sending for one in self._queues.values())

    def add(self, outputs: PendingOutputs[Input]) -> OutputQueue[Input] | None:
        """Add outputs behind the others; return their queue, or None if they wait for others."""
        topic = self._topics[outputs.topic]
        if outputs.ordering_key is None:
            queue = self._turns.get(outputs.topic)
            if queue is None and topic.queues:
                queue = self._turns[outputs.topic] = self._queue(topic.next())
        else:
            queue = self._queue_of_key(outputs, topic)
        if queue is None:
            self._held.setdefault(outputs.topic, deque()).append(outputs)
        else:
            queue.add(outputs)
        return queue

    def _queue_of_key(
        self, outputs: PendingOutputs[Input], topic: TopicQueues
    ) -> OutputQueue[Input] | None:
        assert outputs.ordering_key is not None
        name = outputs.topic
        if self._held.get(name):
            return None
        if self._versions.get(name) != topic.version:
            if self._keyed_counts.get(name):
                return None
            self._versions[name] = topic.version
        if topic.keyed is None:
            return None
        self._keyed_counts[name] = self._keyed_counts.get(name, 0) + 1
        return self._queue(topic.keyed.of(outputs.ordering_key))

    def _queue(self, ref: QueueRef) -> OutputQueue[Input]:
        queue = self._queues.get(ref)
        if queue is None:
            queue = self._queues[ref] = OutputQueue(self, ref)
        return queue

    def turn_over(self, queue: OutputQueue[Input]) -> None:
        """Note that a batch of a queue is full: outputs without a key go to the next queue."""
        if self._turns.get(queue.queue.topic) is queue:
            del self._turns[queue.queue.topic]

    def settled(self, outputs: Iterable[PendingOutputs[Input]]) -> None:
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

    def clear(self) -> list[PendingOutputs[Input]]:
        """Remove all outputs that are not being sent, and return them; those of a key in order."""
        outputs: list[PendingOutputs[Input]] = []
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
