"""Builds the app of a storage node: a single node, or a member of a replica set."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import cast

import grpc.aio

from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.nameserver.v1 import nameserver_service_pb2_grpc as nameserver_grpc
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from baton.storage.v1 import output_service_pb2_grpc as output_grpc
from baton.storage.v1 import query_service_pb2_grpc as query_grpc
from baton.storage.v1 import replication_service_pb2_grpc as replication_grpc
from baton.storage.v1 import reply_service_pb2_grpc as reply_grpc
from baton.storage.v1 import schedule_service_pb2_grpc as schedule_grpc
from baton.storage.v1 import storage_service_pb2_grpc as pb_grpc
from baton.storage.v1 import transaction_service_pb2_grpc as transaction_grpc
from batonmq._common.rpc import from_rpc_error
from batonmq_server.runtime.app import App, Loop
from batonmq_server.runtime.etcd.mirror import EtcdMirror, all_ready
from batonmq_server.runtime.group_gates import GATES_PREFIX, GroupGates
from batonmq_server.runtime.group_placements import OFFSETS_SERVICE, GroupPlacements
from batonmq_server.runtime.group_placements import PLACEMENTS_PREFIX as PLACES_PREFIX
from batonmq_server.runtime.leader_channels import LeaderChannel, LeaderChannels
from batonmq_server.runtime.replication.follow_problem import FollowProblem
from batonmq_server.runtime.replication.replica_set import check_single_node
from batonmq_server.runtime.service_runtime import Runtime
from batonmq_server.storage.access import RULES
from batonmq_server.storage.components import (
    StorageComponents,
    StorageEnvironment,
    build_components,
)
from batonmq_server.storage.config import StorageSettings
from batonmq_server.storage.core.files import Disk
from batonmq_server.storage.core.recovery import RecoveryReport
from batonmq_server.storage.delivery_recorder import DeliveryRecorder
from batonmq_server.storage.delivery_router import DeliveryRouter
from batonmq_server.storage.disk import RealDisk, locked
from batonmq_server.storage.flusher import InThread, in_thread
from batonmq_server.storage.kernel_sync import KernelSync
from batonmq_server.storage.log_copy import LogCopy
from batonmq_server.storage.log_follower import LogFollower
from batonmq_server.storage.metric_stream import StorageMetricStream
from batonmq_server.storage.metrics import StorageMetrics
from batonmq_server.storage.node import StorageNode, open_directory, recover_directory
from batonmq_server.storage.node_role import StandaloneRole
from batonmq_server.storage.replica import StorageReplica
from batonmq_server.storage.replication_server import CurrentServicer, StorageReplicationServicer
from batonmq_server.storage.reply_server import ReplyServicer
from batonmq_server.storage.tier_reader import TierReader, in_store_thread, open_tier
from batonmq_server.storage.tier_store import ObjectFiles
from batonmq_server.storage.topic_cache import TopicCache

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0

SERVICE = "baton.storage.v1.StorageService"
QUERY_SERVICE = "baton.storage.v1.QueryService"
SCHEDULE_SERVICE = "baton.storage.v1.ScheduleService"
_QUERIES = frozenset({"SearchOffset", "Read", "FindByKey", "GetMessage"})
OUTPUT_SERVICE = "baton.storage.v1.OutputService"
TRANSACTION_SERVICE = "baton.storage.v1.TransactionService"
REPLY_SERVICE = "baton.storage.v1.ReplyService"
REPLICATION_SERVICE = "baton.storage.v1.ReplicationService"


@asynccontextmanager
async def build(settings: StorageSettings, runtime: Runtime) -> AsyncIterator[App]:
    """Recover the data directory and yield the app that serves it."""
    with ExitStack() as stack:
        if len(settings.members) > 1:
            stack.enter_context(locked(settings.data_dir))
            async with replicated(settings, runtime, RealDisk(settings.data_dir)) as app:
                yield replace(app, data_dir=settings.data_dir)
            return
        await runtime.unless_stopped(
            check_single_node(runtime.etcd, "storage", settings.broker_name, settings.node_id)
        )
        tier = open_tier(settings, in_store_thread)
        directory = open_directory(
            settings.data_dir,
            segment_bytes=settings.segment_bytes,
            monotonic_ms=_monotonic_ms(),
            accept_loss=settings.accept_loss,
            remote=tier,
        )
        node = await asyncio.to_thread(stack.enter_context, directory)
        _log_report(node.report)
        async with served(settings, runtime, node, tier=tier) as app:
            yield replace(app, data_dir=settings.data_dir)


@asynccontextmanager
async def served(
    settings: StorageSettings,
    runtime: Runtime,
    node: StorageNode,
    in_thread: InThread = in_thread,
    tier: TierReader | None = None,
) -> AsyncIterator[App]:
    """Yield the app of `node`, a node without replicas.

    Args:
        in_thread: Runs blocking calls outside the event loop.
        tier: Reads the object store, as it did while `node` was recovered; None without a store.
    """
    async with _environment(settings, runtime, in_thread, tier) as (environment, mirrors):
        components = build_components(node, environment, StandaloneRole(node.store))
        mirrors.attach(components)

        async def drain() -> None:
            await components.drain()
            log.info("log closed position=%d", node.store.log.next_position)

        yield App(
            servicers={
                SERVICE: partial(pb_grpc.add_StorageServiceServicer_to_server, components.servicer),
                QUERY_SERVICE: partial(
                    query_grpc.add_QueryServiceServicer_to_server, components.queries
                ),
                SCHEDULE_SERVICE: partial(
                    schedule_grpc.add_ScheduleServiceServicer_to_server, components.scheduling
                ),
                TRANSACTION_SERVICE: partial(
                    transaction_grpc.add_TransactionServiceServicer_to_server,
                    components.transactions,
                ),
                OUTPUT_SERVICE: partial(
                    output_grpc.add_OutputServiceServicer_to_server, components.outputs
                ),
                REPLY_SERVICE: _replies(environment),
            },
            rules=RULES,
            loops=(
                mirrors.topics.run,
                mirrors.gates.run,
                mirrors.placements.run,
                environment.deliveries.run,
                *components.loops,
                *_reading(tier),
                components.due.run,
                components.checker.run,
                components.trimmer.run,
                components.compactor.run,
            ),
            long_polls=frozenset({"Pull"}),
            epoch=node.store.epoch,
            room=settings.room,
            replica_set=settings.broker_name,
            caught_up=partial(all_ready, mirrors.topics, mirrors.gates, mirrors.placements),
            drain=drain,
        )


@asynccontextmanager
async def replicated(
    settings: StorageSettings,
    runtime: Runtime,
    disk: Disk,
    in_thread: InThread = in_thread,
    on_open: Callable[[StorageNode], None] = lambda _: None,
    objects: ObjectFiles | None = None,
) -> AsyncIterator[App]:
    """Yield the app of a member of a replica set: a leader or a follower, as elected.

    Args:
        disk: Disk of this node; nothing else may use it.
        in_thread: Runs blocking calls outside the event loop.
        on_open: Called with the node each time its directory is opened, before any component runs.
        objects: The object store of segments, if one is set; None: the one at its URL.
    """
    peer = LeaderChannel(
        runtime.nodes,
        "storage",
        replication_grpc.ReplicationServiceStub,
        runtime.connect,
        replica_set=settings.broker_name,
    )
    tier = open_tier(settings, in_store_thread if objects is None else in_thread, objects)
    async with _environment(settings, runtime, in_thread, tier) as (environment, mirrors):
        role = StorageReplica(
            settings, runtime, environment.metrics, environment.stream, in_thread, mirrors.topics
        )

        def build_all(node: StorageNode) -> StorageComponents:
            _log_report(node.report)
            on_open(node)
            components = build_components(node, environment, role, role.leader_first_position)
            mirrors.attach(components)
            return components

        recover = partial(
            recover_directory,
            disk,
            segment_bytes=settings.segment_bytes,
            monotonic_ms=_monotonic_ms(),
            accept_loss=settings.accept_loss,
            replicated=True,
            remote=tier,
        )
        copy = LogCopy(disk, recover, build_all, in_thread)
        follower = LogFollower(
            copy, peer, settings, runtime, FollowProblem(environment.metrics.stuck)
        )
        role.begin(copy, follower)
        try:
            await copy.open()
            yield App(
                servicers={
                    SERVICE: partial(
                        pb_grpc.add_StorageServiceServicer_to_server,
                        cast(
                            pb_grpc.StorageServiceServicer,
                            CurrentServicer(
                                role,
                                lambda components: components.servicer,
                                on_followers=frozenset({"Describe", "Pull"}),
                            ),
                        ),
                    ),
                    QUERY_SERVICE: partial(
                        query_grpc.add_QueryServiceServicer_to_server,
                        cast(
                            query_grpc.QueryServiceServicer,
                            CurrentServicer(
                                role, lambda components: components.queries, on_followers=_QUERIES
                            ),
                        ),
                    ),
                    SCHEDULE_SERVICE: partial(
                        schedule_grpc.add_ScheduleServiceServicer_to_server,
                        cast(
                            schedule_grpc.ScheduleServiceServicer,
                            CurrentServicer(role, lambda components: components.scheduling),
                        ),
                    ),
                    TRANSACTION_SERVICE: partial(
                        transaction_grpc.add_TransactionServiceServicer_to_server,
                        cast(
                            transaction_grpc.TransactionServiceServicer,
                            CurrentServicer(role, lambda components: components.transactions),
                        ),
                    ),
                    OUTPUT_SERVICE: partial(
                        output_grpc.add_OutputServiceServicer_to_server,
                        cast(
                            output_grpc.OutputServiceServicer,
                            CurrentServicer(role, lambda components: components.outputs),
                        ),
                    ),
                    REPLY_SERVICE: _replies(environment),
                    REPLICATION_SERVICE: partial(
                        replication_grpc.add_ReplicationServiceServicer_to_server,
                        StorageReplicationServicer(role),
                    ),
                },
                rules=RULES,
                loops=(
                    mirrors.topics.run,
                    mirrors.gates.run,
                    mirrors.placements.run,
                    environment.deliveries.run,
                    copy.run,
                    role.run,
                    role.registration.run,
                    role.siblings.run,
                    follower.run,
                    *_reading(tier),
                ),
                long_polls=frozenset({"Pull", "Fetch"}),
                leader=False,
                room=settings.room,
                replica_set=settings.broker_name,
                caught_up=role.is_in_sync,
                resign=role.resign,
                drain=copy.drain,
            )
        finally:
            await copy.close()
            await peer.close()


class _Mirrors:
    """The mirrors of etcd; a change wakes the long polls of the current components."""

    def __init__(self, topics: EtcdMirror, gates: EtcdMirror, placements: EtcdMirror) -> None:
        self.topics, self.gates, self.placements = topics, gates, placements
        self._components: StorageComponents | None = None
        self.topics.on_change.append(self._topics_changed)
        self.gates.on_change.append(self._gates_changed)

    def attach(self, components: StorageComponents) -> None:
        """Wake the long polls of `components` from now on."""
        self._components = components

    def _topics_changed(self, names: frozenset[str]) -> None:
        if self._components is not None:
            self._components.pulls.wake_topics(names)

    def _gates_changed(self, names: frozenset[str]) -> None:
        if self._components is not None:
            self._components.pulls.wake_groups(names)


@asynccontextmanager
async def _environment(
    settings: StorageSettings,
    runtime: Runtime,
    in_thread: InThread,
    tier: TierReader | None,
) -> AsyncIterator[tuple[StorageEnvironment, _Mirrors]]:
    peers = LeaderChannels(
        runtime.nodes, OFFSETS_SERVICE, offsets_grpc.OffsetsServiceStub, runtime.connect
    )
    topics_mirror, gates_mirror, placements_mirror = (
        EtcdMirror(runtime.etcd, "topics/"),
        EtcdMirror(runtime.etcd, GATES_PREFIX),
        EtcdMirror(runtime.etcd, PLACES_PREFIX),
    )

    nameserver = LeaderChannel(
        runtime.nodes, "nameserver", nameserver_grpc.NameserverServiceStub, runtime.connect
    )

    async def ensure_unresolved() -> None:
        request = nameserver_pb.EnsureUnresolvedTopicRequest(broker=settings.broker_name)
        try:
            await nameserver.stub().EnsureUnresolvedTopic(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    def deliveries(offsets_set: str) -> DeliveryRecorder:
        return DeliveryRecorder(
            partial(peers.stub, offsets_set),
            runtime.clock,
            age_ms_max=settings.record_age_ms_max,
            offsets_set=offsets_set,
            node_id=settings.node_id,
        )

    topics = TopicCache(topics_mirror, runtime.etcd, settings.broker_name, runtime.clock)
    mirrors = _Mirrors(topics_mirror, gates_mirror, placements_mirror)
    gates, metrics = GroupGates(gates_mirror), StorageMetrics(runtime.registry)
    metrics.replicas.set(len(settings.members))
    traffic = metrics.traffic
    topics_mirror.on_change.append(
        lambda _: traffic.keep_topics(lambda name: topics.known(name) is not None)
    )
    gates_mirror.on_change.append(
        lambda _: traffic.keep_groups(lambda name: gates.get(name) is not None)
    )
    kernel = KernelSync()
    environment = StorageEnvironment(
        settings=settings,
        runtime=runtime,
        metrics=metrics,
        stream=StorageMetricStream(runtime.hub, settings.broker_name),
        topics=topics,
        gates=gates,
        deliveries=DeliveryRouter(GroupPlacements(placements_mirror, runtime.nodes), deliveries),
        in_thread=in_thread,
        begin_sync=kernel.begin,
        ensure_unresolved=ensure_unresolved,
        tier=tier,
    )
    if tier is not None:
        tier.on_read = metrics.tier.read_bytes.inc
        tier.on_failure = metrics.tier.failures.labels("read").inc
    try:
        yield environment, mirrors
    finally:
        kernel.close()
        await nameserver.close()
        await peers.close()


def _reading(tier: TierReader | None) -> Sequence[Loop]:
    """Return the loop that reads the object store; none without a store."""
    return (tier.run,) if tier is not None else ()


def _replies(environment: StorageEnvironment) -> Callable[[grpc.aio.Server], None]:
    """Return the function that adds the reply inboxes of this node to a server."""
    servicer = ReplyServicer(
        environment.settings.node_id, environment.metrics, environment.runtime.random
    )
    return partial(reply_grpc.add_ReplyServiceServicer_to_server, servicer)


def _monotonic_ms() -> Callable[[], int]:
    """Return the monotonic clock of this event loop, which any thread may read."""
    loop = asyncio.get_running_loop()
    return lambda: int(loop.time() * 1000)


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
