"""Makes a span of OpenTelemetry for each call of a handler."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from batonmq._consumer.handler_adapters import BatchAdapter, HandlerAdapter
from batonmq._consumer.handler_results import RetryLater, Suspend
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.transform_adapter import TransformAdapter
from batonmq._core.outputs import Output
from batonmq._core.requests import Reply
from batonmq._telemetry.open_telemetry import CONTEXT_PROPERTIES, TRACEPARENT

if TYPE_CHECKING:
    from batonmq._telemetry.open_telemetry import OpenTelemetry, ProcessSpan


def trace_calls(
    adapter: HandlerAdapter, telemetry: OpenTelemetry, group: str, client_id: str
) -> None:
    """Replace the adapter's handler by one that makes a span of each call.

    Outputs of a transformer carry the context of their input, and not that of the call: a handler
    that is called again must give the same outputs.
    """
    is_batch = isinstance(adapter, BatchAdapter)
    processing = telemetry._processing_batch if is_batch else telemetry._processing
    finish = _with_context if isinstance(adapter, TransformAdapter) else _as_it_is
    adapter.handler = _traced(
        adapter.handler, partial(processing, group=group, client_id=client_id), finish
    )


def _traced(handler: Any, processing: Any, finish: Callable[[Any, Any], Any]) -> Any:
    if inspect.iscoroutinefunction(handler):

        async def call_async(messages: Any) -> Any:
            span = processing(messages)
            with span.active():
                return finish(messages, _noted(span, await handler(messages)))

        return call_async

    async def go_on(messages: Any, span: ProcessSpan, result: Any) -> Any:
        with span.active():
            return finish(messages, _noted(span, await result))

    def call(messages: Any) -> Any:
        span = processing(messages)
        with span.active():
            result = handler(messages)
            span.goes_on = inspect.isawaitable(result)
            if not span.goes_on:
                return finish(messages, _noted(span, result))
        return go_on(messages, span, result)

    return call


def _noted(span: ProcessSpan, result: Any) -> Any:
    """Return a result; if it means a failure, the span has it as its error."""
    results = result if isinstance(result, list | tuple) else (result,)
    for one in results:
        if isinstance(one, RetryLater | Suspend):
            span.error_type = type(one).__name__
        elif isinstance(one, Reply) and one.error:
            span.error_type = "Reply"
    return result


def _as_it_is(_: Any, result: Any) -> Any:
    return result


def _with_context(message: ReceivedMessage, result: Any) -> Any:
    """Return the outputs in a result, with the context of their input."""
    properties = message.properties
    carried = {name: properties[name] for name in CONTEXT_PROPERTIES if name in properties}
    if TRACEPARENT not in carried or result is None or isinstance(result, RetryLater | Suspend):
        return result
    if isinstance(result, bytes | Output):
        return _carrying(result, carried)
    if isinstance(result, Iterable):
        return [_carrying(one, carried) for one in result]
    return result


def _carrying(output: Any, carried: dict[str, str]) -> Any:
    if isinstance(output, bytes):
        return Output(output, properties=carried)
    if isinstance(output, Output) and TRACEPARENT not in output.properties:
        return replace(output, properties={**output.properties, **carried})
    return output
