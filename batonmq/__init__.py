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
    from batonmq.blocking import BlockingConsumer, BlockingProducer, BlockingPuller
    from batonmq.common import errors
    from batonmq.common.errors import BatonError, Retry
    from batonmq.consumer import Consumer
    from batonmq.consuming.membership import Verdict
    from batonmq.consuming.message import ReceivedMessage
    from batonmq.consuming.results import MessageFailed, RetryLater, Suspend
    from batonmq.consuming.session import ConsumerSettings, OwnershipEvent
    from batonmq.core.records import Message
    from batonmq.core.retries import Origin
    from batonmq.core.route import QueueId
    from batonmq.metrics import ClientMetrics
    from batonmq.producer import Producer
    from batonmq.producing.placing import ProducerClosed
    from batonmq.producing.receipts import Pending, Receipt
    from batonmq.producing.settings import Durability, ProducerSettings
    from batonmq.puller import AtTime, Puller, PullerSettings
    from batonmq.scheduling import PendingSchedule, ScheduleReceipt
    from batonmq.security import Security

__all__ = [
    "Admin",
    "AtTime",
    "BatonError",
    "BlockingConsumer",
    "BlockingProducer",
    "BlockingPuller",
    "ClientMetrics",
    "Consumer",
    "ConsumerSettings",
    "Durability",
    "Message",
    "MessageFailed",
    "Origin",
    "OwnershipEvent",
    "Pending",
    "PendingSchedule",
    "Producer",
    "ProducerClosed",
    "ProducerSettings",
    "Puller",
    "PullerSettings",
    "QueueId",
    "Receipt",
    "ReceivedMessage",
    "Retry",
    "RetryLater",
    "ScheduleReceipt",
    "Security",
    "Suspend",
    "Verdict",
    "errors",
]

_HOMES = {
    "Admin": "batonmq.admin",
    "AtTime": "batonmq.puller",
    "BatonError": "batonmq.common.errors",
    "BlockingConsumer": "batonmq.blocking",
    "BlockingProducer": "batonmq.blocking",
    "BlockingPuller": "batonmq.blocking",
    "ClientMetrics": "batonmq.metrics",
    "Consumer": "batonmq.consumer",
    "ConsumerSettings": "batonmq.consuming.session",
    "Durability": "batonmq.producing.settings",
    "Message": "batonmq.core.records",
    "MessageFailed": "batonmq.consuming.results",
    "Origin": "batonmq.core.retries",
    "OwnershipEvent": "batonmq.consuming.session",
    "Pending": "batonmq.producing.receipts",
    "PendingSchedule": "batonmq.scheduling",
    "Producer": "batonmq.producer",
    "ProducerClosed": "batonmq.producing.placing",
    "ProducerSettings": "batonmq.producing.settings",
    "Puller": "batonmq.puller",
    "PullerSettings": "batonmq.puller",
    "QueueId": "batonmq.core.route",
    "Receipt": "batonmq.producing.receipts",
    "ReceivedMessage": "batonmq.consuming.message",
    "Retry": "batonmq.common.errors",
    "RetryLater": "batonmq.consuming.results",
    "ScheduleReceipt": "batonmq.scheduling",
    "Security": "batonmq.security",
    "Suspend": "batonmq.consuming.results",
    "Verdict": "batonmq.consuming.membership",
}


def __getattr__(name: str) -> object:
    """Load a public name when it is first used: services need only parts of the library."""
    if name == "errors":
        return importlib.import_module("batonmq.common.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'batonmq' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
