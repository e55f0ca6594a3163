"""A broker in memory, for tests of programs that use BatonMQ.

from batonmq_server.testing import MemoryBroker, run_virtual

async def test_bills_are_sent():
    async with MemoryBroker() as broker:
        await broker.create_topic("orders")
        async with broker.producer() as producer:
            await producer.send("orders", b"...")
"""

from __future__ import annotations

from batonmq_server.testing.memory_broker import MemoryBroker
from batonmq_server.testing.memory_network import Faults
from batonmq_server.testing.virtual_time import Deadlock, Livelock, run_virtual

__all__ = ["Deadlock", "Faults", "Livelock", "MemoryBroker", "run_virtual"]
