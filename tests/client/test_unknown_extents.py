"""Goal: a broker that can't answer for a queue now is named, and its queues don't seem empty.

Method: storage starts again without a connection to etcd, in virtual time, so that it does not know
which topics there are.
"""

from __future__ import annotations

from batonmq_server.testing import MemoryBroker, run_virtual
from batonmq_server.testing.memory_etcd import NAME as ETCD

TOPIC, STORAGE = "numbers", "broker-0"


def test_broker_without_etcd_is_a_problem_until_it_has_read_the_topics() -> None:
    async def main() -> None:
        async with MemoryBroker(seed="extents") as broker:
            await broker.create_topic(TOPIC, 1)
            async with broker.producer() as producer, broker.admin() as admin:
                receipt = await producer.send(TOPIC, b"1")
                service = broker._running[STORAGE].service
                cut = broker._environment.network.cut
                await broker._kill([STORAGE])
                cut |= (pairs := {(STORAGE, ETCD), (ETCD, STORAGE)})
                broker._start(service)
                extents, problems = await admin.extents([receipt.queue])
                assert extents == {}
                assert len(problems) == 1
                assert problems[0].startswith(STORAGE)
                cut -= pairs
                await broker._registered()
                assert await admin.extents([receipt.queue]) == ({receipt.queue: (0, 1)}, ())

    run_virtual(main())
