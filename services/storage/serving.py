"""Everything that works on an open data directory, for as long as it is open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from batonmq.errors import NotLeader
from batonmq_server.runtime.app import Loop
from batonmq_server.runtime.group_gates import GroupGates
from batonmq_server.runtime.service_runtime import Runtime
from batonmq_server.storage.appending import Appender
from batonmq_server.storage.checkpoints import Checkpointer
from batonmq_server.storage.cleaning import Bounds, Cleaner
from batonmq_server.storage.config import StorageSettings
from batonmq_server.storage.core.retention import Retention
from batonmq_server.storage.damage import Damage
from batonmq_server.storage.delivery_sets import DeliverySets
from batonmq_server.storage.due import DueBatches
from batonmq_server.storage.flush import Flusher, InThread
from batonmq_server.storage.guarantee import Guarantee
from batonmq_server.storage.losses import Losses
from batonmq_server.storage.metrics import StorageMetrics
from batonmq_server.storage.node import Node
from batonmq_server.storage.pulls import ParkedPulls
from batonmq_server.storage.query_server import QueryServicer
from batonmq_server.storage.schedule_server import ScheduleServicer
from batonmq_server.storage.scrub import Scrubber
from batonmq_server.storage.server import Parts, StorageServicer
from batonmq_server.storage.stream import FSYNC, StorageStream
from batonmq_server.storage.topics import Topics

EXPIRE_INTERVAL_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What stays while a data directory is closed and opened again.

    Attributes:
        deliveries: Its `run` runs beside.
        in_thread: Calls what blocks away from the event loop.
    """

    settings: StorageSettings
    runtime: Runtime
    metrics: StorageMetrics
    stream: StorageStream
    topics: Topics
    gates: GroupGates
    deliveries: DeliverySets
    in_thread: InThread


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """See the module.

    Attributes:
        loops: Run as long as the directory is open,
        due: and this one only where batches for later are delivered.
    """

    node: Node
    flusher: Flusher
    pulls: ParkedPulls
    checkpointer: Checkpointer
    cleaner: Cleaner
    due: DueBatches
    damage: Damage
    servicer: StorageServicer
    queries: QueryServicer
    scheduling: ScheduleServicer
    loops: Sequence[Loop]

    async def drain(self) -> None:
        """Make everything durable, and a checkpoint if nothing of it may still be taken back."""
        await self.flusher.sync()
        store = self.node.store
        if store.readable_position == store.log.next_position:
            await self.checkpointer.take()

    def interrupt(self, why: str) -> None:
        """This node is no leader any more: what waits is told that nothing is known."""
        self.flusher.give_up(why)
        self.pulls.end(NotLeader(why, retry_after_ms=100))


def serve(
    node: Node,
    around: Surroundings,
    guarantee: Guarantee,
    followed: Callable[[], int | None] = lambda: None,
) -> Serving:
    """All parts of a storage node on `node`.

    Args:
        guarantee: Of what this node writes.
        followed: First position of the leader's log, by which a follower cleans its own.
    """
    settings, runtime, metrics = around.settings, around.runtime, around.metrics
    in_thread, topics, stream = around.in_thread, around.topics, around.stream
    require = runtime.guard.require if runtime.guard.on else None
    pulls = ParkedPulls(
        around.deliveries.touch,
        metrics.parked_pulls,
        parked_max=settings.parked_pulls_max,
        interval_ms=settings.touch_interval_ms,
    )
    flusher = Flusher(
        node,
        pulls.wake,
        partial(_synced, metrics, stream),
        interval_ms=settings.flush_interval_ms if settings.flush == "async" else 0,
        in_thread=in_thread,
    )
    retention = Retention(settings.retention_policy(), settings.segment_bytes)
    stream.usage = lambda: retention.usage
    checkpointer = Checkpointer(node, flusher, in_thread)
    damage = Damage(metrics.damaged_batches)
    scrubber = Scrubber(node, damage, bytes_per_s=settings.scrub_bytes_per_s, in_thread=in_thread)
    store = node.store
    cleaner = Cleaner(
        store,
        node.disk,
        retention,
        Bounds(
            needed_from=(
                store.schedule.waiting.oldest_position,
                lambda: store.readable_position,
            ),
            checkpointed=checkpointer.position,
            checkpoint=checkpointer.take,
            reached=flusher.reached,
            is_gone=topics.is_gone,
            remove_later=node.checkpointing.remove_later,
            followed=followed,
        ),
        metrics,
        clock=runtime.clock,
        interval_ms=settings.disk_interval_ms,
        in_thread=in_thread,
    )
    appender = Appender(
        broker=settings.broker_name,
        store=store,
        space=node.disk.space,
        flusher=flusher,
        retention=retention,
        guarantee=guarantee,
        metrics=metrics,
        stream=stream,
        clock=runtime.clock,
    )
    due = DueBatches(appender, topics, age_ms_max=settings.retention_ms)
    servicer = StorageServicer(
        Parts(
            broker=settings.broker_name,
            syncs_at_once=settings.flush == "fsync",
            store=store,
            appender=appender,
            topics=topics,
            gates=around.gates,
            flusher=flusher,
            pulls=pulls,
            deliveries=around.deliveries,
            retention=retention,
            guarantee=guarantee,
            losses=Losses(metrics.traffic),
            damage=damage,
            scrubbed=lambda: scrubber.position,
            metrics=metrics,
            stream=stream,
            clock=runtime.clock,
        )
    )

    async def expire_producers() -> None:
        while True:
            await asyncio.sleep(EXPIRE_INTERVAL_S)
            store.producers.expire(runtime.clock.unix_ms())

    return Serving(
        node=node,
        flusher=flusher,
        pulls=pulls,
        checkpointer=checkpointer,
        cleaner=cleaner,
        due=due,
        damage=damage,
        servicer=servicer,
        queries=QueryServicer(
            settings.broker_name, store, topics, damage, lambda: guarantee.is_follower, require
        ),
        scheduling=ScheduleServicer(appender, topics, due.wake, require),
        loops=(
            flusher.run,
            pulls.run,
            checkpointer.run,
            scrubber.run,
            cleaner.run,
            expire_producers,
        ),
    )


def _synced(metrics: StorageMetrics, stream: StorageStream, seconds: float) -> None:
    metrics.fsync_seconds.observe(seconds)
    stream.took_us(FSYNC, int(seconds * 1e6))
