"""Client library of BatonMQ: producers, consumers, administration.

from batonmq import Consumer, Producer

async with Producer("127.0.0.1:9876") as producer:
    await producer.send("orders", b"...", tag="paid", keys=["order-1"])

async with Consumer("127.0.0.1:9876", "billing", {"orders": "paid"}) as consumer:
    async for message in consumer:
        ...

Public are the names in `__all__` of this package, of `batonmq.admin`, `batonmq.idempotence`,
`batonmq.kombu` and `batonmq.schemas`, the error classes in `batonmq.errors`, and the program
`baton` (`python -m batonmq`). Everything else may change in any release.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from batonmq._connection import grpc_environment

if TYPE_CHECKING:
    from batonmq import errors
    from batonmq._blocking import (
        BlockingConsumer,
        BlockingProducer,
        BlockingPuller,
        BlockingTransaction,
    )
    from batonmq._common.secret import Secret
    from batonmq._connection.security import Security
    from batonmq._consumer.consumer import Consumer
    from batonmq._consumer.consumer_settings import ConsumerSettings
    from batonmq._consumer.handler_results import BadBody, MessageFailed, RetryLater, Suspend
    from batonmq._consumer.membership import SubscriptionVerdict
    from batonmq._consumer.message import ReceivedMessage
    from batonmq._consumer.message_batch import MessageBatch
    from batonmq._consumer.puller import AtTime, Puller, PullerSettings
    from batonmq._consumer.session import OwnershipEvent
    from batonmq._core.outputs import Output
    from batonmq._core.queues import QueueRef
    from batonmq._core.records import Message
    from batonmq._core.requests import Reply
    from batonmq._core.retries import Origin
    from batonmq._core.transactions import CommitReceipt, PendingTransaction, TransactionState
    from batonmq._producer.message_columns import ArrowColumn
    from batonmq._producer.producer import Producer
    from batonmq._producer.producer_settings import Durability, ProducerSettings
    from batonmq._producer.receipts import (
        FailedRange,
        PartlySent,
        PendingReceipt,
        Receipt,
        ReceiptRange,
    )
    from batonmq._producer.requester import RequestFailed, RequestTimedOut
    from batonmq._producer.scheduled_sender import PendingSchedule, ScheduleReceipt
    from batonmq._producer.send_buffer import ProducerClosed
    from batonmq._producer.transaction import Transaction
    from batonmq._telemetry.client_metrics import ClientMetrics
    from batonmq._telemetry.open_telemetry import OpenTelemetry
    from batonmq.admin.admin import Admin
    from batonmq.errors import BatonError, Retry

__all__ = [
    "Admin",
    "ArrowColumn",
    "AtTime",
    "BadBody",
    "BatonError",
    "BlockingConsumer",
    "BlockingProducer",
    "BlockingPuller",
    "BlockingTransaction",
    "ClientMetrics",
    "CommitReceipt",
    "Consumer",
    "ConsumerSettings",
    "Durability",
    "FailedRange",
    "Message",
    "MessageBatch",
    "MessageFailed",
    "OpenTelemetry",
    "Origin",
    "Output",
    "OwnershipEvent",
    "PartlySent",
    "PendingReceipt",
    "PendingSchedule",
    "PendingTransaction",
    "Producer",
    "ProducerClosed",
    "ProducerSettings",
    "Puller",
    "PullerSettings",
    "QueueRef",
    "Receipt",
    "ReceiptRange",
    "ReceivedMessage",
    "Reply",
    "RequestFailed",
    "RequestTimedOut",
    "Retry",
    "RetryLater",
    "ScheduleReceipt",
    "Secret",
    "Security",
    "SubscriptionVerdict",
    "Suspend",
    "Transaction",
    "TransactionState",
    "errors",
]

_HOMES = {
    "Admin": "batonmq.admin.admin",
    "ArrowColumn": "batonmq._producer.message_columns",
    "AtTime": "batonmq._consumer.puller",
    "BadBody": "batonmq._consumer.handler_results",
    "BatonError": "batonmq.errors",
    "BlockingConsumer": "batonmq._blocking",
    "BlockingProducer": "batonmq._blocking",
    "BlockingPuller": "batonmq._blocking",
    "BlockingTransaction": "batonmq._blocking",
    "ClientMetrics": "batonmq._telemetry.client_metrics",
    "CommitReceipt": "batonmq._core.transactions",
    "Consumer": "batonmq._consumer.consumer",
    "ConsumerSettings": "batonmq._consumer.consumer_settings",
    "Durability": "batonmq._producer.producer_settings",
    "Message": "batonmq._core.records",
    "MessageBatch": "batonmq._consumer.message_batch",
    "MessageFailed": "batonmq._consumer.handler_results",
    "OpenTelemetry": "batonmq._telemetry.open_telemetry",
    "Origin": "batonmq._core.retries",
    "OwnershipEvent": "batonmq._consumer.session",
    "FailedRange": "batonmq._producer.receipts",
    "PartlySent": "batonmq._producer.receipts",
    "PendingReceipt": "batonmq._producer.receipts",
    "ReceiptRange": "batonmq._producer.receipts",
    "PendingSchedule": "batonmq._producer.scheduled_sender",
    "PendingTransaction": "batonmq._core.transactions",
    "Reply": "batonmq._core.requests",
    "RequestFailed": "batonmq._producer.requester",
    "RequestTimedOut": "batonmq._producer.requester",
    "Producer": "batonmq._producer.producer",
    "ProducerClosed": "batonmq._producer.send_buffer",
    "ProducerSettings": "batonmq._producer.producer_settings",
    "Puller": "batonmq._consumer.puller",
    "PullerSettings": "batonmq._consumer.puller",
    "QueueRef": "batonmq._core.queues",
    "Receipt": "batonmq._producer.receipts",
    "Output": "batonmq._core.outputs",
    "ReceivedMessage": "batonmq._consumer.message",
    "Retry": "batonmq.errors",
    "RetryLater": "batonmq._consumer.handler_results",
    "ScheduleReceipt": "batonmq._producer.scheduled_sender",
    "Secret": "batonmq._common.secret",
    "Security": "batonmq._connection.security",
    "Suspend": "batonmq._consumer.handler_results",
    "SubscriptionVerdict": "batonmq._consumer.membership",
    "Transaction": "batonmq._producer.transaction",
    "TransactionState": "batonmq._core.transactions",
}

grpc_environment.prepare()


def __getattr__(name: str) -> object:
    """Load a public name when it is first used, which keeps the import of the package fast."""
    if name == "errors":
        return importlib.import_module("batonmq.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'batonmq' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
