"""Prometheus metrics of clients: one `ClientMetrics` for all clients of a process.

metrics = ClientMetrics(prometheus_client.REGISTRY)
consumer = Consumer("127.0.0.1:9876", "billing", {"orders": "*"}, metrics=metrics)
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from batonmq._core.flow_control import FlowReason
from batonmq._core.retries import HandlingFailure
from batonmq.errors import BatonError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Histogram

_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 300, 900)
_BATCHES = (1, 10, 100, 1_000, 10_000, 65_535)
KeyState = Literal["handling", "retrying"]
_KEY_STATES: tuple[KeyState, ...] = ("handling", "retrying")
_FLOW_REASONS: tuple[FlowReason, ...] = ("count", "bytes", "span", "paused")


class GaugeSource(Protocol):
    """The present values of a consumer's gauges; read from any thread."""

    def in_flight(self) -> int:
        """Return the number of messages in handlers."""

    def buffered(self) -> tuple[int, int]:
        """Return the number of messages that wait for a handler, and the bytes of their bodies."""

    def keys(self, state: KeyState) -> int:
        """Return the number of messages that hold their ordering keys, by what they wait for."""

    def delayed(self, reason: FlowReason) -> int:
        """Return the number of queues that delay their next pull for `reason`."""


class ClientMetrics:
    """Metrics with the prefixes `baton_consumer_` and `baton_producer_`.

    Args:
        registry: The registry; one registry takes only one `ClientMetrics`.

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
            "Messages that were handled successfully.",
            by_topic,
            registry=registry,
        )
        self.received = Counter(
            "baton_consumer_received_messages",
            "Messages that a pull brought for a handler, by redelivered: yes for messages that are "
            "flagged because a handler may have started them before, else no.",
            (*by_topic, "redelivered"),
            registry=registry,
        )
        self.failed = Counter(
            "baton_consumer_failed_messages",
            "Messages with failed handling, by reason: asked (the handler returned RetryLater or "
            "Suspend), failed or timeout.",
            (*by_topic, "reason"),
            registry=registry,
        )
        self.retried = Counter(
            "baton_consumer_retried_messages",
            "Failed messages that are handled again: sent back, or retried by the same consumer.",
            by_topic,
            registry=registry,
        )
        self.dead = Counter(
            "baton_consumer_dead_messages",
            "Messages that were sent to the dead-letter topic.",
            by_topic,
            registry=registry,
        )
        self.handler_seconds = Histogram(
            "baton_consumer_handler_seconds",
            "Duration of one handler call, with one message or a list, in seconds.",
            by_topic,
            buckets=_SECONDS,
            registry=registry,
        )
        self.queue_changes = Counter(
            "baton_consumer_queue_changes",
            "Changes of a queue's ownership, by kind: granted, draining, released or fenced.",
            ("group", "kind"),
            registry=registry,
        )
        self.running_messages = Gauge(
            "baton_consumer_handling_messages",
            "Messages in handlers.",
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
            "Bytes of the messages that wait for a handler in the client.",
            by_client,
            registry=registry,
        )
        self.held_queues = Gauge(
            "baton_consumer_held_queues",
            "Queues with a delayed next pull, by flow limit: count, bytes, span or paused.",
            (*by_client, "reason"),
            registry=registry,
        )

        self.ordering_keys = Gauge(
            "baton_consumer_ordering_keys",
            "Ordering keys that later messages wait for, by state: handling (a message of the key "
            "is in a handler) or retrying (one has failed, and is handled again after a delay). 0 "
            "unless messages are handled in the order of their keys.",
            (*by_client, "state"),
            registry=registry,
        )
        self.outputs = Counter(
            "baton_consumer_stored_outputs",
            "Outputs of transformers that were stored, by output topic.",
            by_topic,
            registry=registry,
        )
        self.refused_outputs = Counter(
            "baton_consumer_refused_outputs",
            "Inputs whose outputs are refused, by reason: OUTPUT_MISMATCH (other outputs are "
            "stored) or OUTPUTS_FORGOTTEN (it is not known whether they are stored).",
            (*by_topic, "reason"),
            registry=registry,
        )
        self.replies = Counter(
            "baton_consumer_replies",
            "Replies to requests, by outcome: delivered, late (the requester is gone), inbox_full "
            "(the requester reads too slowly) or failed (the reply could not be sent).",
            (*by_topic, "outcome"),
            registry=registry,
        )

        self.sent = Counter(
            "baton_producer_sent_messages",
            "Messages that were stored with the durability that the producer requested.",
            ("topic",),
            registry=registry,
        )
        self.unsent = Counter(
            "baton_producer_failed_messages",
            "Messages that were refused, or have an unknown outcome, by reason.",
            ("topic", "reason"),
            registry=registry,
        )
        self.batch_messages = Histogram(
            "baton_producer_batch_messages",
            "Number of messages in one batch.",
            ("topic",),
            buckets=_BATCHES,
            registry=registry,
        )
        self.send_seconds = Histogram(
            "baton_producer_send_seconds",
            "Time from the first message of a batch to its outcome, in seconds.",
            ("topic",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.requests = Counter(
            "baton_producer_requests",
            "Requests, by outcome: replied, failed (the responder replied with an error), timeout "
            "or error (the request was not sent, or its inbox was lost).",
            ("topic", "outcome"),
            registry=registry,
        )
        self.request_seconds = Histogram(
            "baton_producer_request_seconds",
            "Time from a request to its reply, in seconds.",
            ("topic",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.late_replies = Counter(
            "baton_producer_late_replies",
            "Replies to requests that have timed out, or were replied to before; dropped.",
            registry=registry,
        )
        self.in_flight: dict[ProducerMetrics, Callable[[], int]] = {}
        Gauge(
            "baton_producer_in_flight_bytes",
            "Bytes of messages that wait or are being sent, of all producers.",
            registry=registry,
        ).set_function(lambda: sum(bytes_count() for bytes_count in list(self.in_flight.values())))


class ConsumerMetrics:
    """The metrics of one consumer."""

    def __init__(self, metrics: ClientMetrics, group: str, client_id: str) -> None:
        self._metrics, self._group = metrics, group
        self._client = group, client_id
        self._handled: dict[str, tuple[Counter, Histogram]] = {}

    def watch(self, source: GaugeSource) -> None:
        """Read the gauges from `source` at each scrape, until `unwatch`."""
        metrics, client = self._metrics, self._client
        metrics.running_messages.labels(*client).set_function(source.in_flight)
        metrics.buffered_messages.labels(*client).set_function(lambda: source.buffered()[0])
        metrics.buffered_bytes.labels(*client).set_function(lambda: source.buffered()[1])
        for state in _KEY_STATES:

            def keys(state: KeyState = state) -> int:
                return source.keys(state)

            metrics.ordering_keys.labels(*client, state).set_function(keys)
        for reason in _FLOW_REASONS:

            def held(reason: FlowReason = reason) -> int:
                return source.delayed(reason)

            metrics.held_queues.labels(*client, reason).set_function(held)

    def unwatch(self) -> None:
        """Remove the gauges."""
        metrics, client = self._metrics, self._client
        for gauge in (metrics.running_messages, metrics.buffered_messages, metrics.buffered_bytes):
            gauge.remove(*client)
        for state in _KEY_STATES:
            metrics.ordering_keys.remove(*client, state)
        for reason in _FLOW_REASONS:
            metrics.held_queues.remove(*client, reason)

    def received(self, topic: str, count: int, redelivered_count: int) -> None:
        """Count `count` messages of a pull, `redelivered_count` of them flagged."""
        counter = self._metrics.received
        if count > redelivered_count:
            counter.labels(self._group, topic, "no").inc(count - redelivered_count)
        if redelivered_count:
            counter.labels(self._group, topic, "yes").inc(redelivered_count)

    def handled(
        self, topic: str, count: int, failures: Iterable[HandlingFailure | None], seconds: float
    ) -> None:
        """Count a handler call with `count` messages that has ended."""
        taken, time = self._of_topic(topic)
        time.observe(seconds)
        reasons = Counts(failure.reason for failure in failures if failure is not None)
        taken.inc(count - reasons.total())
        for reason, failed in reasons.items():
            self._metrics.failed.labels(self._group, topic, reason).inc(failed)

    def handled_each(self, topic: str, seconds: Sequence[float]) -> None:
        """Count calls for one message each that have succeeded."""
        taken, time = self._of_topic(topic)
        taken.inc(len(seconds))
        for one in seconds:
            time.observe(one)

    def retried(self, topic: str) -> None:
        """Count a message that is handled again."""
        self._metrics.retried.labels(self._group, topic).inc()

    def dead(self, topic: str) -> None:
        """Count a message that was sent to the dead-letter topic."""
        self._metrics.dead.labels(self._group, topic).inc()

    def replied(self, topic: str, outcome: str, count: int) -> None:
        """Count replies with a known outcome."""
        self._metrics.replies.labels(self._group, topic, outcome).inc(count)

    def outputs_stored(self, topic: str, count: int) -> None:
        """Count outputs that were stored in a topic."""
        self._metrics.outputs.labels(self._group, topic).inc(count)

    def output_refused(self, topic: str, reason: str) -> None:
        """Count an input of a topic whose outputs are refused."""
        self._metrics.refused_outputs.labels(self._group, topic, reason).inc()

    def queue_changed(self, kind: str) -> None:
        """Count a change of a queue's ownership."""
        self._metrics.queue_changes.labels(self._group, kind).inc()

    def _of_topic(self, topic: str) -> tuple[Counter, Histogram]:
        counters = self._handled.get(topic)
        if counters is None:
            labels = self._group, topic
            counters = self._handled[topic] = (
                self._metrics.handled.labels(*labels),
                self._metrics.handler_seconds.labels(*labels),
            )
        return counters


