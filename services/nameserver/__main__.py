"""`python -m batonmq_server.nameserver`: names, routes and group membership."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from baton.lockmgr.v1 import lockmgr_service_pb2_grpc as lockmgr_grpc
from baton.nameserver.v1 import access_service_pb2_grpc as access_grpc
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1 import nameserver_service_pb2_grpc as pb_grpc
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from batonmq._core import sql_parser
from batonmq_server.nameserver.access import RULES
from batonmq_server.nameserver.access_server import AccessServicer
from batonmq_server.nameserver.access_store import AccessStore
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.compare_and_swap import CompareAndSwap
from batonmq_server.nameserver.config import NameserverSettings
from batonmq_server.nameserver.diagnosis_calls import DiagnosisCalls
from batonmq_server.nameserver.group_calls import GroupCalls
from batonmq_server.nameserver.group_events import GroupEvents
from batonmq_server.nameserver.group_maintainer import GroupMaintainer
from batonmq_server.nameserver.group_metrics import GroupMetrics
from batonmq_server.nameserver.group_store import GroupStore
from batonmq_server.nameserver.inspector import QueueInspector
from batonmq_server.nameserver.member_sessions import MemberSessions
from batonmq_server.nameserver.placement_calls import PlacementCalls
from batonmq_server.nameserver.progress_deleter import ProgressDeleter
from batonmq_server.nameserver.queue_monitor import QueueMonitor
from batonmq_server.nameserver.queue_queries import BrokerChannels, QueueQueries
from batonmq_server.nameserver.refused_clients import RefusedClients
from batonmq_server.nameserver.server import NameserverServicer
from batonmq_server.nameserver.set_metrics import SetMetrics
from batonmq_server.nameserver.system_topics import SystemTopics
from batonmq_server.nameserver.topic_calls import TopicCalls
from batonmq_server.nameserver.topic_shrinker import TopicShrinker
from batonmq_server.nameserver.topic_store import TopicStore
from batonmq_server.nameserver.unclean_election import UncleanElection
from batonmq_server.runtime.mirror import all_ready
from batonmq_server.runtime.peers import Peer, Peers
from batonmq_server.runtime.places import OFFSETS, Places
from batonmq_server.runtime.process import App, Runtime, run

ACCESS = "baton.nameserver.v1.AccessService"


@asynccontextmanager
async def build(settings: NameserverSettings, runtime: Runtime) -> AsyncIterator[App]:
    """The nameserver's parts; it has nothing to recover, all state is in etcd."""
    catalog = Catalog(runtime.etcd, runtime.nodes, watchers_max=settings.watchers_max)
    telemetry = GroupEvents(runtime.registry, runtime.hub, catalog, settings.member_lease_ms)
    runtime.registry.register(SetMetrics(catalog))
    turns = CompareAndSwap(runtime.random)
    topic_store = TopicStore(runtime.etcd, turns)
    group_store = GroupStore(
        runtime.etcd,
        turns,
        topic_store,
        member_lease_ms=settings.member_lease_ms,
        on_change=telemetry.group_changed,
    )
    tending = GroupMaintainer(
        catalog, group_store, runtime.random, sweep_ms=settings.member_lease_ms
    )
    sessions = MemberSessions(
        runtime.etcd, catalog, group_store, telemetry, grace_ms=settings.session_grace_ms
    )
    offsets = Peers(runtime.nodes, OFFSETS, offsets_grpc.OffsetsServiceStub, runtime.connect)
    places = Places(catalog.places, runtime.nodes)

    def keeper_of(group: str) -> offsets_grpc.OffsetsServiceAsyncStub:
        return offsets.stub(places.set_of(group))

    progress = ProgressDeleter(offsets.stub, places)
    topics = TopicCalls(settings, catalog, topic_store, progress)
    refusals = RefusedClients(runtime.etcd, catalog, lease_ms=settings.member_lease_ms)
    groups = GroupCalls(
        settings=settings,
        clock=runtime.clock,
        catalog=catalog,
        store=group_store,
        topics=topics,
        sessions=sessions,
        refusals=refusals,
        progress=progress,
        placing=PlacementCalls(runtime.etcd, turns, catalog, places, group_store),
        telemetry=telemetry,
    )
    lockmgr = Peer(runtime.nodes, "lockmgr", lockmgr_grpc.LockmgrServiceStub, runtime.connect)
    brokers = BrokerChannels(lambda: catalog.addresses, runtime.connect)
    questions = QueueQueries(lockmgr.stub, keeper_of, brokers)
    inspector = QueueInspector(catalog, refusals.of, questions, runtime.clock)
    lookout = QueueMonitor(
        catalog,
        inspector,
        GroupMetrics(runtime.registry),
        runtime.hub,
        node_id=settings.node_id,
        interval_ms=settings.inspect_interval_ms,
    )
    servicer = NameserverServicer(
        catalog,
        topics,
        groups,
        DiagnosisCalls(groups, topics, inspector),
        UncleanElection(runtime.etcd),
        runtime.guard.may,
    )
    access = AccessServicer(AccessStore(runtime.etcd, turns), runtime.guard)
    name = pb.DESCRIPTOR.services_by_name["NameserverService"].full_name
    shrinking = TopicShrinker(
        catalog,
        topic_store,
        keeper_of,
        runtime.connect,
        interval_ms=settings.shrink_interval_ms,
    )
    system_topics = SystemTopics(
        catalog, topic_store, progress.forget, queue_count=settings.metrics_queue_count
    )
    try:
        yield App(
            servicers={
                name: partial(pb_grpc.add_NameserverServiceServicer_to_server, servicer),
                ACCESS: partial(access_grpc.add_AccessServiceServicer_to_server, access),
            },
            rules=RULES,
            loops=(
                *(mirror.run for mirror in catalog.mirrors),
                tending.run,
                sessions.run,
                shrinking.run,
                lookout.run,
                *((system_topics.run,) if settings.metrics_stream else ()),
            ),
            caught_up=partial(all_ready, *catalog.mirrors),
        )
    finally:
        await offsets.close()
        await lockmgr.close()
        await brokers.close()


if __name__ == "__main__":
    sql_parser.prepare()
    run("nameserver", NameserverSettings, build)
