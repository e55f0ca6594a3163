"""The messages that a producer has buffered or in flight, in batches per queue."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._connection.directory import ClientEnvironment, Directory
from batonmq._core.broker_health import BrokerHealth
from batonmq._core.queue_sender import Batch, QueueSender, maybe_stored
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message
from batonmq._producer.broker_sender import BrokerSender
from batonmq._producer.message_columns import MessagePiece
from batonmq._producer.one_way_failures import OneWayFailures
from batonmq._producer.producer_settings import (
    ProducerSettings,
    batch_limits_of,
    compressor_of,
)
from batonmq._producer.receipts import ANY_QUEUE, BatchOutcome, PendingReceipt, SendOptions
from batonmq._producer.topic_queues import TopicQueues
from batonmq._telemetry.client_metrics import ProducerMetrics
from batonmq.errors import BatonError, NotWritable, Retry, Unreachable

if TYPE_CHECKING:
    from batonmq._telemetry.event_counters import ProducerEventCounter


class ProducerClosed(Unreachable):
    """The producer is closed. Messages without a receipt may be stored or not."""

    retry = Retry.NEVER
    remedy = "Open another Producer; messages without a receipt may be stored."


class SendBuffer:
    """Puts messages into batches, and settles or reroutes the batches that senders return.

    Args:
        start: Runs a coroutine until the producer is closed.
        metrics: Counts outcomes for Prometheus; None for no metrics.
        event_counter: Counts outcomes for the metrics stream; None for no stream.

    Attributes:
        topics: The open topics, by name.
        batch_limits: Limits of each batch.
        broker_health: Recent failures and latencies of brokers.
        one_way_failures: Counts one-way messages that failed.
        free_bytes: Bytes of messages that may still be added before the limit.
        on_settled: Called when a batch has its outcome, and its bytes are free.
    """

    def __init__(
        self,
        settings: ProducerSettings,
        directory: Directory,
        environment: ClientEnvironment,
        start: Callable[[Coroutine[Any, Any, None]], object],
        *,
        metrics: ProducerMetrics | None = None,
        event_counter: ProducerEventCounter | None = None,
    ) -> None:
        self._settings, self._directory = settings, directory
        self._metrics, self._event_counter = metrics, event_counter
        self._clock, self._random, self._start = environment.clock, environment.random, start
        self._packing, self.batch_limits = compressor_of(settings), batch_limits_of(settings)
        self.topics: dict[str, TopicQueues] = {}
        self.broker_health = BrokerHealth()
        self.one_way_failures = OneWayFailures()
        self.free_bytes = settings.in_flight_bytes_max
        self.on_settled: Callable[[], None] = lambda: None
        self._senders: dict[QueueRef, QueueSender[BatchOutcome]] = {}
        self._brokers: dict[str, BrokerSender] = {}

    def add_topic(self, name: str, route: nameserver_pb.Route) -> TopicQueues:
        """Add a topic, whose rotation begins at a random queue."""
        turn = self._random.getrandbits(16)
        known = self.topics[name] = TopicQueues(route, self.broker_health, turn)
        return known

    def remove_topic(self, name: str) -> None:
        """Forget a deleted topic, and the senders of deleted topics that have nothing to send."""
        self.topics.pop(name, None)
        self._senders = {
            queue: sender
            for queue, sender in self._senders.items()
            if queue.topic in self.topics or sender.batches
        }

    def place(
        self,
        known: TopicQueues,
        options: SendOptions,
        message: Message,
        record: bytes,
        begin_ms: int | None = None,
    ) -> tuple[BatchOutcome, int]:
        """Put the message into a batch.

        Args:
            begin_ms: Monotonic time at which the message was passed to the producer; None for now.

        Returns:
            Outcome of the batch, and the index of the message in the batch.
        """
        if options is not ANY_QUEUE and not options.any_queue:
            sender = self._sender(known.choose(options, 0))
            batch = sender.open_batch(len(record))
        else:
            sender, batch = self._next(known, options, len(record))
        if batch is None:
            now_ms = self._clock.monotonic_ms() if begin_ms is None else begin_ms
            batch = sender.begin_batch(BatchOutcome(sender.queue), now_ms)
            self._brokers[sender.queue.broker].wake(sender)
        elif begin_ms is not None:
            batch.begin_ms = min(batch.begin_ms, begin_ms)
        index, outcome = batch.builder.add(message, record), batch.token
        if options is not ANY_QUEUE:
            outcome.options[index] = options
        outcome.bytes_count += len(record)
        self.free_bytes -= len(record)
        return outcome, index

    def place_many(
        self, known: TopicQueues, options: SendOptions, piece: MessagePiece
    ) -> tuple[BatchOutcome, int]:
        """Put the messages of `piece` into one batch; return as `place`, for the first message."""
        sender = self._sender(known.choose(options, self._clock.monotonic_ms()))
        batch = sender.open_batch(piece.size, len(piece.records))
        if batch is None:
            batch = sender.begin_batch(BatchOutcome(sender.queue), self._clock.monotonic_ms())
            self._brokers[sender.queue.broker].wake(sender)
        first = batch.builder.add_many(piece.records, piece.tag, piece.keys)
        outcome = batch.token
        if options is not ANY_QUEUE:
            for index in range(first, first + len(piece.records)):
                outcome.options[index] = options
        outcome.bytes_count += piece.size
        self.free_bytes -= piece.size
        return outcome, first

    def last(self, known: TopicQueues) -> dict[QueueRef, BatchOutcome]:
        """Return the last batch in flight of each queue of the topic, by queue."""
        return {
            queue: sender.last.token
            for queue in known.queues
            if (sender := self._senders.get(queue)) is not None and sender.last is not None
        }

    async def flush(self) -> None:
        """Wait until every message that is in a batch now is stored or has failed."""
        outcomes = [batch.token for one in self._senders.values() for batch in one.batches]
        for outcome in outcomes:
            await outcome.wait_for_all()

    def fail_all(self) -> None:
        """Fail every batch without an outcome with `ProducerClosed`."""
        for sender in self._senders.values():
            for batch in sender.drop():
                self.settle(batch, ProducerClosed("the producer was closed"))

    # ---- BatchResults: called by the senders of the brokers

    def settle(self, batch: Batch[BatchOutcome], outcome: pb.AppendReceipt | BatonError) -> None:
        """Set the outcome of a batch and count it."""
        batch.token.settle(outcome)
        self._free(batch)
        now_ms = self._clock.monotonic_ms()
        error = outcome if isinstance(outcome, BatonError) else None
        if error is not None:
            one_way = sum(options.one_way for options in batch.token.options.values())
            self.one_way_failures.add(one_way, error, now_ms)
        topic, count = batch.token.queue.topic, batch.builder.count
        if self._metrics is not None:
            self._metrics.settled(topic, count, now_ms - batch.begin_ms, error)
        if self._event_counter is not None:
            size = (count, batch.token.bytes_count)
            self._event_counter.settled(topic, size, now_ms - batch.begin_ms, stored=error is None)

    def is_writable(self, queue: QueueRef) -> bool:
        """Return whether the latest route says that the queue is writable."""
        known = self.topics.get(queue.topic)
        return known is None or queue in known.queues

    def topic_epoch(self, topic: str) -> int | None:
        """Return the epoch of the topic, as its latest route says; None if that is not known."""
        known = self.topics.get(topic)
        return known.epoch if known is not None else None

    def move(self, sender: QueueSender[BatchOutcome], error: BatonError) -> None:
        """Move the batches of a queue that is not writable to other queues of the topic.

        A batch that may be stored is settled instead, unless `error` is `NotWritable`: after that
        no attempt is stored any more, thanks to the epochs that they name.
        """
        known = self.topics.get(sender.queue.topic)
        for batch in (sender.rejected(), *sender.drop()):
            if known is None or (batch.unsure and not isinstance(error, NotWritable)):
                self.settle(batch, maybe_stored(error) if batch.unsure else error)
            else:
                self._reroute(known, batch)

    def broker_answered(self, broker: str, latency_ms: int) -> None:
        """Record that the broker has answered a request."""
        self.broker_health.answered(broker, latency_ms, self._clock.monotonic_ms())

    def broker_failed(self, broker: str) -> None:
        """Record a failure of the broker; messages without a fixed queue avoid it."""
        self.broker_health.failed(broker, self._clock.monotonic_ms())
        for known in self.topics.values():
            known.avoid(broker)

    def reroute(self, sender: QueueSender[BatchOutcome]) -> None:
        """Move waiting batches that are certainly not stored to healthy brokers.

        A batch with a message that has an ordering key or a queue is not moved.
        """
        known = self.topics.get(sender.queue.topic)
        if known is None:
            return
        now_ms = self._clock.monotonic_ms()
        count_max = self.broker_health.takes_count(known.queues, sender.queue.broker, now_ms)
        for batch in sender.take_away(
            lambda one: not one.unsure and one.token.any_queue, count_max
        ):
            self._reroute(known, batch)

    # ---- internals

    def _next(
        self, known: TopicQueues, options: SendOptions, record_bytes: int
    ) -> tuple[QueueSender[BatchOutcome], Batch[BatchOutcome] | None]:
        """Return the sender for a message that may go to any queue, and its open batch if any.

        A queue takes messages until its batch is sent or full, then it is the next one's turn: a
        batch for each queue in turn would make many small batches (as Kafka's KIP-480).
        """
        sender = known.current
        if sender is not None:
            batch = sender.open_batch(record_bytes)
            if batch is not None:
                return sender, batch
        sender = known.current = self._sender(known.choose(options, self._clock.monotonic_ms()))
        return sender, sender.open_batch(record_bytes)

    def _reroute(self, known: TopicQueues, batch: Batch[BatchOutcome]) -> None:
        """Put the messages of a batch that is not stored into other batches."""
        moved = [
            self._rerouted(
                known, batch.token.options.get(index, ANY_QUEUE), message, batch.begin_ms
            )
            for index, message in enumerate(batch.builder.messages())
        ]
        batch.token.move(moved)
        self._free(batch)

    def _rerouted(
        self,
        known: TopicQueues,
        options: SendOptions,
        message: tuple[Message, bytes],
        begin_ms: int,
    ) -> PendingReceipt:
        try:
            return PendingReceipt(*self.place(known, options, *message, begin_ms))
        except BatonError as error:
            self.one_way_failures.add(int(options.one_way), error, self._clock.monotonic_ms())
            refused = BatchOutcome(options.queue or QueueRef("", "", 0))
            refused.settle(error)
            return PendingReceipt(refused, 0)

    def _free(self, batch: Batch[BatchOutcome]) -> None:
        self.free_bytes += batch.token.bytes_count
        self.on_settled()

    def _sender(self, queue: QueueRef) -> QueueSender[BatchOutcome]:
        sender = self._senders.get(queue)
        if sender is None:
            sender = self._senders[queue] = QueueSender(
                queue,
                self._random.getrandbits(63) or 1,
                *self.batch_limits,
                self._packing,
            )
            if queue.broker not in self._brokers:
                loop = BrokerSender(
                    queue.broker, self._settings, self._directory, self._clock, self
                )
                self._brokers[queue.broker] = loop
                self._start(loop.run())
        return sender