class ProducerMetrics:
    """The metrics of one producer."""

    def __init__(self, metrics: ClientMetrics) -> None:
        self._metrics = metrics

    def watch(self, in_flight_bytes: Callable[[], int]) -> None:
        """Read the bytes in flight at each scrape, until `unwatch`."""
        self._metrics.in_flight[self] = in_flight_bytes

    def unwatch(self) -> None:
        """Do not read the bytes in flight any more."""
        self._metrics.in_flight.pop(self, None)

    def settled(self, topic: str, count: int, took_ms: int, error: BatonError | None) -> None:
        """Count a batch of `count` messages with a known outcome."""
        metrics = self._metrics
        if error is None:
            metrics.sent.labels(topic).inc(count)
        else:
            metrics.unsent.labels(topic, error.reason).inc(count)
        metrics.batch_messages.labels(topic).observe(count)
        metrics.send_seconds.labels(topic).observe(took_ms / 1000)

    def requested(self, topic: str, outcome: str, seconds: float) -> None:
        """Count a request that has ended."""
        self._metrics.requests.labels(topic, outcome).inc()
        if outcome in ("replied", "failed"):
            self._metrics.request_seconds.labels(topic).observe(seconds)

    def late_reply(self) -> None:
        """Count a reply without a request that waits for it."""
        self._metrics.late_replies.inc()
