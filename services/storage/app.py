"""Puts the parts of a storage node together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager

from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from baton.storage.v1 import query_service_pb2_grpc as query_grpc
from baton.storage.v1 import schedule_service_pb2_grpc as schedule_grpc
from baton.storage.v1 import storage_service_pb2_grpc as pb_grpc

from batonmq.common.clock import Clock
from services.runtime.gates import PREFIX as GATES_PREFIX
from services.runtime.gates import Gates
from services.runtime.mirror import Mirror
from services.runtime.peers import Peer
from services.runtime.process import App, Runtime
from services.storage.appending import Appender
from services.storage.checkpoints import Checkpointer
from services.storage.cleaning import Bounds, Cleaner
from services.storage.config import StorageSettings
from services.storage.core.recovery import RecoveryReport
from services.storage.core.retention import Retention
from services.storage.core.store import Store
from services.storage.damage import Damage
from services.storage.deliveries import Deliveries
from services.storage.due import DueBatches
from services.storage.flush import Flusher, InThread
from services.storage.losses import Losses
from services.storage.metrics import StorageMetrics
from services.storage.node import Node, opened
from services.storage.pulls import ParkedPulls
from services.storage.query_server import QueryServicer
from services.storage.schedule_server import ScheduleServicer
from services.storage.scrub import Scrubber
from services.storage.server import Parts, StorageServicer
from services.storage.topics import Topics

log = logging.getLogger(__name__)

SERVICE = "baton.storage.v1.StorageService"
QUERY_SERVICE = "baton.storage.v1.QueryService"
SCHEDULE_SERVICE = "baton.storage.v1.ScheduleService"
EXPIRE_INTERVAL_S = 600


@asynccontextmanager
async def build(settings: StorageSettings, runtime: Runtime) -> AsyncIterator[App]:
    """Recover the data directory and give the app that serves it."""
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        directory = opened(
            settings.data_dir,
            segment_bytes=settings.segment_bytes,
            monotonic_ms=lambda: int(loop.time() * 1000),
            accept_loss=settings.accept_loss,
        )
        node = await asyncio.to_thread(stack.enter_context, directory)
        _log_report(node.report)
        async with served(settings, runtime, node) as app:
            yield app


@asynccontextmanager
async def served(
    settings: StorageSettings, runtime: Runtime, node: Node, in_thread: InThread = asyncio.to_thread
) -> AsyncIterator[App]:
    """The app that serves `node`.

    Args:
        in_thread: Calls what blocks away from the event loop.
    """
    peer = Peer(runtime.nodes, "offsets", offsets_grpc.OffsetsServiceStub, runtime.connect)
    try:
        yield _app(settings, runtime, node, peer.stub, in_thread)
    finally:
        await peer.close()


def _app(
    settings: StorageSettings,
    runtime: Runtime,
    node: Node,
    offsets: Callable[[], offsets_grpc.OffsetsServiceAsyncStub],
    in_thread: InThread,
) -> App:
    topics_mirror = Mirror(runtime.etcd, "topics/")
    gates_mirror = Mirror(runtime.etcd, GATES_PREFIX)
    metrics = StorageMetrics(runtime.registry)
    deliveries = Deliveries(offsets, runtime.clock, age_ms_max=settings.verdict_age_ms_max)
    pulls = ParkedPulls(
        deliveries.touch,
        metrics.parked_pulls,
        parked_max=settings.parked_pulls_max,
        interval_ms=settings.touch_interval_ms,
    )
    flusher = Flusher(
        node,
        pulls.wake,
        metrics.fsync_seconds,
        interval_ms=settings.flush_interval_ms if settings.flush == "async" else 0,
        in_thread=in_thread,
    )
    topics = Topics(topics_mirror, runtime.etcd, settings.node_id, runtime.clock)
    retention = Retention(settings.retention_policy(), settings.segment_bytes)
    checkpointer = Checkpointer(node, flusher, in_thread)
    damage = Damage(metrics.damaged_batches)
    scrubber = Scrubber(node, damage, bytes_per_s=settings.scrub_bytes_per_s, in_thread=in_thread)
    cleaner = Cleaner(
        node.store,
        node.disk,
        retention,
        Bounds(
            needed_from=(node.store.schedule.waiting.oldest_position,),
            checkpointed=checkpointer.position,
            checkpoint=checkpointer.take,
            reached=flusher.reached,
            is_gone=topics.is_gone,
            remove_later=node.checkpointing.remove_later,
        ),
        metrics,
        clock=runtime.clock,
        interval_ms=settings.disk_interval_ms,
        in_thread=in_thread,
    )
    appender = Appender(
        broker=settings.node_id,
        store=node.store,
        space=node.disk.space,
        flusher=flusher,
        retention=retention,
        metrics=metrics,
        hub=runtime.hub,
        clock=runtime.clock,
    )
    due = DueBatches(appender, topics, age_ms_max=settings.retention_ms)
    scheduling = ScheduleServicer(appender, topics, due.wake)
    servicer = StorageServicer(
        Parts(
            broker=settings.node_id,
            syncs_at_once=settings.flush == "fsync",
            store=node.store,
            appender=appender,
            topics=topics,
            gates=Gates(gates_mirror),
            flusher=flusher,
            pulls=pulls,
            deliveries=deliveries,
            retention=retention,
            losses=Losses(metrics.lost_messages),
            damage=damage,
            scrubbed=lambda: scrubber.position,
            metrics=metrics,
            hub=runtime.hub,
            clock=runtime.clock,
        )
    )
    queries = QueryServicer(settings.node_id, node.store, topics, damage)
    topics_mirror.on_change.append(pulls.wake_topics)
    gates_mirror.on_change.append(pulls.wake_groups)

    async def drain() -> None:
        await flusher.sync()
        await checkpointer.take()
        log.info("log closed position=%d", node.store.log.next_position)

    return App(
        servicers={
            SERVICE: lambda server: pb_grpc.add_StorageServiceServicer_to_server(servicer, server),
            QUERY_SERVICE: lambda server: query_grpc.add_QueryServiceServicer_to_server(
                queries, server
            ),
            SCHEDULE_SERVICE: lambda server: schedule_grpc.add_ScheduleServiceServicer_to_server(
                scheduling, server
            ),
        },
        loops=(
            topics_mirror.run,
            gates_mirror.run,
            flusher.run,
            deliveries.run,
            pulls.run,
            checkpointer.run,
            scrubber.run,
            cleaner.run,
            due.run,
            lambda: _expire_producers(node.store, runtime.clock),
        ),
        held=frozenset({"Pull"}),
        epoch=node.store.epoch,
        room=settings.room,
        drain=drain,
    )


async def _expire_producers(store: Store, clock: Clock) -> None:
    while True:
        await asyncio.sleep(EXPIRE_INTERVAL_S)
        store.producers.expire(clock.unix_ms())


def _log_report(report: RecoveryReport) -> None:
    log.info(
        "recovered epoch=%d next_position=%d checkpoint_position=%d rebuilt=%r batches=%d "
        "messages=%d scanned_bytes=%d truncated_bytes=%d end_reason=%r ms=%d",
        report.epoch,
        report.next_position,
        report.checkpoint_position,
        report.rebuilt,
        report.batches,
        report.messages,
        report.scanned_bytes,
        report.truncated_bytes,
        report.end_reason,
        report.elapsed_ms,
    )
