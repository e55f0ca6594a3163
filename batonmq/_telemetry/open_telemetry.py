"""Spans and metrics of clients for an OpenTelemetry SDK: one `OpenTelemetry` per process.

telemetry = OpenTelemetry(tracer_provider=provider)
producer = Producer("127.0.0.1:9876", telemetry=telemetry)

Names and attributes are those of the messaging conventions. The context of a message travels in its
properties `traceparent` and `tracestate` (W3C Trace Context).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from batonmq._common.clock import Clock
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Link, Span, TracerProvider

TRACEPARENT: Final = "traceparent"
CONTEXT_PROPERTIES: Final = (TRACEPARENT, "tracestate")
CLOCK: Final = Clock()
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)


class OpenTelemetry:
    """Makes spans of sent, received and handled messages, and counts them.

    Args:
        tracer_provider: Makes the tracer; None for the global provider.
        meter_provider: Makes the meter; None for the global provider.

    Raises:
        ModuleNotFoundError: The package opentelemetry-api is not installed.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        try:
            from opentelemetry import context, metrics, trace  # noqa: PLC0415
            from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "OpenTelemetry needs the package opentelemetry-api: "
                "pip install 'batonmq[opentelemetry]'",
                name=error.name,
            ) from error
        self._trace, self._context = trace, context
        self._propagator = tracecontext.TraceContextTextMapPropagator()
        self._tracer = trace.get_tracer("batonmq", tracer_provider=tracer_provider)
        meter = metrics.get_meter("batonmq", meter_provider=meter_provider)
        self._durations = {
            "process": meter.create_histogram(
                "messaging.process.duration",
                "s",
                "Duration of processing operation.",
                explicit_bucket_boundaries_advisory=_SECONDS,
            ),
            "send": meter.create_histogram(
                "messaging.client.operation.duration",
                "s",
                "Duration of messaging operation initiated by a producer or consumer client.",
                explicit_bucket_boundaries_advisory=_SECONDS,
            ),
        }
        self._sent = meter.create_counter(
            "messaging.client.sent.messages",
            "{message}",
            "Number of messages producer attempted to send to the broker.",
        )
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages",
            "{message}",
            "Number of messages that were delivered to the application.",
        )

    def _start_send(self, topic: str, count: int | None = None) -> SendSpan:
        """Start the span of a message, or of `count` messages that are sent together."""
        attributes = _attributes("send", topic)
        if count is not None:
            attributes["messaging.batch.message_count"] = count
        return SendSpan(self, topic, attributes, 1 if count is None else count)

    def _receive(self, message: Any, group: str, client_id: str) -> None:
        """Note that a message was returned to an application that iterates."""
        attributes = self._message_attributes("receive", message, group, client_id)
        links = self._links([message.properties])
        span = self._tracer.start_span(
            f"receive {message.topic}",
            context=self._context.Context(),
            kind=self._trace.SpanKind.CLIENT,
            attributes=attributes,
            links=links,
        )
        span.end()
        self._consumed.add(1, _measured(attributes))

    def _processing(self, message: Any, group: str, client_id: str) -> ProcessSpan:
        """Start the span of a handler call with one message: a child of the message's context."""
        attributes = self._message_attributes("process", message, group, client_id)
        parent = self._propagator.extract(message.properties, self._context.Context())
        return self._process(attributes, self._links([message.properties]), parent, 1)

    def _processing_batch(self, messages: Any, group: str, client_id: str) -> ProcessSpan:
        """Start the span of a handler call with several messages; it links to their contexts."""
        topic, count = messages[0].topic, len(messages)
        attributes = _attributes("process", topic, group, client_id)
        attributes["messaging.batch.message_count"] = count
        attributes["messaging.destination.partition.id"] = _partition(messages[0].queue)
        links = self._links(message.properties for message in messages)
        return self._process(attributes, links, self._context.Context(), count)

    def _process(
        self, attributes: dict[str, Any], links: list[Link], parent: Any, count: int
    ) -> ProcessSpan:
        self._consumed.add(count, _measured(attributes))
        span = self._tracer.start_span(
            f"process {attributes['messaging.destination.name']}",
            context=parent,
            kind=self._trace.SpanKind.CONSUMER,
            attributes=attributes,
            links=links,
        )
        return ProcessSpan(self, span, _measured(attributes))

    def _end(
        self,
        span: Span,
        operation: str,
        measured: dict[str, Any],
        error_type: str,
        begin_s: float,
    ) -> None:
        if error_type:
            span.set_attribute("error.type", error_type)
            span.set_status(self._trace.StatusCode.ERROR, error_type)
            measured = {**measured, "error.type": error_type}
        self._durations[operation].record(CLOCK.boot_s() - begin_s, measured)

    def _links(self, properties: Iterable[Mapping[str, str]]) -> list[Link]:
        contexts = [self._span_context(one) for one in properties if TRACEPARENT in one]
        return [self._trace.Link(context) for context in contexts if context.is_valid]

    def _span_context(self, properties: Mapping[str, str]) -> Any:
        carried = self._propagator.extract(properties, self._context.Context())
        return self._trace.get_current_span(carried).get_span_context()

    @staticmethod
    def _message_attributes(
        operation: str, message: Any, group: str, client_id: str
    ) -> dict[str, Any]:
        attributes = _attributes(operation, message.topic, group, client_id)
        attributes["messaging.destination.partition.id"] = _partition(message.queue)
        attributes["messaging.message.id"] = message.message_id
        attributes["messaging.message.body.size"] = len(message.body)
        attributes["messaging.batonmq.message.offset"] = message.offset
        attributes["messaging.batonmq.message.attempt"] = message.attempts
        return attributes


