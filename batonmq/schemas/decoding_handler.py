"""Handlers that get values instead of bodies."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar, cast

from batonmq._common.threads import run_in_thread
from batonmq._consumer.handler_adapters import check_handler
from batonmq._consumer.message import ReceivedMessage
from batonmq.schemas.schema import Schema

T = TypeVar("T")


def decoding(
    schema: Schema[T],
    handler: Callable[[T, ReceivedMessage], Awaitable[object] | object],
) -> Callable[[ReceivedMessage], Coroutine[Any, Any, object]]:
    """Return a handler for `Consumer.run` that decodes the body of each message first.

    A body that does not fit the schema raises `BadBody`, so the message is not handled and becomes
    a dead letter at once, or is treated as `exhausted` of the settings says.

    Args:
        handler: Called with the value and the message: a coroutine function, or a plain function,
            which runs in a thread.

    Returns:
        A coroutine function. It returns the result of `handler`, and raises its errors and those of
        `schema.decode`.

    Raises:
        InvalidArgument: The handler can't be called.
    """
    check_handler(handler)
    is_async = inspect.iscoroutinefunction(handler)

    async def handle(message: ReceivedMessage) -> object:
        value = await schema.decode(message.body)
        if is_async:
            return await cast(Awaitable[object], handler(value, message))
        result = await run_in_thread(handler, value, message)
        return await result if inspect.isawaitable(result) else result

    return handle
