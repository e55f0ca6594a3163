"""BatonMQ's client library: producers, consumers, administration.

from batonmq import Consumer, Producer

async with Producer("127.0.0.1:9876") as producer:
    await producer.send("orders", b"...", tag="paid", keys=["order-1"])

async with Consumer("127.0.0.1:9876", "billing", {"orders": "paid"}) as consumer:
    async for message in consumer:
        ...
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batonmq.admin import Admin
    from batonmq.blocking import BlockingConsumer, BlockingProducer
    from batonmq.common.errors import BatonError, Retry
    from batonmq.consumer import Consumer
    from batonmq.consuming.membership import Verdict
    from batonmq.consuming.message import ReceivedMessage
    from batonmq.consuming.session import ConsumerSettings, OwnershipEvent
    from batonmq.core.records import Message
    from batonmq.core.route import QueueId
    from batonmq.producer import Durability, Pending, Producer, ProducerSettings, Receipt
    from batonmq.scheduling import PendingSchedule, ScheduleReceipt

__all__ = [
    "Admin",
    "BatonError",
    "BlockingConsumer",
    "BlockingProducer",
    "Consumer",
    "ConsumerSettings",
    "Durability",
    "Message",
    "OwnershipEvent",
    "Pending",
    "PendingSchedule",
    "Producer",
    "ProducerSettings",
    "QueueId",
    "Receipt",
    "ReceivedMessage",
    "Retry",
    "ScheduleReceipt",
    "Verdict",
]

_HOMES = {
    "Admin": "batonmq.admin",
    "BatonError": "batonmq.common.errors",
    "BlockingConsumer": "batonmq.blocking",
    "BlockingProducer": "batonmq.blocking",
    "Consumer": "batonmq.consumer",
    "ConsumerSettings": "batonmq.consuming.session",
    "Durability": "batonmq.producer",
    "Message": "batonmq.core.records",
    "OwnershipEvent": "batonmq.consuming.session",
    "Pending": "batonmq.producer",
    "PendingSchedule": "batonmq.scheduling",
    "Producer": "batonmq.producer",
    "ProducerSettings": "batonmq.producer",
    "QueueId": "batonmq.core.route",
    "Receipt": "batonmq.producer",
    "ReceivedMessage": "batonmq.consuming.message",
    "Retry": "batonmq.common.errors",
    "ScheduleReceipt": "batonmq.scheduling",
    "Verdict": "batonmq.consuming.membership",
}


def __getattr__(name: str) -> object:
    """Load a public name when it is first used: services need only parts of the library."""
    if name not in _HOMES:
        raise AttributeError(f"module 'batonmq' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
