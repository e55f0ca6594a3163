"""Responses of a stream whose client is gone.

Goal: a lost connection ends the stream as a cancelled call does, and is not reported as an error of
the service, whichever of the two gRPC notices first.
Method: `write_responses` with a context whose writes fail as those of gRPC do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from batonmq.errors import NotServing
from batonmq_server.runtime.response_stream import write_responses

GONE = grpc.aio.InternalError('Failed "execute_batch"')


class Context:
    """A call whose second write fails."""

    def __init__(self, failure: BaseException) -> None:
        self._failure, self.written = failure, list[Any]()

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Send nothing."""

    async def write(self, response: Any) -> None:
        """Note a response, or fail."""
        if self.written:
            raise self._failure
        self.written.append(response)


async def numbers(ended: list[str]) -> AsyncIterator[int]:
    """Yield numbers without end, and note why it ends."""
    try:
        for number in range(1_000):
            yield number
    except BaseException as error:
        ended.append(type(error).__name__)
        raise


@pytest.mark.parametrize("failure", [GONE, asyncio.CancelledError()])
async def test_stream_of_a_lost_client_ends_as_cancelled(failure: BaseException) -> None:
    context, ended = Context(failure), list[str]()
    with pytest.raises(asyncio.CancelledError):
        await write_responses(numbers(ended), context)  # type: ignore[arg-type]
    assert (context.written, ended) == ([0], ["CancelledError"])


async def test_stream_of_a_lost_client_may_end_with_a_reason() -> None:
    async def responses() -> AsyncIterator[int]:
        try:
            async for number in numbers([]):
                yield number
        except asyncio.CancelledError:
            raise NotServing("the service stops") from None

    with pytest.raises(NotServing):
        await write_responses(responses(), Context(GONE))  # type: ignore[arg-type]


async def test_error_of_the_responses_is_raised() -> None:
    async def responses() -> AsyncIterator[int]:
        yield 1
        raise ValueError("a defect")

    with pytest.raises(ValueError, match="a defect"):
        await write_responses(responses(), Context(GONE))  # type: ignore[arg-type]
