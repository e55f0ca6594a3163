"""The servicer: reads requests, calls the store, waits for disk and offsets, answers."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import grpc.aio
from baton.common.v1 import queue_pb2
from baton.metrics.v1 import metrics_service_pb2 as metrics_pb
from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2_grpc as pb_grpc

from batonmq.common.clock import Clock
from batonmq.common.errors import BatonError, DataLoss
from batonmq.common.rpc import error_to_pb
from services.runtime.events import EventHub
from services.storage import requests
from services.storage.core.producers import Receipt
from services.storage.core.store import Checked, Reading, Store, TopicQueues, check, check_queue
from services.storage.deliveries import Deliveries, Delivery, Verdict
from services.storage.flush import Flusher
from services.storage.metrics import StorageMetrics
from services.storage.pulls import ParkedPulls
from services.storage.topics import Topics

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
_DURABILITIES = {"fsync": pb.DURABILITY_FSYNCED, "async": pb.DURABILITY_MEMORY}


class StorageServicer(pb_grpc.StorageServiceServicer):
    """See the proto.

    Args:
        broker: Name of this node.
        flush: Setting of the same name: the durability of a request that asks for none.
    """

    def __init__(
        self,
        broker: str,
        flush: str,
        *,
        store: Store,
        parts: Parts,
    ) -> None:
        self._broker, self._durability = broker, _DURABILITIES[flush]
