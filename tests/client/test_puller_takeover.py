"""Goal: a puller repeats its calls during a take-over and a restart; the caller repeats nothing.

Method: in virtual time, the leader of a replica set of storage is killed, and one call of the
puller follows at once; the same while offsets is down. A broker without any node is the last case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from batonmq._consumer.puller import AtTime, Puller, PullerSettings
from batonmq._core.queues import QueueRef
from batonmq.errors import InvalidArgument, NotLeader, NotServing, Unreachable
from batonmq_server.testing import MemoryBroker, run_virtual
from tests.simulation.broker_set import NODES, BrokerSet
from tests.support.conditions import until

TOPIC, GROUP, COUNT = "numbers", "readers", 5
Call = Callable[[Puller, QueueRef], Awaitable[object]]


async def _commit_unassigned(puller: Puller, queue: QueueRef) -> None:
    await puller.assign([])
    await puller.commit({queue: COUNT})


CALLS: dict[str, Call] = {
    "seek to the begin": lambda puller, queue: puller.seek(queue, "begin"),
    "seek to the end": lambda puller, queue: puller.seek(queue, "end"),
    "seek to a time": lambda puller, queue: puller.seek(queue, AtTime(0)),
    "commit of a queue that is not assigned": _commit_unassigned,
}


async def _stored(broker: MemoryBroker) -> None:
    await broker.create_topic(TOPIC, 1)
    async with broker.admin() as admin:
        await admin.update_group(GROUP, ownership="off")
    async with broker.producer() as producer:
        for number in range(COUNT):
            await producer.send(TOPIC, b"%d" % number)


@pytest.mark.parametrize("name", CALLS)
def test_call_is_repeated_at_the_new_leader(name: str) -> None:
    async def main() -> object:
        async with BrokerSet("puller-takeover", Random(1), {}) as broker:
            await _stored(broker)
            async with broker.puller(GROUP, PullerSettings(consume_from="first")) as puller:
                (queue,) = await puller.queues(TOPIC)
                await puller.assign([queue])
                await until(lambda: _has_read(puller))  # so its node is known
                leader = broker.leader()
                await broker._kill([leader])
                result = await CALLS[name](puller, queue)
                assert broker.leader() != leader
                return result

    expected = {"seek to the begin": 0, "seek to the end": COUNT, "seek to a time": 0}
    assert run_virtual(main()) == expected.get(name)


OFFSETS_CALLS: dict[str, Call] = {
    "committed": lambda puller, queue: puller.committed(queue),
    "commit": lambda puller, queue: puller.commit({queue: COUNT}),
    "first seek": lambda puller, queue: puller.seek(queue, 3),
}


@pytest.mark.parametrize("name", OFFSETS_CALLS)
def test_call_is_repeated_until_offsets_is_back(name: str) -> None:
    async def main() -> object:
        async with MemoryBroker(seed="offsets") as broker:
            await _stored(broker)
            async with broker.puller(GROUP) as puller, asyncio.TaskGroup() as tasks:
                (queue,) = await puller.queues(TOPIC)
                await puller.assign([queue])
                service = broker._running["offsets-0"].service
                await broker._kill(["offsets-0"])
                calling = tasks.create_task(_result(OFFSETS_CALLS[name](puller, queue)))
                await asyncio.sleep(4)
                assert not calling.done()
                broker._start(service)
                return await calling

    assert run_virtual(main()) == {"committed": None, "commit": None, "first seek": 3}[name]


async def _result(call: Awaitable[object]) -> object:
    return await call


def test_invalid_seek_is_refused_without_offsets() -> None:
    async def main() -> None:
        async with MemoryBroker(seed="invalid") as broker:
            await _stored(broker)
            async with broker.puller(GROUP) as puller:
                (queue,) = await puller.queues(TOPIC)
                await puller.assign([queue])
                with broker.cut_off(puller), pytest.raises(InvalidArgument):
                    await puller.seek(queue, -1)

    run_virtual(main())


def test_call_fails_when_no_node_has_served_it_for_its_time() -> None:
    async def main() -> None:
        async with BrokerSet("puller-alone", Random(1), {}) as broker:
            await _stored(broker)
            async with broker.puller(GROUP) as puller:
                (queue,) = await puller.queues(TOPIC)
                await puller.assign([queue])
                await broker._kill([f"broker-{number}" for number in range(NODES)])
                loop = asyncio.get_running_loop()
                begin_s = loop.time()
                with pytest.raises((Unreachable, NotLeader, NotServing)):
                    await puller.seek(queue, "begin")
                assert 10 <= loop.time() - begin_s <= 20

    run_virtual(main())


async def _has_read(puller: Puller) -> bool:
    return bool(await puller.poll(0))
