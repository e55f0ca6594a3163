"""Adapters for the two kinds of handlers: for one message, and for a list of messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.handler_results import failure_of, reply_of
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.message_batch import MessageBatch
from batonmq._core.requests import Reply
from batonmq._core.retries import HandlingFailure
from batonmq.errors import InvalidArgument

Handler = Callable[[ReceivedMessage], Awaitable[object] | object]
BatchHandler = Callable[
    [MessageBatch], Awaitable[Sequence[object] | None] | Sequence[object] | None
]


def check_handler(handler: object) -> None:
    """Raise InvalidArgument if a handler can't be called: each message would fail."""
    if not callable(handler):
        raise InvalidArgument(
            f"the handler is not a function, got {handler!r:.100}",
            remedy="Pass the function itself, without calling it.",
            facts={"field": "handler"},
        )


class HandlerAdapter(Protocol):
    """Calls the application's handler and reads its results.

    Attributes:
        handler: The application's function.
        inline: Whether a plain function is called in the event loop, and not in a thread.
    """

    handler: Any
    inline: bool

    def take(self, queue: AssignedQueue) -> Sequence[ReceivedMessage] | None:
        """Start the messages of the next call; None if none may be started."""

    def call(self, messages: Any) -> Any:
        """Call the handler with messages of one queue, at least one."""

    def failures(
        self, result: object, messages: Sequence[ReceivedMessage]
    ) -> Sequence[HandlingFailure | None] | None:
        """Return the failure of each message, by the handler's result; None if all are handled."""

    def replies(
        self, result: object, messages: Sequence[ReceivedMessage]
    ) -> Sequence[tuple[ReceivedMessage, Reply]]:
        """Return the replies in the handler's result."""


class SingleMessageAdapter:
    """Adapter for a handler of one message."""

    def __init__(self, handler: Handler, *, inline: bool = False) -> None:
        self.handler: Any = handler
        self.inline = inline

    def take(self, queue: AssignedQueue) -> Sequence[ReceivedMessage] | None:
        """See `HandlerAdapter`."""
        message = queue.take_one()
        return None if message is None else (message,)

    def call(self, messages: Sequence[ReceivedMessage]) -> Any:
        """See `HandlerAdapter`."""
        return self.handler(messages[0])

    def failures(
        self, result: object, messages: Sequence[ReceivedMessage]
    ) -> Sequence[HandlingFailure | None] | None:
        """See `HandlerAdapter`."""
        if result is None or (failure := failure_of(result)) is None:
            return None
        return [failure]

    def replies(
        self, result: object, messages: Sequence[ReceivedMessage]
    ) -> Sequence[tuple[ReceivedMessage, Reply]]:
        """See `HandlerAdapter`."""
        reply = reply_of(result)
        return () if reply is None else ((messages[0], reply),)


class BatchAdapter:
    """Adapter for a handler of a list of messages.

    Raises:
        InvalidArgument: `messages_max` is less than 1.
    """

    def __init__(self, handler: BatchHandler, messages_max: int) -> None:
        if messages_max < 1:
            raise InvalidArgument(
                f"messages_max must be at least 1, got {messages_max}",
                facts={"field": "messages_max"},
            )
        self.handler: Any = handler
        self.inline = False
        self._messages_max = messages_max

    def take(self, queue: AssignedQueue) -> MessageBatch | None:
        """See `HandlerAdapter`."""
        return queue.take(self._messages_max)

    def call(self, messages: MessageBatch) -> Any:
        """See `HandlerAdapter`."""
        return self.handler(messages)

    def failures(
        self, result: object, messages: Sequence[ReceivedMessage]
    ) -> Sequence[HandlingFailure | None] | None:
        """See `HandlerAdapter`.

        Raises:
            InvalidArgument: the result is neither None nor a list with one result per message.
        """
        if result is None:
            return None
        if not isinstance(result, Sequence) or len(result) != len(messages):
            raise InvalidArgument(
                f"the handler of {len(messages)} messages returned {result!r:.100}",
                remedy="Return None, or a list with one result for each message, in order.",
            )
        failures = [failure_of(one) for one in result]
        return failures if any(failures) else None

    def replies(
        self, result: object, messages: Sequence[ReceivedMessage]
    ) -> Sequence[tuple[ReceivedMessage, Reply]]:
        """See `HandlerAdapter`."""
        if result is None or not isinstance(result, Sequence):
            return ()
        replies = zip(messages, map(reply_of, result), strict=True)
        return [(message, reply) for message, reply in replies if reply is not None]
