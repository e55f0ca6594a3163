"""Writes the responses of streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any

import grpc
import grpc.aio

CANCELLED_WITHIN_S = 1.0
"""Time that a failed write waits for the cancellation of its call. gRPC does both when a connection
is lost, in any order."""


def encoder_of(handler: grpc.RpcMethodHandler[Any, Any]) -> Callable[[Any], bytes] | None:
    """Return the encoder of the responses of a handler, which may encode some of them itself."""
    encode: Callable[[Any], bytes] | None = handler.response_serializer
    if encode is None or not handler.response_streaming:
        return encode
    known = encode
    return lambda response: response if isinstance(response, bytes) else known(response)


async def write_responses(
    responses: AsyncGenerator[Any, None], context: grpc.aio.ServicerContext[Any, Any]
) -> None:
    """Write all `responses` of a call; a handler that uses it must not be a generator itself.

    gRPC ends a call without a status if it is cancelled while gRPC writes what a generator has
    yielded, and its client would wait on. Here the cancellation of a write is raised in
    `responses`, which may turn it into an error with a reason.

    Raises:
        asyncio.CancelledError: the call was cancelled, or its connection was lost.
        grpc.aio.InternalError: gRPC can't write a response.
    """
    begun = False
    async with aclosing(responses):
        async for response in responses:
            try:
                await _write(response, context, first=not begun)
                begun = True
            except asyncio.CancelledError as cancelled:
                with suppress(StopAsyncIteration):
                    await responses.athrow(cancelled)
                raise


async def _write(
    response: Any, context: grpc.aio.ServicerContext[Any, Any], *, first: bool
) -> None:
    """Write a response, and first the initial metadata if it is the first one.

    Raises:
        asyncio.CancelledError, grpc.aio.InternalError: as `write_responses`.
    """
    try:
        if first:
            await _send_initial_metadata(context)
        await context.write(response)
    except grpc.aio.InternalError:
        await asyncio.sleep(CANCELLED_WITHIN_S)
        raise


async def _send_initial_metadata(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Send the initial metadata to the end, even if the call is cancelled meanwhile.

    gRPC notes that it has sent them only when the write that carries them returns. If that write is
    cancelled, the status carries them a second time, which gRPC refuses: the client would wait on.
    They are not subject to flow control, so this can't be blocked by a client that doesn't read.
    """
    metadata = context.send_initial_metadata(())
    sent = asyncio.ensure_future(metadata)  # noqa: TID251  ends within this call
    try:
        await asyncio.shield(sent)
    except asyncio.CancelledError:
        await asyncio.wait({sent})
        if not sent.cancelled():
            sent.exception()  # else asyncio logs the error of a lost connection
        raise
