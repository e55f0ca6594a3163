"""Adapter for transformers: handlers that return outputs."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

from batonmq._consumer.handler_adapters import SingleMessageAdapter
from batonmq._consumer.handler_results import RetryLater, Suspend, failure_of
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.output_encoder import OutputEncoder, Pending
from batonmq._core.outputs import Output
from batonmq._core.queues import QueueRef
from batonmq._core.requests import Reply
from batonmq._core.retries import HandlingFailure

Made = bytes | Output
TransformResult = Made | Iterable[Made] | RetryLater | Suspend | None
TransformHandler = (
    Callable[[ReceivedMessage], Awaitable[TransformResult] | TransformResult]
    | Callable[[ReceivedMessage], AsyncIterator[Made]]
)


class TransformAdapter(SingleMessageAdapter):
    """Calls a transformer, and keeps the outputs of each input until `take_outputs`.

    Args:
        topics: The output topics; an output without a topic goes to the only one.
    """

    def __init__(self, handler: TransformHandler, topics: Sequence[str]) -> None:
        super().__init__(_collecting(handler))
        self._topics = topics
        self._made: dict[tuple[QueueRef, int], Sequence[Pending]] = {}

    def failures(
        self, result: object, messages: Sequence[ReceivedMessage]
    ) -> Sequence[HandlingFailure | None] | None:
        """See `HandlerAdapter`.

        Raises:
            InvalidArgument: The result is not an output, or names another topic.
            LimitExceeded: There are too many outputs, or one is too long.
        """
        message = messages[0]
        self._made.pop((message.queue, message.offset), None)
        if (failure := failure_of(result)) is not None:
            return [failure]
        encoder = OutputEncoder(self._topics)
        encoder.add(message, result)
        if outputs := encoder.end():
            self._made[message.queue, message.offset] = outputs
        return None

    def replies(
        self, result: object, messages: Sequence[ReceivedMessage]
    ) -> Sequence[tuple[ReceivedMessage, Reply]]:
        """See `HandlerAdapter`."""
        return ()

    def take_outputs(self, message: ReceivedMessage) -> Sequence[Pending]:
        """Return the outputs that the last successful call made of a message."""
        return self._made.pop((message.queue, message.offset), ())


def _collecting(handler: Any) -> Any:
    """Return the handler; one that yields its outputs is replaced by one that returns them."""
    if inspect.isasyncgenfunction(handler):

        async def collect_async(message: ReceivedMessage) -> list[Made]:
            return [one async for one in handler(message)]

        return collect_async
    if inspect.isgeneratorfunction(handler):

        def collect(message: ReceivedMessage) -> list[Made]:
            return list(handler(message))

        return collect
    return handler
