"""The servicer of NameserverService: passes each call to the object that carries it out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc.aio

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1 import nameserver_service_pb2_grpc as pb_grpc
from batonmq_server.nameserver.broker_removals import BrokerRemovals
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.diagnosis_calls import DiagnosisCalls
from batonmq_server.nameserver.etcd_monitor import EtcdMonitor
from batonmq_server.nameserver.group_calls import GroupCalls
from batonmq_server.nameserver.leader_moves import LeaderMoves
from batonmq_server.nameserver.node_drains import NodeDrains
from batonmq_server.nameserver.queue_move_calls import QueueMoveCalls
from batonmq_server.nameserver.system_topics import SystemTopics
from batonmq_server.nameserver.topic_calls import TopicCalls
from batonmq_server.nameserver.unclean_election import UncleanElection
from batonmq_server.runtime.access.guard import PermissionCheck
from batonmq_server.runtime.access.permissions import Permission, join_group, use_topic

Context = grpc.aio.ServicerContext[Any, Any]


class NameserverServicer(pb_grpc.NameserverServiceServicer):
    """Answers from the catalog, once that is complete; writes through the stores.

    A call that wrote answers after the catalog shows the write, so a caller reads its own writes at
    this replica. A name that the catalog does not have is looked up in etcd before the call answers
    NOT_FOUND, so a caller also reads writes that it made at another replica.

    Args:
        permissions_of: Returns the check of permissions of the caller of a call: lists have only
            what the caller may use.
        require: Raises PermissionDenied if the caller of a call does not have the permissions.
    """

    def __init__(  # noqa: PLR0913  one for each group of calls
        self,
        catalog: Catalog,
        topics: TopicCalls,
        groups: GroupCalls,
        diagnosis: DiagnosisCalls,
        unclean_election: UncleanElection,
        drains: NodeDrains,
        *,
        queue_moves: QueueMoveCalls,
        removals: BrokerRemovals,
        permissions_of: Callable[[Context], Callable[[Permission], bool]],
        require: PermissionCheck,
        etcd_monitor: EtcdMonitor,
        system_topics: SystemTopics,
        identity_of: Callable[[Context], str] = lambda _: "",
    ) -> None:
        self._identity_of = identity_of
        self._catalog, self._unclean_election = catalog, unclean_election
        self._drains, self._leader_moves = drains, LeaderMoves(drains)
        self._queue_moves, self._removals = queue_moves, removals
        self._topics, self._groups = topics, groups
        self._diagnosis, self._permissions_of, self._require = diagnosis, permissions_of, require
        self._etcd_monitor, self._system_topics = etcd_monitor, system_topics

    async def CreateTopic(
        self, request: pb.CreateTopicRequest, context: Context
    ) -> pb.CreateTopicResponse:
        """See the proto."""
        return await self._topics.create(request, self._identity_of(context))

    async def EnsureUnresolvedTopic(
        self, request: pb.EnsureUnresolvedTopicRequest, context: Context
    ) -> pb.EnsureUnresolvedTopicResponse:
        """See the proto."""
        self._catalog.check_ready()
        await self._system_topics.ensure_unresolved(request.broker)
        return pb.EnsureUnresolvedTopicResponse()

    async def UpdateTopic(
        self, request: pb.UpdateTopicRequest, context: Context
    ) -> pb.UpdateTopicResponse:
        """See the proto."""
        return await self._topics.update(request)

    async def ListTopics(
        self, request: pb.ListTopicsRequest, context: Context
    ) -> pb.ListTopicsResponse:
        """See the proto."""
        may = self._permissions_of(context)
        return await self._topics.list(request, lambda name: may(use_topic(name)))

    async def DescribeTopic(
        self, request: pb.DescribeTopicRequest, context: Context
    ) -> pb.DescribeTopicResponse:
        """See the proto."""
        return await self._topics.describe(request)

    async def DeleteTopic(
        self, request: pb.DeleteTopicRequest, context: Context
    ) -> pb.DeleteTopicResponse:
        """See the proto."""
        return await self._topics.delete(request)

    async def QueryRoute(
        self, request: pb.QueryRouteRequest, context: Context
    ) -> pb.QueryRouteResponse:
        """See the proto."""
        return await self._topics.query_route(request, self._identity_of(context))

    async def WatchRoute(
        self, request: pb.WatchRouteRequest, context: Context
    ) -> AsyncIterator[pb.WatchRouteResponse]:
        """See the proto. Changes while an element is being sent are joined in the next one."""
        async with aclosing(self._topics.watch_route(request)) as answers:
            async for answer in answers:
                yield answer

    async def DescribeCluster(
        self, request: pb.DescribeClusterRequest, context: Context
    ) -> pb.DescribeClusterResponse:
        """See the proto."""
        self._catalog.check_ready()
        nodes, generation = self._catalog.nodes()
        drained = await self._drains.drained() if request.include_drained else ()
        return pb.DescribeClusterResponse(
            nodes=nodes,
            generation=generation,
            cluster=self._groups.settings.cluster,
            etcd_alarms=self._etcd_monitor.space.alarms,
            etcd_db_bytes=self._etcd_monitor.space.db_bytes,
            drained=drained,
            removals=[one for _, one in sorted(self._catalog.removals.items())],
        )

    async def ElectReplica(
        self, request: pb.ElectReplicaRequest, context: Context
    ) -> pb.ElectReplicaResponse:
        """See the proto."""
        return await self._unclean_election.elect(request)

    async def DrainNode(
        self, request: pb.DrainNodeRequest, context: Context
    ) -> pb.DrainNodeResponse:
        """See the proto."""
        return await self._drains.drain(request)

    async def UndrainNode(
        self, request: pb.UndrainNodeRequest, context: Context
    ) -> pb.UndrainNodeResponse:
        """See the proto."""
        return await self._drains.undrain(request)

    async def MoveLeader(
        self, request: pb.MoveLeaderRequest, context: Context
    ) -> pb.MoveLeaderResponse:
        """See the proto."""
        return await self._leader_moves.move(request)

    async def MoveQueues(
        self, request: pb.MoveQueuesRequest, context: Context
    ) -> pb.MoveQueuesResponse:
        """See the proto."""
        return await self._queue_moves.move(request)

    async def QueryRetiring(
        self, request: pb.QueryRetiringRequest, context: Context
    ) -> pb.QueryRetiringResponse:
        """See the proto."""
        return await self._queue_moves.query_retiring(request)

    async def RemoveBroker(
        self, request: pb.RemoveBrokerRequest, context: Context
    ) -> pb.RemoveBrokerResponse:
        """See the proto."""
        return await self._removals.remove(request)

    async def Heartbeat(
        self, request: pb.HeartbeatRequest, context: Context
    ) -> pb.HeartbeatResponse:
        """See the proto."""
        return await self._groups.heartbeat(request, self._identity_of(context))

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:
        """See the proto."""
        return await self._groups.leave(request)

    async def WatchGroup(
        self, request: pb.WatchGroupRequest, context: Context
    ) -> AsyncIterator[pb.WatchGroupResponse]:
        """See the proto. Changes while an element is being sent are joined in the next one."""
        async with aclosing(self._groups.watch(request)) as answers:
            async for answer in answers:
                yield answer

    async def ListGroups(
        self, request: pb.ListGroupsRequest, context: Context
    ) -> pb.ListGroupsResponse:
        """See the proto."""
        may = self._permissions_of(context)
        return await self._groups.list(request, lambda name: may(join_group(name)))

    async def DescribeGroup(
        self, request: pb.DescribeGroupRequest, context: Context
    ) -> pb.DescribeGroupResponse:
        """See the proto."""
        return await self._groups.describe(request)

    async def UpdateGroup(
        self, request: pb.UpdateGroupRequest, context: Context
    ) -> pb.UpdateGroupResponse:
        """See the proto."""
        return await self._groups.update(request)

    async def DeleteGroup(
        self, request: pb.DeleteGroupRequest, context: Context
    ) -> pb.DeleteGroupResponse:
        """See the proto."""
        return await self._groups.delete(request)

    async def WhyStuck(self, request: pb.WhyStuckRequest, context: Context) -> pb.WhyStuckResponse:
        """See the proto."""
        return await self._diagnosis.why_stuck(request, partial(self._require, context))

    async def LocateGroup(
        self, request: pb.LocateGroupRequest, context: Context
    ) -> pb.LocateGroupResponse:
        """See the proto."""
        return await self._groups.placement.locate(request)

    async def MoveGroup(
        self, request: pb.MoveGroupRequest, context: Context
    ) -> pb.MoveGroupResponse:
        """See the proto."""
        return await self._groups.placement.move(request)