class ProcessSpan:
    """The span of a handler call, until the end of `active`.

    Attributes:
        error_type: Why the call has failed; empty for a success.
        goes_on: Whether the call continues after this `active`, in another one.
    """

    def __init__(self, telemetry: OpenTelemetry, span: Span, measured: dict[str, Any]) -> None:
        self._telemetry, self._span, self._measured = telemetry, span, measured
        self._begin_s = CLOCK.boot_s()
        self.error_type, self.goes_on = "", False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make the span the current one; then end it."""
        use_span = self._telemetry._trace.use_span
        self.goes_on = False
        try:
            with use_span(self._span, record_exception=False, set_status_on_exception=False):
                yield
        except BaseException as error:
            self.error_type, self.goes_on = type(error).__qualname__, False
            self._span.record_exception(error)
            raise
        finally:
            if not self.goes_on:
                self._telemetry._end(
                    self._span, "process", self._measured, self.error_type, self._begin_s
                )
                self._span.end()


class SendSpan:
    """The span of a send, from its start to `end`."""

    def __init__(
        self, telemetry: OpenTelemetry, topic: str, attributes: dict[str, Any], count: int
    ) -> None:
        self._telemetry, self._topic, self._count = telemetry, topic, count
        self._attributes, self._begin_s = attributes, CLOCK.boot_s()
        self._span: Any = None

    def carry(self, message: Message) -> Message:
        """Start the span and return the message with its context, unless it has one."""
        properties = self.context_of(message.properties, len(message.body))
        if not properties:
            return message
        return replace(message, properties={**message.properties, **properties})

    def context_of(self, properties: Mapping[str, str], size: int | None = None) -> dict[str, str]:
        """Start the span; return the properties that carry its context.

        They are empty if the application has set a context, to which the span links.
        """
        telemetry = self._telemetry
        links = telemetry._links([properties])
        if size is not None:
            self._attributes["messaging.message.body.size"] = size
        self._span = telemetry._tracer.start_span(
            f"send {self._topic}",
            kind=telemetry._trace.SpanKind.PRODUCER,
            attributes=self._attributes,
            links=links,
        )
        added: dict[str, str] = {}
        if TRACEPARENT not in properties:
            context = telemetry._trace.set_span_in_context(self._span)
            telemetry._propagator.inject(added, context)
        return added

    def stored(self, queue: QueueRef, message_id: str) -> None:
        """Note where the message is stored."""
        self._span.set_attribute("messaging.destination.partition.id", _partition(queue))
        self._span.set_attribute("messaging.message.id", message_id)

    def end(self, error: BaseException | None = None) -> None:
        """End the span, with the error of the send."""
        telemetry, measured = self._telemetry, _measured(self._attributes)
        error_type = "" if error is None else type(error).__qualname__
        if error is not None:
            self._span.record_exception(error)
        telemetry._end(self._span, "send", measured, error_type, self._begin_s)
        self._span.end()
        if error_type:
            measured["error.type"] = error_type
        telemetry._sent.add(self._count, measured)


def _partition(queue: QueueRef) -> str:
    return f"{queue.broker}/{queue.queue_id}"


def _attributes(operation: str, topic: str, group: str = "", client_id: str = "") -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "messaging.system": "batonmq",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": topic,
    }
    if group:
        attributes["messaging.consumer.group.name"] = group
    if client_id:
        attributes["messaging.client.id"] = client_id
    return attributes


def _measured(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of metrics: few values each."""
    names = (
        "system",
        "operation.name",
        "operation.type",
        "destination.name",
        "consumer.group.name",
    )
    full = (f"messaging.{name}" for name in names)
    return {name: attributes[name] for name in full if name in attributes}
