"""The calls about topics and routes."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._core.names import check_topic, check_user_topic
from batonmq._core.retries import group_of
from batonmq.errors import (
    InvalidArgument,
    LimitExceeded,
    OffsetsUnreachable,
    TopicExists,
    TopicNotFound,
)
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.config import NameserverSettings
from batonmq_server.nameserver.core.topic_resize import resized_spread
from batonmq_server.nameserver.core.topics import (
    QUEUES_DEFAULT,
    QUEUES_MAX,
    Route,
    Topic,
    with_rooms,
)
from batonmq_server.nameserver.progress_deleter import ProgressDeleter
from batonmq_server.nameserver.topic_proto import (
    compaction_from_pb,
    message_type_from_pb,
    permission_from_pb,
    retention_from_pb,
    route_to_pb,
    topic_to_pb,
)
from batonmq_server.nameserver.topic_store import (
    CreatedTopic,
    TopicFeatures,
    TopicStore,
    topic_not_found,
)
from batonmq_server.runtime.access.quotas import UNLIMITED, Quota
from batonmq_server.runtime.paging import key_of_token, listed, page_of

log = logging.getLogger(__name__)

GROUP_TOPIC_QUEUES_SPARE = 8
"""A new retry or dead-letter topic may have one queue for each broker, and this many more: a
consumer may know a broker that this nameserver does not know yet. An administrator can add more."""


class TopicCalls:
    """Carries out the calls about topics; each method is the call of that name in the proto."""

    def __init__(
        self,
        settings: NameserverSettings,
        catalog: Catalog,
        store: TopicStore,
        progress_deleter: ProgressDeleter,
        quota_of: Callable[[str], Quota] = lambda _: UNLIMITED,
    ) -> None:
        self._quota_of = quota_of
        self._settings, self._catalog = settings, catalog
        self._store, self._progress_deleter = store, progress_deleter

    async def create(
        self, request: pb.CreateTopicRequest, owner: str = ""
    ) -> pb.CreateTopicResponse:
        """See the proto.

        Args:
            owner: Identity of the caller; empty while authorization is off.
        """
        name = check_user_topic(request.topic)
        self._catalog.check_ready()
        queues_max = QUEUES_MAX
        if group_of(name):  # a permission to consume allows a consumer to create it
            queues_max = len(self._catalog.rooms) + GROUP_TOPIC_QUEUES_SPARE
        _check_queue_count(request.queue_count, queues_max)
        count = request.queue_count or QUEUES_DEFAULT
        kind = message_type_from_pb(request)
        retention_ms, retention_bytes = retention_from_pb(request)
        features = TopicFeatures(
            owner=owner,
            message_type=kind,
            retention_ms=retention_ms,
            retention_bytes=retention_bytes,
            compaction=compaction_from_pb(request),
        )
        if features.compaction is not None and (retention_ms or retention_bytes):
            raise _no_retention(name)
        done = await self._create(name, count, features)
        return pb.CreateTopicResponse(topic=topic_to_pb(done.topic), created=done.created)

    async def update(self, request: pb.UpdateTopicRequest) -> pb.UpdateTopicResponse:
        """See the proto."""
        name = check_user_topic(request.topic)
        _check_queue_count(request.queue_count)
        permission = permission_from_pb(request)
        retention_ms, retention_bytes = retention_from_pb(request)
        compaction = compaction_from_pb(request)
        self._catalog.check_ready()

        def change(topic: Topic) -> Topic:
            if topic.compaction is not None and (retention_ms or retention_bytes):
                raise _no_retention(name)
            _check_change(topic, request.queue_count, compaction)
            spread = topic.spread
            if request.queue_count:
                spread = resized_spread(topic, request.queue_count, self._catalog.placement_rooms)
            spread = with_rooms(spread, self._catalog.rooms)
            return replace(
                topic,
                spread=spread,
                permission=permission or topic.permission,
                inherited=request.inherited if request.HasField("inherited") else topic.inherited,
                retention_ms=topic.retention_ms if retention_ms is None else retention_ms,
                retention_bytes=(
                    topic.retention_bytes if retention_bytes is None else retention_bytes
                ),
                compaction=topic.compaction and topic.compaction._replace(**compaction or {}),
            )

        topic, revision = await self._store.update(name, change)
        await self._catalog.caught_up(topics=revision)
        log.info(
            "topic updated topic=%s queues=%d permission=%s",
            name,
            topic.queue_count,
            topic.permission,
        )
        return pb.UpdateTopicResponse(topic=topic_to_pb(topic))

    async def list(
        self, request: pb.ListTopicsRequest, visible: Callable[[str], bool]
    ) -> pb.ListTopicsResponse:
        """See the proto.

        Args:
            visible: Whether the caller may see a topic.
        """
        after, topics = key_of_token(request.page_token), self._catalog.topics
        self._catalog.check_ready()

        def find(name: str) -> Topic | None:
            return topics.get(name) if visible(name) else None

        found = await listed(topics, after, find, request.page_size)
        page = page_of(((name, topic_to_pb(topic)) for name, topic in found), request.page_size)
        return pb.ListTopicsResponse(topics=page.entries, next_page_token=page.next_page_token)

    async def describe(self, request: pb.DescribeTopicRequest) -> pb.DescribeTopicResponse:
        """See the proto."""
        return pb.DescribeTopicResponse(topic=topic_to_pb(await self.topic(request.topic)))

    async def delete(self, request: pb.DeleteTopicRequest) -> pb.DeleteTopicResponse:
        """See the proto."""
        name = check_user_topic(request.topic)
        self._catalog.check_ready()
        revision, topic_id = await self._store.delete(name)
        await self._catalog.caught_up(topics=revision)
        log.info("topic deleted topic=%s", name)
        await self._delete_progress(name, topic_id)
        return pb.DeleteTopicResponse()

    async def query_route(
        self, request: pb.QueryRouteRequest, owner: str = ""
    ) -> pb.QueryRouteResponse:
        """See the proto.

        Args:
            owner: Identity of the caller, which creates a topic on demand.
        """
        try:
            topic = await self.topic(request.topic)
        except TopicNotFound:
            if not self._settings.auto_create_topics:
                raise
            topic = await self._create_on_demand(request.topic, owner)
        return pb.QueryRouteResponse(route=route_to_pb(self._catalog.route(topic)))

    async def watch_route(
        self, request: pb.WatchRouteRequest
    ) -> AsyncGenerator[pb.WatchRouteResponse]:
        """See the proto."""
        topic = await self.topic(request.topic)
        sent: Route | None = None
        with self._catalog.watching_topic(topic.name) as changed:
            while True:
                changed.clear()
                present = self._catalog.topics.get(topic.name)
                if present is None or present.topic_id != topic.topic_id:
                    raise topic_not_found(topic.name)
                route = self._catalog.route(present)
                if not route.same_targets(sent):
                    sent = route
                    yield pb.WatchRouteResponse(route=route_to_pb(route))
                await changed.wait()

    async def _delete_progress(self, name: str, topic_id: int) -> None:
        """Delete the progress of a deleted topic, if offsets answers.

        Otherwise it stays until a topic of the name is created, which waits for its deletion.
        """
        try:
            await self._progress_deleter.delete_topic(name, topic_id)
        except OffsetsUnreachable as error:
            log.warning("progress of a deleted topic stays topic=%s error=%s", name, error)

    async def _create(self, name: str, queue_count: int, features: TopicFeatures) -> CreatedTopic:
        if name not in self._catalog.topics and not group_of(name):
            self._check_quota(features.owner)
        done = await self._store.create(
            name,
            queue_count,
            self._catalog.placement_rooms,
            self._progress_deleter.delete_topic,
            features,
        )
        await self._catalog.caught_up(topics=done.revision)
        if done.created:
            log.info("topic created topic=%s topic_id=%d", name, done.topic.topic_id)
        return done

    def _check_quota(self, owner: str) -> None:
        """Return if an identity may create another topic.

        Raises:
            LimitExceeded: it has as many as its quota allows.
        """
        limit = self._quota_of(owner).topics if owner else None
        if limit is None:
            return
        owned = (topic for topic in self._catalog.topics.values() if topic.owner == owner)
        if sum(1 for topic in owned if not group_of(topic.name)) >= limit:
            raise LimitExceeded(
                f"{owner} has reached its quota topics={limit}",
                remedy="Delete a topic, or ask an administrator for a higher quota: "
                "baton quota set IDENTITY --topics.",
                facts={"field": "topics", "limit": limit, "actual": limit + 1},
            )

    async def _create_on_demand(self, name: str, owner: str) -> Topic:
        """Create the topic because a client has requested its route; return it.

        Source: the inherit bit of RocketMQ's default topic, TBW102.
        """
        settings = self._settings
        check_user_topic(name)
        template = self._catalog.topics.get(settings.auto_create_template)
        queue_count, features = settings.auto_create_queue_count, TopicFeatures(owner=owner)
        if template is not None and template.inherited:
            queue_count = template.queue_count
            features = TopicFeatures(
                template.permission,
                owner,
                retention_ms=template.retention_ms,
                retention_bytes=template.retention_bytes,
            )
        try:
            return (await self._create(name, queue_count, features)).topic
        except TopicExists:  # Another client created it first, with another number of queues.
            return await self.topic(name)

    async def topic(self, name: str) -> Topic:
        """Return the topic, from etcd if the catalog does not have it.

        Raises:
            InvalidName, NotServing, TopicNotFound: see the proto.
        """
        check_topic(name)
        self._catalog.check_ready()
        if (topic := self._catalog.topics.get(name)) is not None:
            return topic
        entry = await self._store.read(name)
        if entry is None:
            raise topic_not_found(name)
        await self._catalog.caught_up(topics=entry[1])
        return entry[0]


def _check_change(topic: Topic, queue_count: int, compaction: Mapping[str, int] | None) -> None:
    """Check a change of a topic against whether it is compacted.

    Raises:
        InvalidArgument: a compacted topic would get another number of queues, or a topic that is
            not compacted gets settings of compaction.
    """
    if compaction is not None and topic.compaction is None:
        raise InvalidArgument(
            f"topic {topic.name} is not compacted; that is fixed when a topic is created",
            remedy="Create a compacted topic, and copy the messages.",
            facts={"field": "compaction"},
        )
    if topic.compaction is not None and queue_count not in (0, topic.queue_count):
        raise InvalidArgument(
            f"topic {topic.name} is compacted and has {topic.queue_count} queues, which can't be "
            "changed: keys would move to other queues, and leave old messages behind",
            remedy="Create a compacted topic with more queues, and copy the messages.",
            facts={"field": "queue_count"},
        )


def _no_retention(name: str) -> InvalidArgument:
    return InvalidArgument(
        f"topic {name} is compacted: its messages have no retention time and no maximum of bytes",
        remedy="Leave out the retention, or create a topic without compaction.",
        facts={"field": "retention"},
    )


def _check_queue_count(queue_count: int, queues_max: int = QUEUES_MAX) -> None:
    if queue_count > queues_max:
        raise LimitExceeded(
            f"queue_count is {queue_count}; the limit is {queues_max}",
            remedy=f"Use 1 to {queues_max} queues.",
            facts={"field": "queue_count", "limit": queues_max, "actual": queue_count},
        )
