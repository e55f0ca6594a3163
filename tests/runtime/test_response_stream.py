"""Responses of a stream after its connection was lost.

Goal: a lost connection ends a stream as cancelled, and the service reports no error, in whatever
order gRPC fails the write and cancels the call. A response that gRPC can't write is an error.
Method: `write_responses` with a twin of the gRPC context; the twin fails a write or the metadata.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc.aio
import pytest

from batonmq.errors import NotServing
from batonmq_server.runtime import response_stream
from batonmq_server.runtime.response_stream import write_responses

FAILED = grpc.aio.InternalError('Failed "execute_batch"')


class Context:
    """A call that fails at one step.

    Args:
        cancelled: Whether the call is cancelled after the failure.
        written_max: Responses that are written before the failure; -1: the metadata fail.
    """

    def __init__(self, *, cancelled: bool, written_max: int = 1) -> None:
        self._cancelled, self._written_max = cancelled, written_max
        self._task, self.written = self.this_task(), list[Any]()

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Send nothing, or fail."""
        if self._written_max < 0:
            self._fail()

    async def write(self, response: Any) -> None:
        """Note a response, or fail."""
        if len(self.written) >= self._written_max:
            self._fail()
        self.written.append(response)

    def _fail(self) -> None:
        if self._cancelled:
            asyncio.get_running_loop().call_soon(self._task.cancel)
        raise FAILED

    @staticmethod
    def this_task() -> asyncio.Task[Any]:
        """Return the task of the test, which is that of the call."""
        task = asyncio.current_task()
        assert task is not None
        return task


class LateFailure:
    """A call that is cancelled first; then its metadata can't be sent."""

    def __init__(self) -> None:
        self._cancel = Context.this_task().cancel

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Fail once the call is cancelled."""
        self._cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        raise FAILED


async def numbers(ended: Callable[[str], None]) -> AsyncGenerator[int, None]:
    """Yield numbers, and report the type of the error that ends the generator."""
    try:
        for number in range(1_000):
            yield number
    except BaseException as error:
        ended(type(error).__name__)
        raise


@pytest.mark.parametrize(("written_max", "written"), [(1, [0]), (0, []), (-1, [])])
async def test_stream_of_a_lost_connection_ends_as_cancelled(
    written_max: int, written: list[int]
) -> None:
    context, ended = Context(cancelled=True, written_max=written_max), list[str]()
    with pytest.raises(asyncio.CancelledError):
        await write_responses(numbers(ended.append), context)  # type: ignore[arg-type]
    context.this_task().uncancel()
    assert (context.written, ended) == (written, ["CancelledError"])


async def test_metadata_that_fail_after_the_cancellation_are_not_reported() -> None:
    reported, loop = list[Any](), asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context))
    context = LateFailure()
    with pytest.raises(asyncio.CancelledError):
        await write_responses(numbers(lambda _: None), context)  # type: ignore[arg-type]
    Context.this_task().uncancel()
    gc.collect()
    assert not reported


async def test_stream_of_a_lost_connection_may_end_with_a_reason() -> None:
    async def responses() -> AsyncGenerator[int, None]:
        try:
            async for number in numbers(lambda _: None):
                yield number
        except asyncio.CancelledError:
            raise NotServing("the service stops") from None

    context = Context(cancelled=True)
    with pytest.raises(NotServing):
        await write_responses(responses(), context)  # type: ignore[arg-type]
    context.this_task().uncancel()


async def test_response_that_grpc_cannot_write_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(response_stream, "CANCELLED_WITHIN_S", 0.01)
    ended = list[str]()
    with pytest.raises(grpc.aio.InternalError):
        await write_responses(
            numbers(ended.append),
            Context(cancelled=False),  # type: ignore[arg-type]
        )
    assert ended == ["GeneratorExit"]


async def test_error_of_the_responses_is_raised() -> None:
    async def responses() -> AsyncGenerator[int, None]:
        yield 1
        raise ValueError("a defect")

    with pytest.raises(ValueError, match="a defect"):
        await write_responses(responses(), Context(cancelled=False))  # type: ignore[arg-type]
