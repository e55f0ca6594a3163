"""Calls that end by a revocation, behind a real gRPC server.

Goal: whatever a call does when its permission ends, its client gets the reason, and no item that
came after it. A task that is cancelled inside gRPC would send no status at all.
Method: a stream whose client does not read, so that gRPC holds an item back; a wait; an end of the
credentials; code that swallows the cancellation.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import grpc.aio
import pytest

from batonmq.errors import BatonError, PermissionDenied
from batonmq_server.runtime.access.revocable_calls import RevocableCalls
from tests.support.conditions import until

LARGE = b"x" * 1_000_000
PATH = "/test.Numbers/Read"


class Numbers:
    """Streams items under a permission."""

    def __init__(self, *, endless: bool) -> None:
        self.calls = RevocableCalls()
        self.error: BatonError | None = None
        self.left_s: float | None = None
        self.sent, self.waiting = 0, asyncio.Event()
        self._endless = endless

    def revoke(self) -> None:
        """Revoke the permission of all callers."""
        self.error = PermissionDenied("revoked")
        self.calls.recheck()

    async def items(self) -> AsyncGenerator[bytes, None]:
        """Yield large items without end, or one and then wait."""
        while self._endless:
            self.sent += 1
            yield LARGE
        yield b"one"
        self.waiting.set()
        await asyncio.Event().wait()

    async def Read(self, _: bytes, context: Any) -> AsyncIterator[bytes]:
        """Stream items until the permission ends."""
        try:
            with self.calls.until_revoked(lambda: self.error, self.left_s) as call:
                async with aclosing(call.items(self.items())) as items:
                    async for item in items:
                        yield item
        except BatonError as error:
            yield str(error.reason).encode()


@asynccontextmanager
async def reading(numbers: Numbers) -> AsyncIterator[Any]:
    """Serve, and open a call."""
    server = grpc.aio.server()
    handler: Any = grpc.unary_stream_rpc_method_handler(numbers.Read)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Numbers", {"Read": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.unary_stream(PATH)
            yield call(b"", timeout=30)
    finally:
        await server.stop(None)


async def is_still(numbers: Numbers) -> bool:
    """Whether no item leaves any more."""
    before = numbers.sent
    for _ in range(50):
        await asyncio.sleep(0.002)
    return numbers.sent == before > 0


async def test_call_that_is_sending_ends_with_the_reason_after_that_item() -> None:
    numbers = Numbers(endless=True)
    async with reading(numbers) as stream:
        await until(lambda: is_still(numbers))
        numbers.revoke()
        received = [item async for item in stream]
    assert received == [LARGE] * numbers.sent + [b"PERMISSION_DENIED"]


async def test_call_that_waits_ends_with_the_reason() -> None:
    numbers = Numbers(endless=False)
    async with reading(numbers) as stream:
        await asyncio.wait_for(numbers.waiting.wait(), 10)
        numbers.revoke()
        assert [item async for item in stream] == [b"one", b"PERMISSION_DENIED"]


async def test_call_ends_when_its_credentials_do() -> None:
    numbers = Numbers(endless=False)
    numbers.left_s = 0
    numbers.error = PermissionDenied("expired")
    async with reading(numbers) as stream:
        assert [item async for item in stream] == [b"one", b"PERMISSION_DENIED"]


async def refusal_of(call: Awaitable[object]) -> BatonError:
    """Return the error that a call ends with."""
    with pytest.raises(BatonError) as raised:
        await call
    return raised.value


async def test_cancellation_that_is_swallowed_does_not_admit_the_call() -> None:
    calls, error, entered = RevocableCalls(), PermissionDenied("revoked"), asyncio.Event()
    errors: list[BatonError] = []

    async def call() -> str:
        with calls.until_revoked(lambda: errors[0] if errors else None, None):
            entered.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return "secret"

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(refusal_of(call()))
        await entered.wait()
        errors.append(error)
        calls.recheck()
    assert task.result() is error
    assert task.cancelling() == 0


async def test_cancellation_by_others_stays_one() -> None:
    calls, entered = RevocableCalls(), asyncio.Event()

    async def call() -> None:
        with calls.until_revoked(lambda: None, None):
            entered.set()
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(call())
        await entered.wait()
        calls.recheck()
        task.cancel()
    assert task.cancelled()


async def test_call_ends_after_its_credentials_also_if_the_wall_clock_was_set_back() -> None:
    calls, looks = RevocableCalls(), 0

    def refusal() -> BatonError | None:
        """Return an error at the second look: by the wall clock the token is valid at the first."""
        nonlocal looks
        looks += 1
        return PermissionDenied("expired") if looks > 1 else None

    with pytest.raises(PermissionDenied, match="expired"), calls.until_revoked(refusal, 0):
        await asyncio.Event().wait()
