"""Builds the nameserver process from its parts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from baton.lockmgr.v1 import lockmgr_service_pb2_grpc as lockmgr_grpc
from baton.nameserver.v1 import access_service_pb2_grpc as access_grpc
from baton.nameserver.v1 import nameserver_service_pb2_grpc as pb_grpc
from baton.nameserver.v1 import quota_service_pb2_grpc as quota_grpc
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from batonmq_server.nameserver.access import RULES
from batonmq_server.nameserver.access_key_store import AccessKeyStore
from batonmq_server.nameserver.access_server import AccessServicer
from batonmq_server.nameserver.access_store import AccessStore
from batonmq_server.nameserver.broker_removals import BrokerRemovals
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.compare_and_swap import CompareAndSwap
from batonmq_server.nameserver.config import NameserverSettings
from batonmq_server.nameserver.core.change_budget import ChangeBudget
from batonmq_server.nameserver.diagnosis_calls import DiagnosisCalls
from batonmq_server.nameserver.etcd_monitor import EtcdMonitor
from batonmq_server.nameserver.group_calls import REFUSAL_LINE_INTERVAL_MS, GroupCalls
from batonmq_server.nameserver.group_events import GroupEvents
from batonmq_server.nameserver.group_maintainer import GroupMaintainer
from batonmq_server.nameserver.group_store import GroupStore
from batonmq_server.nameserver.inspector import QueueInspector
from batonmq_server.nameserver.member_sessions import MemberSessions
from batonmq_server.nameserver.metrics import (
    CatalogMetrics,
    LagMetrics,
    MembershipMetrics,
    ReplicaSetMetrics,
)
from batonmq_server.nameserver.node_drains import NodeDrains
from batonmq_server.nameserver.placement_calls import PlacementCalls
from batonmq_server.nameserver.progress_deleter import ProgressDeleter
from batonmq_server.nameserver.queue_monitor import QueueMonitor
from batonmq_server.nameserver.queue_move_calls import QueueMoveCalls
from batonmq_server.nameserver.queue_queries import NodeChannels, QueueQueries
from batonmq_server.nameserver.quota_server import QuotaServicer
from batonmq_server.nameserver.refused_clients import RefusedClients
from batonmq_server.nameserver.retirement import RetirementReader
from batonmq_server.nameserver.server import NameserverServicer
from batonmq_server.nameserver.system_topics import SystemTopics
from batonmq_server.nameserver.topic_calls import TopicCalls
from batonmq_server.nameserver.topic_shrinker import TopicShrinker
from batonmq_server.nameserver.topic_store import TopicStore
from batonmq_server.nameserver.unclean_election import UncleanElection
from batonmq_server.runtime.access.sealing import sealing_keys
from batonmq_server.runtime.app import App
from batonmq_server.runtime.etcd.mirror import all_ready
from batonmq_server.runtime.group_placements import OFFSETS_SERVICE, GroupPlacements
from batonmq_server.runtime.leader_channels import LeaderChannel, LeaderChannels
from batonmq_server.runtime.log_limiter import LogLimiter
from batonmq_server.runtime.service_runtime import Runtime

SERVICE = "baton.nameserver.v1.NameserverService"
ACCESS_SERVICE = "baton.nameserver.v1.AccessService"
QUOTA_SERVICE = "baton.nameserver.v1.QuotaService"


@asynccontextmanager
async def build(settings: NameserverSettings, runtime: Runtime) -> AsyncIterator[App]:
    """Yield the parts of a nameserver, for the runtime to run.

    Nothing is recovered at the start, as all state is in etcd.
    """
    etcd = runtime.etcd
    catalog = Catalog(etcd, runtime.nodes, watchers_max=settings.watchers_max)
    CatalogMetrics(runtime.registry, catalog)
    runtime.registry.register(ReplicaSetMetrics(catalog))
    events = GroupEvents(
        MembershipMetrics(runtime.registry), runtime.hub, member_lease_ms=settings.member_lease_ms
    )
    swap = CompareAndSwap(runtime.random)
    topic_store = TopicStore(etcd, swap)
    group_store = GroupStore(
        etcd,
        swap,
        topic_store,
        member_lease_ms=settings.member_lease_ms,
        on_change=events.group_changed,
        members_max=settings.group_members_max,
        write_bytes_per_s=settings.group_write_bytes_per_s,
    )
    maintainer = GroupMaintainer(
        catalog, group_store, runtime.random, check_interval_ms=settings.member_lease_ms
    )
    sessions = MemberSessions(
        etcd, catalog, group_store, events, grace_ms=settings.session_grace_ms
    )
    offsets = LeaderChannels(
        runtime.nodes, OFFSETS_SERVICE, offsets_grpc.OffsetsServiceStub, runtime.connect
    )
    places = GroupPlacements(catalog.places, runtime.nodes)

    def offsets_of_group(group: str) -> offsets_grpc.OffsetsServiceAsyncStub:
        return offsets.stub(places.set_of(group))

    progress_deleter = ProgressDeleter(offsets.stub, places)
    topics = TopicCalls(
        settings, catalog, topic_store, progress_deleter, runtime.guard.quotas.quota_of
    )
    refused = RefusedClients(
        etcd,
        catalog,
        lease_ms=settings.member_lease_ms,
        write_bytes_per_s=settings.group_write_bytes_per_s,
    )
    groups = GroupCalls(
        settings=settings,
        clock=runtime.clock,
        catalog=catalog,
        store=group_store,
        topics=topics,
        sessions=sessions,
        refused=refused,
        progress_deleter=progress_deleter,
        placement=PlacementCalls(etcd, swap, catalog, places, group_store),
        events=events,
        refusal_lines=LogLimiter(runtime.clock.monotonic_ms, REFUSAL_LINE_INTERVAL_MS),
        quota_of=runtime.guard.quotas.quota_of,
        budget=ChangeBudget(settings.joins_per_s_max, 10 * settings.joins_per_s_max),
    )
    lockmgr = LeaderChannel(
        runtime.nodes, "lockmgr", lockmgr_grpc.LockmgrServiceStub, runtime.connect
    )
    nodes = NodeChannels(lambda: catalog.addresses, lambda: catalog.gateways, runtime.connect)
    queries = QueueQueries(lockmgr.stub, offsets_of_group, nodes)
    inspector = QueueInspector(catalog, refused.of_group, queries, runtime.clock)
    monitor = QueueMonitor(
        catalog,
        inspector,
        LagMetrics(runtime.registry),
        runtime.hub,
        node_id=settings.node_id,
        interval_ms=settings.inspect_interval_ms,
    )
    etcd_monitor = EtcdMonitor(etcd, runtime.registry, interval_ms=settings.etcd_check_interval_ms)
    system_topics = SystemTopics(
        catalog,
        topic_store,
        progress_deleter.delete_topic,
        queue_count=settings.metrics_queue_count,
    )
    retirement = RetirementReader(catalog, offsets_of_group, runtime.connect)
    servicer = NameserverServicer(
        catalog,
        topics,
        groups,
        DiagnosisCalls(groups, topics, inspector),
        UncleanElection(etcd),
        NodeDrains(etcd),
        queue_moves=QueueMoveCalls(catalog, topic_store, retirement),
        removals=BrokerRemovals(etcd, catalog, topic_store, retirement),
        permissions_of=runtime.guard.permissions_of,
        require=runtime.guard.require,
        etcd_monitor=etcd_monitor,
        system_topics=system_topics,
        identity_of=runtime.guard.caller_identity,
    )
    access_keys = AccessKeyStore(etcd, swap, sealing_keys(settings.sealing_key_file))
    access = AccessServicer(AccessStore(etcd, swap), access_keys, runtime.guard)
    quotas = QuotaServicer(etcd, runtime.guard)
    shrinker = TopicShrinker(
        catalog, topic_store, retirement, interval_ms=settings.shrink_interval_ms
    )
    try:
        yield App(
            servicers={
                SERVICE: partial(pb_grpc.add_NameserverServiceServicer_to_server, servicer),
                ACCESS_SERVICE: partial(access_grpc.add_AccessServiceServicer_to_server, access),
                QUOTA_SERVICE: partial(quota_grpc.add_QuotaServiceServicer_to_server, quotas),
            },
            rules=RULES,
            loops=(
                *(mirror.run for mirror in catalog.mirrors),
                maintainer.run,
                sessions.run,
                shrinker.run,
                monitor.run,
                etcd_monitor.run,
                *((system_topics.run,) if settings.metrics_stream else ()),
            ),
            caught_up=partial(all_ready, *catalog.mirrors),
        )
    finally:
        await offsets.close()
        await lockmgr.close()
        await nodes.close()
