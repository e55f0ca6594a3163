"""The components that the servicer of StorageService calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc.aio

from batonmq._common.clock import Clock
from batonmq.errors import DataLoss
from batonmq_server.runtime.access.guard import PermissionCheck
from batonmq_server.runtime.access.stream_access import StreamAccess
from batonmq_server.runtime.group_gates import GroupGates
from batonmq_server.storage.appender import Appender
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.retention import Retention
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.damage_tracker import DamageTracker
from batonmq_server.storage.delivery_router import DeliveryRouter
from batonmq_server.storage.flusher import Flusher
from batonmq_server.storage.long_polls import LongPolls
from batonmq_server.storage.metric_stream import StorageMetricStream
from batonmq_server.storage.metrics import StorageMetrics
from batonmq_server.storage.node_role import NodeRole
from batonmq_server.storage.retention_losses import RetentionLosses
from batonmq_server.storage.tier_reader import RemoteReads
from batonmq_server.storage.topic_cache import TopicCache
from batonmq_server.storage.topic_purger import PurgeResult

Repair = Callable[[QueueKey, int, DataLoss], Awaitable[None]]
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageServicerParts:
    """The components that the servicer calls.

    Attributes:
        broker: Broker name: the replica set, or a node without replicas.
        syncs_at_once: Whether a request without a durability waits for the sync. A node of a
            replica set always waits.
        deliveries_max: Maximum number of deliveries by stream.
        repair: Rebuilds the index that a failed read at an offset uses; raises an error if that is
            not possible.
        tier: Reads segments that are only in the object store.
        purge: Removes what deleted topics of a name have left in the log.
        scrubbed: Returns the position that the current round of the scrub has reached.
        identity_of: Returns the identity of a caller; empty without access control.
        require: Raises unless a caller has a permission; None if authorization is off.
        access_of: Returns what the caller of a stream of deliveries may read.
    """

    broker: str
    syncs_at_once: bool
    deliveries_max: int
    store: MessageStore
    appender: Appender
    topics: TopicCache
    gates: GroupGates
    flusher: Flusher
    pulls: LongPolls
    deliveries: DeliveryRouter
    retention: Retention
    role: NodeRole
    losses: RetentionLosses
    damage: DamageTracker
    repair: Repair
    tier: RemoteReads
    purge: Callable[[str], Awaitable[PurgeResult]]
    scrubbed: Callable[[], int]
    metrics: StorageMetrics
    stream: StorageMetricStream
    clock: Clock
    random: Random
    identity_of: Callable[[Context], str]
    require: PermissionCheck | None
    access_of: Callable[[Context], StreamAccess]
