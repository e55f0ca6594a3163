"""What a client counts for Prometheus, if it is asked to: one `ClientMetrics` for all in a process.

metrics = ClientMetrics(prometheus_client.REGISTRY)
consumer = Consumer("127.0.0.1:9876", "billing", {"orders": "*"}, metrics=metrics)
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from batonmq._core.flow_control import FlowReason
from batonmq._core.retries import HandlingFailure
from batonmq.errors import BatonError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Histogram

_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 300, 900)
_BATCHES = (1, 10, 100, 1_000, 10_000, 65_535)
_FLOW_REASONS: tuple[FlowReason, ...] = ("count", "bytes", "span", "paused")


class Holder(Protocol):
    """What a consumer has in its hands at the moment."""

    def in_hand(self) -> int:
        """Messages whose handlers run."""

    def buffered(self) -> tuple[int, int]:
        """Messages that wait for a handler, and the bytes of their bodies."""

    def held(self, reason: FlowReason) -> int:
        """Queues that are not pulled for this reason."""


class ClientMetrics:
    """Every series has the prefix `baton_consumer_` or `baton_producer_`.

    Args:
        registry: Where they are registered, once.

    Raises:
        ModuleNotFoundError: The package prometheus-client is not installed.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        try:
            from prometheus_client import Counter, Gauge, Histogram  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "ClientMetrics needs the package prometheus-client: "
                "pip install 'batonmq[prometheus]'",
                name=error.name,
            ) from error
        by_topic, by_client = ("group", "topic"), ("group", "client_id")
        self.handled = Counter(
            "baton_consumer_handled_messages",
            "Messages that a handler has taken.",
            by_topic,
            registry=registry,
        )
        self.failed = Counter(
            "baton_consumer_failed_messages",
            "Messages that a handler has not taken, by reason: asked, failed or timeout.",
            (*by_topic, "reason"),
            registry=registry,
        )
        self.retried = Counter(
            "baton_consumer_retried_messages",
            "Messages that are to be handled again: sent back, or kept in hand.",
            by_topic,
            registry=registry,
        )
        self.dead = Counter(
            "baton_consumer_dead_messages",
            "Messages that went to the dead letters.",
            by_topic,
            registry=registry,
        )
        self.handler_seconds = Histogram(
            "baton_consumer_handler_seconds",
            "Time of one call of a handler, with one message or many.",
            by_topic,
            buckets=_SECONDS,
            registry=registry,
        )
        self.queue_changes = Counter(
            "baton_consumer_queue_changes",
            "Queues that came or went, by kind: granted, draining, released or fenced.",
            ("group", "kind"),
            registry=registry,
        )
        self.in_hand = Gauge(
            "baton_consumer_in_hand_messages",
            "Messages whose handlers run.",
            by_client,
            registry=registry,
        )
        self.buffered_messages = Gauge(
            "baton_consumer_buffered_messages",
            "Messages that wait for a handler in the client.",
            by_client,
            registry=registry,
        )
        self.buffered_bytes = Gauge(
            "baton_consumer_buffered_bytes",
            "Bytes of their bodies.",
            by_client,
            registry=registry,
        )
        self.held_queues = Gauge(
            "baton_consumer_held_queues",
            "Queues that are not pulled, by reason: count, bytes, span or paused.",
            (*by_client, "reason"),
            registry=registry,
        )

        self.sent = Counter(
            "baton_producer_sent_messages",
            "Messages that are stored as safely as the producer asks.",
            ("topic",),
            registry=registry,
        )
        self.unsent = Counter(
            "baton_producer_failed_messages",
            "Messages that were refused, or of which nothing is known, by reason.",
            ("topic", "reason"),
            registry=registry,
        )
        self.batch_messages = Histogram(
            "baton_producer_batch_messages",
            "Messages of one batch.",
            ("topic",),
            buckets=_BATCHES,
            registry=registry,
        )
        self.send_seconds = Histogram(
            "baton_producer_send_seconds",
            "Time from the first message of a batch to its outcome.",
            ("topic",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.in_flight: dict[ProducerMetrics, Callable[[], int]] = {}
        Gauge(
            "baton_producer_in_flight_bytes",
            "Bytes of messages that wait or travel, of all producers.",
            registry=registry,
        ).set_function(lambda: sum(bytes_count() for bytes_count in list(self.in_flight.values())))

    def of_producer(self) -> ProducerMetrics:
        """The part of one producer."""
        return ProducerMetrics(self)

    def of_consumer(self, group: str, client_id: str) -> ConsumerMetrics:
        """The part of one consumer."""
        return ConsumerMetrics(self, group, client_id)


class ConsumerMetrics:
    """What one consumer tells."""

    def __init__(self, metrics: ClientMetrics, group: str, client_id: str) -> None:
        self._metrics, self._group = metrics, group
        self._client = group, client_id
        self._handled: dict[str, tuple[Counter, Histogram]] = {}

    def watch(self, holder: Holder) -> None:
        """Show what a consumer holds until `unwatch`; it is looked at when somebody asks."""
        metrics, client = self._metrics, self._client
        metrics.in_hand.labels(*client).set_function(holder.in_hand)
        metrics.buffered_messages.labels(*client).set_function(lambda: holder.buffered()[0])
        metrics.buffered_bytes.labels(*client).set_function(lambda: holder.buffered()[1])
        for reason in _FLOW_REASONS:

            def held(reason: FlowReason = reason) -> int:
                return holder.held(reason)

            metrics.held_queues.labels(*client, reason).set_function(held)

    def unwatch(self) -> None:
        """Show it no more."""
        metrics, client = self._metrics, self._client
        for gauge in (metrics.in_hand, metrics.buffered_messages, metrics.buffered_bytes):
            gauge.remove(*client)
        for reason in _FLOW_REASONS:
            metrics.held_queues.remove(*client, reason)

    def handled(
        self, topic: str, count: int, failures: Iterable[HandlingFailure | None], seconds: float
    ) -> None:
        """A call of a handler with so many messages has ended."""
        taken, time = self._of_topic(topic)
        time.observe(seconds)
        reasons = Counts(failure.reason for failure in failures if failure is not None)
        taken.inc(count - reasons.total())
        for reason, failed in reasons.items():
            self._metrics.failed.labels(self._group, topic, reason).inc(failed)

    def retried(self, topic: str) -> None:
        """A message is to be handled again."""
        self._metrics.retried.labels(self._group, topic).inc()

    def dead(self, topic: str) -> None:
        """A message went to the dead letters."""
        self._metrics.dead.labels(self._group, topic).inc()

    def queue_changed(self, kind: str) -> None:
        """A queue came or went."""
        self._metrics.queue_changes.labels(self._group, kind).inc()

    def _of_topic(self, topic: str) -> tuple[Counter, Histogram]:
        found = self._handled.get(topic)
        if found is None:
            labels = self._group, topic
            found = self._handled[topic] = (
                self._metrics.handled.labels(*labels),
                self._metrics.handler_seconds.labels(*labels),
            )
        return found


class ProducerMetrics:
    """What one producer tells."""

    def __init__(self, metrics: ClientMetrics) -> None:
        self._metrics = metrics

    def watch(self, in_flight_bytes: Callable[[], int]) -> None:
        """Count what is in flight until `unwatch`; it is looked at when somebody asks."""
        self._metrics.in_flight[self] = in_flight_bytes

    def unwatch(self) -> None:
        """Count it no more."""
        self._metrics.in_flight.pop(self, None)

    def settled(self, topic: str, count: int, took_ms: int, error: BatonError | None) -> None:
        """A batch of so many messages has its outcome."""
        metrics = self._metrics
        if error is None:
            metrics.sent.labels(topic).inc(count)
        else:
            metrics.unsent.labels(topic, error.reason).inc(count)
        metrics.batch_messages.labels(topic).observe(count)
        metrics.send_seconds.labels(topic).observe(took_ms / 1000)
