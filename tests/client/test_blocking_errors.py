"""An error that leaves the block of a client for code without asyncio.

Goal: the client within is left by the same error as its block, and the caller gets it untouched.
Method: a real server whose storage answers nothing, and blocks in threads of the test's own.
"""

from __future__ import annotations

import asyncio
import traceback

import pytest

from batonmq._blocking import BlockingProducer, BlockingPuller
from batonmq._producer.producer import Producer
from batonmq._producer.settings import ProducerSettings
from tests.client.twins import Gate, twins
from tests.support.waiting import until

PATIENT = ProducerSettings(delivery_timeout_ms=600_000, request_timeout_ms=600_000)


class OnPurpose(Exception):
    """What the tests raise."""


@pytest.mark.parametrize("error", [OnPurpose(), KeyboardInterrupt(), GeneratorExit()])
async def test_producer_whose_block_is_left_by_an_error_waits_for_nothing(
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


async def test_producer_whose_block_ends_waits_for_what_was_handed_over() -> None:
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


def fail() -> None:
    """An error that has a cause."""
    try:
        raise KeyError("the cause")
    except KeyError as cause:
        raise OnPurpose from cause


def told(error: BaseException) -> list[str]:
    """Where the error has come by, as its traceback tells; and that of its cause."""
    assert isinstance(error.__cause__, KeyError)
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_caller_of_a_blocking_client_gets_the_error_as_it_was_raised() -> None:
    with pytest.raises(OnPurpose) as caught, BlockingPuller("127.0.0.1:1"):
        fail()
    name = "test_caller_of_a_blocking_client_gets_the_error_as_it_was_raised"
    assert set(told(caught.value)) == {name, "fail"}


async def test_error_that_leaves_the_block_of_a_client_keeps_its_cause() -> None:
    with pytest.raises(OnPurpose) as caught:
        async with Producer("127.0.0.1:1"):
            fail()
    assert told(caught.value)[-1] == "fail"
