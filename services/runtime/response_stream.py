"""Writes the responses of streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

import grpc.aio


async def write_responses(
    responses: AsyncGenerator[Any, None], context: grpc.aio.ServicerContext[Any, Any]
) -> None:
    """Write all `responses` of a call; a handler that uses it must not be a generator itself.

    gRPC ends a call without a status if it is cancelled while gRPC writes what a generator has
    yielded, and its client would wait on. Here the cancellation of a write is raised in
    `responses`, which may turn it into an error with a reason.
    """
    async with aclosing(responses):
        async for response in responses:
            try:
                await context.write(response)
            except asyncio.CancelledError as cancelled:
                with suppress(StopAsyncIteration):
                    await responses.athrow(cancelled)
                raise
