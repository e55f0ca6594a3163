"""The servicer: checks requests, asks catalog and store, answers. No rules live here."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc.aio
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1 import nameserver_service_pb2_grpc as pb_grpc

from batonmq.common.errors import (
    BatonError,
    GroupNotFound,
    LimitExceeded,
    SubscriptionConflict,
    TopicExists,
    TopicNotFound,
)
from batonmq.core.names import check_group, check_topic, check_user_topic
from services.nameserver import core
from services.nameserver.catalog import Catalog
from services.nameserver.config import NameserverSettings
from services.nameserver.convert import (
    group_to_pb,
    heartbeat_from_pb,
    incarnation_from_pb,
    permission_from_pb,
    route_to_pb,
    topic_to_pb,
)
from services.nameserver.core import (
    QUEUES_DEFAULT,
    QUEUES_MAX,
    Group,
    Route,
    Terms,
    Topic,
)
from services.nameserver.progress import Progress
from services.nameserver.spread import resized
from services.nameserver.store import CreatedTopic, Store, topic_not_found
from services.nameserver.telemetry import Telemetry

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class NameserverServicer(pb_grpc.NameserverServiceServicer):
    """Answers from the catalog, once that is complete; writes through the store.

    A call that wrote answers when the catalog shows it, so the caller reads its own writes here.
    What the catalog does not know is looked up in etcd before it is said not to exist, so the
    caller reads writes it made at another replica too.
    """

    def __init__(
        self,
        settings: NameserverSettings,
        catalog: Catalog,
        store: Store,
        telemetry: Telemetry,
        progress: Progress,
    ) -> None:
        self._settings, self._catalog = settings, catalog
        self._store, self._telemetry, self._progress = store, telemetry, progress

    async def CreateTopic(
        self, request: pb.CreateTopicRequest, context: Context
    ) -> pb.CreateTopicResponse:
        """See the proto."""
        name = check_user_topic(request.topic)
        _check_queue_count(request.queue_count)
        self._catalog.check_ready()
        done = await self._create(name, request.queue_count or QUEUES_DEFAULT)
        return pb.CreateTopicResponse(topic=topic_to_pb(done.topic), created=done.created)

    async def UpdateTopic(
        self, request: pb.UpdateTopicRequest, context: Context
    ) -> pb.UpdateTopicResponse:
        """See the proto."""
        name = check_user_topic(request.topic)
        _check_queue_count(request.queue_count)
        permission = permission_from_pb(request)
        self._catalog.check_ready()

        def change(topic: Topic) -> Topic:
            spread = topic.spread
            if request.queue_count:
                spread = resized(topic, request.queue_count, self._catalog.addresses)
            return replace(topic, spread=spread, permission=permission or topic.permission)

        topic, revision = await self._store.update_topic(name, change)
        await self._catalog.caught_up(topics=revision)
        log.info(
            "topic updated topic=%s queues=%d permission=%s",
            name,
            topic.queue_count,
            topic.permission,
        )
        return pb.UpdateTopicResponse(topic=topic_to_pb(topic))

    async def ListTopics(
        self, request: pb.ListTopicsRequest, context: Context
    ) -> pb.ListTopicsResponse:
        """See the proto."""
        self._catalog.check_ready()
        topics = self._catalog.topics
        return pb.ListTopicsResponse(topics=[topic_to_pb(topics[name]) for name in sorted(topics)])

    async def DescribeTopic(
        self, request: pb.DescribeTopicRequest, context: Context
    ) -> pb.DescribeTopicResponse:
        """See the proto."""
        return pb.DescribeTopicResponse(topic=topic_to_pb(await self._topic(request.topic)))

    async def DeleteTopic(
        self, request: pb.DeleteTopicRequest, context: Context
    ) -> pb.DeleteTopicResponse:
        """See the proto."""
        name = check_user_topic(request.topic)
        self._catalog.check_ready()
        revision = await self._store.delete_topic(name)
        await self._catalog.caught_up(topics=revision)
        log.info("topic deleted topic=%s", name)
        return pb.DeleteTopicResponse()

    async def QueryRoute(
        self, request: pb.QueryRouteRequest, context: Context
    ) -> pb.QueryRouteResponse:
        """See the proto."""
        try:
            topic = await self._topic(request.topic)
        except TopicNotFound:
            if not self._settings.auto_create_topics:
                raise
            topic = await self._auto_create(request.topic)
        return pb.QueryRouteResponse(route=route_to_pb(self._catalog.route(topic)))

    async def WatchRoute(
        self, request: pb.WatchRouteRequest, context: Context
    ) -> AsyncIterator[pb.WatchRouteResponse]:
        """See the proto. What changes while an element is on its way is joined in the next."""
        topic = await self._topic(request.topic)
        sent: Route | None = None
        with self._catalog.watching_topic(topic.name) as changed:
            while True:
                changed.clear()
                present = self._catalog.topics.get(topic.name)
                if present is None or present.topic_id != topic.topic_id:
                    raise topic_not_found(topic.name)
                route = self._catalog.route(present)
                if not route.same_way(sent):
                    sent = route
                    yield pb.WatchRouteResponse(route=route_to_pb(route))
                await changed.wait()

    async def DescribeCluster(
        self, request: pb.DescribeClusterRequest, context: Context
    ) -> pb.DescribeClusterResponse:
        """See the proto."""
        self._catalog.check_ready()
        nodes, generation = self._catalog.nodes()
        return pb.DescribeClusterResponse(
            nodes=nodes, generation=generation, cluster=self._settings.cluster
        )

    async def Heartbeat(
        self, request: pb.HeartbeatRequest, context: Context
    ) -> pb.HeartbeatResponse:
        """See the proto."""
        try:
            heartbeat = heartbeat_from_pb(request)
            self._catalog.check_ready()
            group = await self._stay(heartbeat) or await self._join(heartbeat)
        except BatonError as error:
            self._telemetry.refused(error)
            raise
        self._telemetry.accepted()
        return pb.HeartbeatResponse(
            group=group_to_pb(group), interval_ms=self._settings.heartbeat_interval_ms
        )

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:
        """See the proto."""
        group = check_group(request.group)
        client_id, incarnation_id = incarnation_from_pb(request.incarnation)
        self._catalog.check_ready()
        change = await self._store.leave(group, client_id, incarnation_id)
        self._telemetry.group_changed(change)
        if change.changed:
            log.info("member left group=%s client_id=%s", group, client_id)
            await self._catalog.caught_up(groups=change.group_revision, live=change.live_revision)
        return pb.LeaveResponse(left=change.changed)

    async def WatchGroup(
        self, request: pb.WatchGroupRequest, context: Context
    ) -> AsyncIterator[pb.WatchGroupResponse]:
        """See the proto. What changes while an element is on its way is joined in the next."""
        name = (await self._group(request.group)).name
        generation = 0
        with self._catalog.watching_group(name) as changed:
            while True:
                changed.clear()
                present = self._catalog.groups.get(name)
                if present is None:
                    raise _group_not_found(name)
                if present.generation > generation:
                    generation = present.generation
                    yield pb.WatchGroupResponse(group=group_to_pb(present))
                await changed.wait()

    async def ListGroups(
        self, request: pb.ListGroupsRequest, context: Context
    ) -> pb.ListGroupsResponse:
        """See the proto."""
        self._catalog.check_ready()
        groups = self._catalog.groups
        return pb.ListGroupsResponse(groups=[group_to_pb(groups[name]) for name in sorted(groups)])

    async def DescribeGroup(
        self, request: pb.DescribeGroupRequest, context: Context
    ) -> pb.DescribeGroupResponse:
        """See the proto."""
        return pb.DescribeGroupResponse(group=group_to_pb(await self._group(request.group)))

    async def _create(self, name: str, queue_count: int) -> CreatedTopic:
        done = await self._store.create_topic(
            name, queue_count, self._catalog.addresses, self._progress.forget
        )
        await self._catalog.caught_up(topics=done.revision)
        if done.created:
            log.info("topic created topic=%s topic_id=%d", name, done.topic.topic_id)
        return done

    async def _auto_create(self, asked: str) -> Topic:
        """The topic, created because a producer wants to send to it."""
        name = check_user_topic(asked)
        try:
            return (await self._create(name, self._settings.auto_create_queue_count)).topic
        except TopicExists:  # with another number of queues, by somebody who was faster
            return await self._topic(name)

    async def _topic(self, asked: str) -> Topic:
        """The topic, from etcd if the catalog does not have it.

        Raises:
            InvalidName, NotServing, TopicNotFound: as the proto says.
        """
        name = check_topic(asked)
        self._catalog.check_ready()
        if (topic := self._catalog.topics.get(name)) is not None:
            return topic
        found = await self._store.read_topic(name)
        if found is None:
            raise topic_not_found(name)
        await self._catalog.caught_up(topics=found[1])
        return found[0]

    async def _group(self, asked: str) -> Group:
        """The group, from etcd if the catalog does not have it.

        Raises:
            InvalidName, NotServing, GroupNotFound: as the proto says.
        """
        name = check_group(asked)
        self._catalog.check_ready()
        if (group := self._catalog.groups.get(name)) is not None:
            return group
        found = await self._store.read_group(name)
        if found is None:
            raise _group_not_found(name)
        await self._catalog.caught_up(groups=found[1])
        return found[0]

    async def _stay(self, heartbeat: core.Heartbeat) -> Group | None:
        """The group, if the sender is a member on its terms whose lease could be renewed.

        Nothing is written, so this is all that most heartbeats cost. Topics are not looked at: a
        topic that is deleted must not take the group's other topics with it.
        """
        group = self._catalog.groups.get(heartbeat.group)
        live = self._catalog.live.values.get(f"{heartbeat.group}/{heartbeat.client_id}")
        member = group.member(heartbeat.client_id) if group is not None else None
        if group is None or live is None or member is None:
            return None
        if not heartbeat.is_from(member) or heartbeat.terms != group.terms:
            return None
        return group if await self._store.refresh(live) else None

    async def _join(self, heartbeat: core.Heartbeat) -> Group:
        await self._check_topics_exist(heartbeat.terms)
        try:
            change = await self._store.join(heartbeat)
        except SubscriptionConflict as error:
            self._telemetry.conflict(heartbeat, error)
            log.warning("member refused group=%s error=%s", heartbeat.group, error)
            raise
        self._telemetry.group_changed(change)
        await self._catalog.caught_up(groups=change.group_revision, live=change.live_revision)
        assert change.group is not None
        if change.changed:
            log.info(
                "group changed group=%s generation=%d members=%d client_id=%s",
                heartbeat.group,
                change.group.generation,
                len(change.group.members),
                heartbeat.client_id,
            )
        return change.group

    async def _check_topics_exist(self, terms: Terms) -> None:
        for subscription in terms.subscriptions:
            await self._topic(subscription.topic)


def _check_queue_count(queue_count: int) -> None:
    if queue_count > QUEUES_MAX:
        raise LimitExceeded(
            f"{queue_count} queues; the limit is {QUEUES_MAX}",
            remedy=f"Use 1 to {QUEUES_MAX} queues.",
            facts={"field": "queue_count", "limit": QUEUES_MAX, "actual": queue_count},
        )


def _group_not_found(name: str) -> GroupNotFound:
    return GroupNotFound(f"group {name} does not exist", facts={"group": name})
