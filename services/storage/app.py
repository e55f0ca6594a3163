"""Puts the parts of a storage node together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager

from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from baton.storage.v1 import storage_service_pb2_grpc as pb_grpc

from batonmq.common.clock import Clock
from services.runtime.mirror import Mirror
from services.runtime.peers import Peer
from services.runtime.process import App, Runtime
from services.storage.config import StorageSettings
from services.storage.core.recovery import RecoveryReport
from services.storage.core.store import Store
from services.storage.deliveries import Deliveries
from services.storage.flush import Flusher
from services.storage.metrics import StorageMetrics
from services.storage.node import Node, opened
from services.storage.pulls import ParkedPulls
from services.storage.server import Parts, StorageServicer
from services.storage.topics import Topics

log = logging.getLogger(__name__)

SERVICE = "baton.storage.v1.StorageService"
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
        peer = Peer(runtime.nodes, "offsets", offsets_grpc.OffsetsServiceStub)
        try:
            yield _app(settings, runtime, node, peer.stub)
        finally:
            await peer.close()


def _app(
    settings: StorageSettings,
    runtime: Runtime,
    node: Node,
    offsets: Callable[[], offsets_grpc.OffsetsServiceAsyncStub],
) -> App:
    topics_mirror = Mirror(runtime.etcd, "topics/")
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
    )
    servicer = StorageServicer(
        Parts(
            broker=settings.node_id,
            syncs_at_once=settings.flush == "fsync",
            store=node.store,
            topics=Topics(topics_mirror, runtime.etcd, settings.node_id, runtime.clock),
            flusher=flusher,
            pulls=pulls,
            deliveries=deliveries,
            metrics=metrics,
            hub=runtime.hub,
            clock=runtime.clock,
        )
    )
    topics_mirror.on_change.append(pulls.wake_topics)

    async def drain() -> None:
        await flusher.sync()
        node.store.flush()
        log.info("log closed position=%d", node.store.log.next_position)

    return App(
        servicers={
            SERVICE: lambda server: pb_grpc.add_StorageServiceServicer_to_server(servicer, server)
        },
        loops=(
            topics_mirror.run,
            flusher.run,
            deliveries.run,
            pulls.run,
            lambda: _expire_producers(node.store, runtime.clock),
        ),
        held=frozenset({"Pull"}),
        drain=drain,
    )


async def _expire_producers(store: Store, clock: Clock) -> None:
    while True:
        await asyncio.sleep(EXPIRE_INTERVAL_S)
        store.producers.expire(clock.unix_ms())


def _log_report(report: RecoveryReport) -> None:
    log.info(
        "recovered epoch=%d next_position=%d batches=%d messages=%d scanned_bytes=%d "
        "truncated_bytes=%d end_reason=%r ms=%d",
        report.epoch,
        report.next_position,
        report.batches,
        report.messages,
        report.scanned_bytes,
        report.truncated_bytes,
        report.end_reason,
        report.elapsed_ms,
    )
