"""An error that leaves the block of a client for programs without asyncio.

Goal: the block of the wrapped client gets the same error, and the caller gets the error unchanged.
Method: a real server whose storage never answers, and blocks in threads of the test.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest

from batonmq._blocking import BlockingProducer, BlockingPuller, _LoopThread
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq.errors import Unreachable
from tests.client.twins import Gate, twins
from tests.support.conditions import until, until_now

PATIENT = ProducerSettings(delivery_timeout_ms=600_000, request_timeout_ms=600_000)


class OnPurpose(Exception):
    """The error that the tests raise."""


@pytest.mark.parametrize("error", [OnPurpose(), KeyboardInterrupt(), GeneratorExit()])
async def test_producer_whose_block_raises_does_not_wait_for_messages(
    error: BaseException,
) -> None:
    async with twins(orders=1) as cluster, asyncio.TaskGroup() as tasks:
        gate = cluster.storage.before = Gate()
        raised: list[BaseException] = []

        def send() -> None:
            try:
                with BlockingProducer(cluster.address, PATIENT) as producer:
                    producer.send_one_way("orders", b"")
                    raise error
            except (OnPurpose, KeyboardInterrupt, GeneratorExit) as caught:
                raised.append(caught)

        sending = tasks.create_task(asyncio.to_thread(send))
        try:
            await asyncio.wait({sending}, timeout=20)
            assert raised == [error]
        finally:
            gate.open()
        assert not cluster.storage.stored


async def test_producer_whose_block_ends_waits_for_submitted_messages() -> None:
    async with twins(orders=1) as cluster, asyncio.TaskGroup() as tasks:
        gate = cluster.storage.before = Gate()

        def send() -> None:
            with BlockingProducer(cluster.address, PATIENT) as producer:
                producer.send_one_way("orders", b"last")

        sending = tasks.create_task(asyncio.to_thread(send))
        await until(lambda: gate.arrived)
        assert not sending.done()
        gate.open()
        await sending
        assert cluster.storage.stored == [b"last"]


def test_call_that_begins_while_the_block_ends_is_refused() -> None:
    for _ in range(50):
        thread = _LoopThread()
        thread.start()
        refused = threading.Event()

        def call_on(thread: _LoopThread = thread, refused: threading.Event = refused) -> None:
            with pytest.raises(Unreachable):
                while True:
                    thread.call(asyncio.sleep(0))
            refused.set()

        callers = [threading.Thread(target=call_on, daemon=True) for _ in range(4)]
        for caller in callers:
            caller.start()
        thread.stop()
        for caller in callers:
            caller.join(10)
        assert not any(caller.is_alive() for caller in callers)
        assert refused.is_set()


def test_call_that_is_under_way_when_the_block_ends_fails() -> None:
    thread = _LoopThread()
    thread.start()
    with ThreadPoolExecutor(1) as pool:
        begun = threading.Event()

        async def wait() -> None:
            begun.set()
            await asyncio.sleep(3_600)

        call = pool.submit(lambda: thread.call(wait()))
        assert begun.wait(10)
        thread.stop()
        with pytest.raises(Unreachable, match="closed during the call"):
            call.result(10)


def test_call_whose_caller_is_interrupted_is_cancelled() -> None:
    """A `poll` that went on would take messages that nobody gets."""
    thread, main = _LoopThread(), threading.main_thread()
    assert threading.current_thread() is main
    begun, cancelled = threading.Event(), threading.Event()

    async def wait() -> None:
        begun.set()
        try:
            await asyncio.sleep(3_600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def interrupt() -> None:
        assert begun.wait(10)
        assert main.ident is not None
        until_now(lambda: _waits_for_result(main.ident))  # a signal before that may be lost
        signal.pthread_kill(main.ident, signal.SIGUSR1)

    def on_signal(*_: object) -> None:
        raise OnPurpose

    before = signal.signal(signal.SIGUSR1, on_signal)
    thread.start()
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(OnPurpose):
            thread.call(wait())
        assert cancelled.wait(10)
    finally:
        signal.signal(signal.SIGUSR1, before)
        thread.stop()


def _waits_for_result(thread_id: int | None) -> bool:
    """Whether a thread is in `Future.result`."""
    frame = sys._current_frames().get(thread_id or 0)
    return any(one.f_code.co_name == "result" for one, _ in traceback.walk_stack(frame))


def raise_with_cause() -> None:
    """Raise an error that has a cause."""
    try:
        raise KeyError("the cause")
    except KeyError as cause:
        raise OnPurpose from cause


def traceback_functions(error: BaseException) -> list[str]:
    """Return the functions in the tracebacks of the error and of its cause."""
    assert isinstance(error.__cause__, KeyError)
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_caller_of_a_blocking_client_gets_the_error_unchanged() -> None:
    with pytest.raises(OnPurpose) as caught, BlockingPuller("127.0.0.1:1"):
        raise_with_cause()
    name = "test_caller_of_a_blocking_client_gets_the_error_unchanged"
    assert set(traceback_functions(caught.value)) == {name, "raise_with_cause"}


async def test_error_that_leaves_the_block_of_a_client_keeps_its_cause() -> None:
    with pytest.raises(OnPurpose) as caught:
        async with Producer("127.0.0.1:1"):
            raise_with_cause()
    assert traceback_functions(caught.value)[-1] == "raise_with_cause"
