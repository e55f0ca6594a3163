"""Reads the state of a cluster, and changes its topics and groups.

The results are values of `batonmq.admin.reports` and `batonmq.admin.group_reports`, which `baton`
commands print. A report from several services lists in `problems` the services that did not answer;
their values are None. For resets of progress see `batonmq.admin.resets`, for locks
`batonmq.admin.locks`, for stored messages `batonmq.admin.message_queries`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from typing import Any, Literal, Self, TypeVar

import grpc.aio

from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.storage.v1 import storage_service_pb2 as storage_pb
from batonmq._common import timeouts
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._connection.directory import (
    CALL_TIMEOUT_S,
    ClientEnvironment,
    Directory,
    with_reachable_addresses,
)
from batonmq._connection.security import Security
from batonmq._core.queues import QueueRef
from batonmq._core.retries import retry_topic
from batonmq.admin._pagination import iter_pages
from batonmq.admin.group_reports import (
    Group,
    GroupProgress,
    QueueDiagnosis,
    RefusedClient,
    diagnosis_from_pb,
    group_from_pb,
    join_progress,
    refused_from_pb,
)
from batonmq.admin.reports import (
    ClusterNodes,
    Compaction,
    CreatedTopic,
    Lock,
    MessageType,
    QueueExtent,
    Topic,
    TopicDetail,
    TopicPurge,
    compaction_to_pb,
    drained_from_pb,
    lock_from_pb,
    node_from_pb,
    queue_from_pb,
    queue_to_pb,
    removal_from_pb,
    topic_from_pb,
)
from batonmq.errors import (
    BatonError,
    GroupNotFound,
    InvalidName,
    Retry,
    TopicNotFound,
    Unreachable,
)

QUEUES_PER_CALL = 10_000
PURGE_TIMEOUT_S = 600.0
"""A purge reads the segments that it removes."""
_AGAIN = (Retry.SAME_CALL, Retry.REFRESH_ROUTE)
Value = TypeVar("Value")
Strategy = Literal["", "sticky", "average", "average_by_circle", "consistent_hash", "machine_room"]


class Admin:
    """Client for administration. Use it as an async context manager.

    Failures raise classes of `batonmq.errors`.

    Args:
        nameserver: host:port of a nameserver, or several separated by commas, tried in turn.
        timeout_s: Timeout of each call, including its retries. A call is retried if its error
            allows that, for example while a service starts or can't be reached.
        security: TLS and credentials; None for a connection without TLS.
        environment: Clock, random numbers and transport, for tests.
    """

    def __init__(
        self,
        nameserver: str,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        security: Security | None = None,
        environment: ClientEnvironment | None = None,
    ) -> None:
        secured = (environment or ClientEnvironment()).secured(security)
        self.directory = Directory(nameserver, secured.random, secured.connect)
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channels."""
        await self.directory.close()

    async def create_topic(
        self,
        name: str,
        queue_count: int = 0,
        *,
        message_type: MessageType = "any",
        retention_ms: int | None = None,
        retention_bytes: int | None = None,
        compaction: Compaction | None = None,
    ) -> CreatedTopic:
        """Create a topic, or return the existing one if it has the same number of queues.

        Args:
            name: 1 to 127 characters of A-Z a-z 0-9 _ % -.
            queue_count: Number of queues on all brokers together; 0 for 8.
            message_type: Which messages remote clients may send, at the gateway. It can't be
                changed later. `any` also returns an existing topic of another type.
            retention_ms: Retention time of its messages, in milliseconds; 0 for that of the broker.
                None also returns an existing topic with another one.
            retention_bytes: Maximum bytes of the batches of one queue; 0 for unlimited. None as
                with `retention_ms`.
            compaction: Set to create a compacted topic, which keeps the newest message of each
                ordering key. It can't be changed later to or from None.

        Raises:
            TopicExists: The topic exists with another number of queues, another type, retention or
                compaction.
            InvalidArgument: A retention is negative, or the topic is compacted too; or a setting of
                compaction is out of range.
            InvalidName: The name is not valid, or reserved for the system.
            LimitExceeded: `queue_count` is too large.
            NoBroker: No broker is registered.
        """
        request = pb.CreateTopicRequest(
            topic=name,
            queue_count=queue_count,
            retention_ms=retention_ms,
            retention_bytes=retention_bytes,
            compaction=compaction_to_pb(compaction),
        )
        if message_type != "any":
            type_name = f"TOPIC_MESSAGE_TYPE_{message_type.upper()}"
            request.message_type = pb.TopicMessageType.Value(type_name)
        answer = await self.ask(
            lambda limit_s: self.directory.nameserver().CreateTopic(request, timeout=limit_s)
        )
        return CreatedTopic(topic_from_pb(answer.topic), answer.created)

    async def list_topics(self) -> tuple[Topic, ...]:
        """Return all topics by name, including the system topics BATON_SYS_..."""

        def page(page_token: str) -> Awaitable[pb.ListTopicsResponse]:
            request = pb.ListTopicsRequest(page_token=page_token)
            return self.ask(
                lambda limit_s: self.directory.nameserver().ListTopics(request, timeout=limit_s)
            )

        return tuple([topic_from_pb(t) async for answer in iter_pages(page) for t in answer.topics])

    async def describe_topic(self, name: str) -> TopicDetail:
        """Return a topic and the offsets of its queues.

        Raises:
            TopicNotFound: The topic does not exist.
        """
        request = pb.DescribeTopicRequest(topic=name)
        answer = await self.ask(
            lambda limit_s: self.directory.nameserver().DescribeTopic(request, timeout=limit_s)
        )
        topic = topic_from_pb(answer.topic)
        held, problems = await self.extents(topic.queues)
        firsts = {queue: first for queue, (first, _) in held.items()}
        kept = await self.message_counts(firsts) if topic.compaction is not None else {}
        extents = []
        for queue in topic.queues:
            first, end = held.get(queue, (None, None))
            extents.append(QueueExtent(queue, first, end, kept.get(queue)))
        return TopicDetail(topic, tuple(extents), problems)

    async def update_topic(  # noqa: PLR0913  keyword-only from the second on
        self,
        name: str,
        *,
        queue_count: int = 0,
        permission: Literal["", "read_write", "read", "write"] = "",
        inherited: bool | None = None,
        retention_ms: int | None = None,
        retention_bytes: int | None = None,
        compaction: Compaction | None = None,
    ) -> Topic:
        """Change a topic and return it.

        Args:
            queue_count: New number of queues on all brokers; 0 for no change. Added queues exist at
                once. If the number is lowered, the last queues become read-only, and are removed
                when every group has read them.
            permission: Empty for no change.
            inherited: Whether topics that are created on demand may take their settings from this
                one, if it is the nameserver's `auto_create_template`; None for no change.
            retention_ms: Retention time of its messages, in milliseconds; 0 for that of the broker,
                None for no change.
            retention_bytes: Maximum bytes of the batches of one queue; 0 for unlimited, None for no
                change.
            compaction: New settings of a compacted topic; None for no change.

        Raises:
            TopicNotFound: The topic does not exist.
            InvalidArgument: A retention is negative; or the topic is compacted, and would get
                another number of queues or a retention; or it is not, and would get settings of
                compaction.
            LimitExceeded: More than 1,024 queues, or fewer queues than brokers that have some.
        """
        request = pb.UpdateTopicRequest(
            topic=name,
            queue_count=queue_count,
            inherited=inherited,
            retention_ms=retention_ms,
            retention_bytes=retention_bytes,
            compaction=compaction_to_pb(compaction),
        )
        if permission:
            request.permission = pb.TopicPermission.Value(f"TOPIC_PERMISSION_{permission.upper()}")
        answer = await self.ask(
            lambda limit_s: self.directory.nameserver().UpdateTopic(request, timeout=limit_s)
        )
        return topic_from_pb(answer.topic)

    async def delete_topic(self, name: str) -> None:
        """Delete a topic: its messages can't be read any more. Not retried.

        Their bytes stay on the disks of the brokers until retention removes the log segments that
        contain them; see `purge_topic`.

        Raises:
            TopicNotFound: The topic does not exist. After a failed call this may mean that the
                failed call has deleted it.
        """
        request = pb.DeleteTopicRequest(topic=name)
        try:
            await self.directory.nameserver().DeleteTopic(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as failure:
            raise from_rpc_error(failure) from failure

    async def purge_topic(self, name: str, broker: str) -> TopicPurge:
        """Remove the bytes of deleted topics of this name from the disks of a broker.

        Log segments that contain only messages of deleted topics are removed at once; messages in
        segments with messages of other topics stay until retention removes these. A repeated call
        has nothing left to do.

        Raises:
            TopicExists: The topic is not deleted.
        """
        request = storage_pb.PurgeTopicRequest(topic=name)

        async def ask(limit_s: float) -> storage_pb.PurgeTopicResponse:
            stub = await self.directory.storage(broker)
            return await stub.PurgeTopic(request, timeout=limit_s)

        answer = await self.ask(ask, timeout_s=max(self._timeout_s, PURGE_TIMEOUT_S))
        return TopicPurge(
            broker,
            answer.purged_segments,
            answer.purged_bytes,
            answer.remaining_segments,
            answer.remaining_bytes,
            answer.expiry_unix_ms,
        )

    async def cluster(self) -> ClusterNodes:
        """Return the live processes of the cluster."""
        address = ""

        def describe(limit_s: float) -> Awaitable[pb.DescribeClusterResponse]:
            nonlocal address
            address = self.directory.nameserver_address
            request = pb.DescribeClusterRequest(include_drained=True)
            return self.directory.nameserver().DescribeCluster(request, timeout=limit_s)

        answer = await self.ask(describe)
        nodes = tuple(map(node_from_pb, with_reachable_addresses(answer.nodes, address)))
        return ClusterNodes(
            answer.cluster,
            answer.generation,
            nodes,
            tuple(answer.etcd_alarms),
            answer.etcd_db_bytes,
            tuple(map(drained_from_pb, answer.drained)),
            tuple(map(removal_from_pb, answer.removals)),
        )

    async def list_groups(self) -> tuple[Group, ...]:
        """Return all groups by name, including groups without members."""

        def page(page_token: str) -> Awaitable[pb.ListGroupsResponse]:
            request = pb.ListGroupsRequest(page_token=page_token)
            return self.ask(
                lambda limit_s: self.directory.nameserver().ListGroups(request, timeout=limit_s)
            )

        return tuple([group_from_pb(g) async for answer in iter_pages(page) for g in answer.groups])

    async def describe_group(self, name: str) -> Group:
        """Return one group.

        Raises:
            GroupNotFound: The group does not exist.
        """
        return (await self._described(name))[0]

    async def group_progress(self, name: str) -> GroupProgress:
        """Return the progress of a group on all its queues, and the clients that can't join.

        The queues are those of the subscription and those with progress. Progress is left out on a
        queue that its topic no longer has: it is kept in case that the topic gets the queue again.

        Raises:
            GroupNotFound: The group does not exist.
        """
        (group, refused), topics = await self._described(name), await self.list_topics()
        problems: list[str] = []
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(_or_problem("offsets", self.progress(name), (), problems))
            locks = tasks.create_task(_or_problem("lockmgr", self.list_locks(name), (), problems))
        queues_of = {topic.name: frozenset(topic.queues) for topic in topics}
        progress = [
            entry
            for entry in reading.result()
            if (queue := queue_from_pb(entry.queue.queue)) in queues_of.get(queue.topic, {queue})
        ]
        wanted = {subscription.topic for subscription in group.subscriptions}
        queues = {queue for name in wanted for queue in queues_of.get(name, ())}
        queues.update(queue_from_pb(entry.queue.queue) for entry in progress)
        # Read after the committed offsets, so that no committed offset is above an end.
        extents, away = await self.extents(sorted(queues))
        ends = {queue: next_offset for queue, (_, next_offset) in extents.items()}
        compacted = {topic.name for topic in topics if topic.compaction is not None}
        committed = {
            queue: entry.committed_offset
            for entry in progress
            if (queue := queue_from_pb(entry.queue.queue)).topic in compacted
        }
        lags = await self.message_counts(committed)
        rows = join_progress(group, queues, progress, locks.result(), ends, lags)
        return GroupProgress(group, rows, refused, (*problems, *away))

    async def update_group(
        self,
        name: str,
        *,
        policy: Literal["", "reject", "staged", "staged_latest", "warn"] = "",
        ownership: Literal["", "on", "off"] = "",
        strategy: Strategy = "",
    ) -> Group:
        """Change the settings of a group and return it; create the group if it does not exist.

        Args:
            policy: Handling of members with another subscription; empty for no change.
            ownership: Whether queues are owned; empty for no change.
            strategy: Assignment of queues to members; empty for no change.

        Raises:
            GroupInUse: `ownership` can change only while the group has no live member.
            InvalidName: The name is not valid.
        """
        request = pb.UpdateGroupRequest(group=name)
        if policy:
            policy_name = f"SUBSCRIPTION_POLICY_{policy.upper()}"
            request.policy = pb.SubscriptionPolicy.Value(policy_name)
        if ownership:
            request.ownership = pb.Ownership.Value(f"OWNERSHIP_{ownership.upper()}")
        if strategy:
            request.strategy = pb.Strategy.Value(f"STRATEGY_{strategy.upper()}")
        return await self._update_group(request)

    async def pause_group(
        self,
        name: str,
        by: str,
        reason: str,
        *,
        ownership: Literal["", "on", "off"] = "",
        create: bool = False,
    ) -> Group:
        """Stop deliveries to a group; messages in flight are still handled and acknowledged.

        Args:
            by: Name of the operator, shown in reports of the group.
            reason: Reason of the pause, shown in reports of the group.
            ownership: Whether queues are owned, changed by the same call; empty for no change.
            create: Create the group, by the same call, if it does not exist.

        Raises:
            GroupNotFound: The group does not exist, and is not to be created.
            GroupInUse: `ownership` can change only while the group has no live member. Nothing has
                changed.
        """
        if not create:
            await self.describe_group(name)
        request = pb.UpdateGroupRequest(group=name, paused=True, by=by, reason=reason)
        if ownership:
            request.ownership = pb.Ownership.Value(f"OWNERSHIP_{ownership.upper()}")
        return await self._update_group(request)

    async def resume_group(self, name: str, by: str, reason: str = "") -> Group:
        """Resume deliveries to a group; no error if the group is not paused.

        `by` and `reason` are as for `pause_group`.

        Raises:
            GroupNotFound: The group does not exist.
        """
        await self.describe_group(name)
        return await self._update_group(
            pb.UpdateGroupRequest(group=name, paused=False, by=by, reason=reason)
        )

    async def delete_group(self, name: str) -> int:
        """Delete a group without members; return the number of queues that had progress.

        Its progress and its retry topic are deleted, including messages that wait for a retry. Its
        dead letters stay.

        Not retried; after a failure, call again to complete the deletion.

        Raises:
            GroupNotFound: The group does not exist.
            GroupInUse: The group has live members, or was created again meanwhile.
        """
        request = pb.DeleteGroupRequest(group=name)
        try:
            answer = await self.directory.nameserver().DeleteGroup(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as failure:
            error = from_rpc_error(failure)
            if isinstance(error, GroupNotFound):
                await self._delete_retries(name)
            raise error from failure
        await self._delete_retries(name)
        return answer.queue_count

    async def _delete_retries(self, group: str) -> None:
        with contextlib.suppress(
            TopicNotFound, InvalidName
        ):  # there is none, or no topic can have that name
            await self.delete_topic(retry_topic(group))

    async def why_stuck(
        self, group: str, topic: str = "", broker: str = "", queue_id: int | None = None
    ) -> tuple[QueueDiagnosis, ...]:
        """Return for each queue why the group makes no progress, by topic, broker and queue.

        Args:
            topic: Only this topic; empty for all topics of the subscription.
            broker: Only queues of this broker; empty for all.
            queue_id: Only queues with this id; None for all.

        The nameserver queries the other services, and reports if one does not answer. The timeout
        is therefore three times that of other calls.

        Raises:
            GroupNotFound, TopicNotFound: The group or the topic does not exist.
        """
        request = pb.WhyStuckRequest(group=group, topic=topic, broker=broker, queue_id=queue_id)
        answer = await self.ask(
            lambda limit_s: self.directory.nameserver().WhyStuck(request, timeout=limit_s),
            timeout_s=3 * self._timeout_s,
        )
        return tuple(map(diagnosis_from_pb, answer.queues))

    async def list_locks(self, group: str = "", topic: str = "") -> tuple[Lock, ...]:
        """Return the entries of the lock manager by group, topic, broker and queue.

        For a large cluster use `lock_pages`, which keeps one page in memory.

        Args:
            group: Only of this group; empty for all.
            topic: Only of this topic; empty for all.
        """
        return tuple([lock async for page in self.lock_pages(group, topic) for lock in page])

    async def lock_pages(self, group: str = "", topic: str = "") -> AsyncIterator[tuple[Lock, ...]]:
        """Yield the entries that `list_locks` returns, page by page as the lock manager sends them.

        An entry that exists during the whole listing is listed exactly once.
        """

        def page(page_token: str) -> Awaitable[lockmgr_pb.ListResponse]:
            request = lockmgr_pb.ListRequest(group=group, topic=topic, page_token=page_token)

            async def ask(limit_s: float) -> lockmgr_pb.ListResponse:
                return await (await self.directory.lockmgr()).List(request, timeout=limit_s)

            return self.ask(ask)

        async for answer in iter_pages(page):
            yield tuple(map(lock_from_pb, answer.entries))

    async def progress(self, group: str) -> Sequence[offsets_pb.Progress]:
        """Return the progress of a group, ascending by topic, broker and queue."""

        def page(page_token: str) -> Awaitable[offsets_pb.QueryGroupResponse]:
            request = offsets_pb.QueryGroupRequest(group=group, page_token=page_token)

            async def ask(limit_s: float) -> offsets_pb.QueryGroupResponse:
                stub = await self.directory.offsets(group)
                return await stub.QueryGroup(request, timeout=limit_s)

            return self.ask(ask)

        return [queue async for answer in iter_pages(page) for queue in answer.queues]

    async def extents(
        self, queues: Iterable[QueueRef]
    ) -> tuple[dict[QueueRef, tuple[int, int]], tuple[str, ...]]:
        """Return first and next offset of the queues, and the errors of brokers that failed."""
        offsets, problems = await self._offsets(queues)
        return {q: (one.first_offset, one.next_offset) for q, one in offsets.items()}, problems

    async def stored_bytes(
        self, queues: Iterable[QueueRef]
    ) -> tuple[dict[QueueRef, int], tuple[str, ...]]:
        """Return the bytes of the queues in the logs, and the errors of brokers that failed.

        A queue with a damaged index is left out, and so are those of a broker that failed.
        """
        offsets, problems = await self._offsets(queues, with_bytes=True)
        counted = {q: one for q, one in offsets.items() if one.HasField("stored_bytes")}
        return {q: one.stored_bytes for q, one in counted.items()}, problems

    async def _offsets(
        self, queues: Iterable[QueueRef], *, with_bytes: bool = False
    ) -> tuple[dict[QueueRef, storage_pb.QueueOffsets], tuple[str, ...]]:
        by_broker: dict[str, list[QueueRef]] = defaultdict(list)
        for queue in queues:
            by_broker[queue.broker].append(queue)
        problems: list[str] = []
        async with asyncio.TaskGroup() as tasks:
            calls = [
                tasks.create_task(
                    _or_problem(broker, self._offsets_at(broker, here, with_bytes), {}, problems)
                )
                for broker, here in by_broker.items()
            ]
        offsets = {queue: one for task in calls for queue, one in task.result().items()}
        return offsets, tuple(problems)

    async def message_counts(self, offsets: Mapping[QueueRef, int]) -> dict[QueueRef, int]:
        """Return how many messages queues have at or after an offset each.

        In a compacted topic that is less than the difference of two offsets. Queues of a broker
        that does not answer are left out.
        """
        by_broker: dict[str, list[QueueRef]] = {}
        for queue in offsets:
            by_broker.setdefault(queue.broker, []).append(queue)
        problems: list[str] = []
        async with asyncio.TaskGroup() as tasks:
            calls = [
                tasks.create_task(
                    _or_problem(
                        broker,
                        self._offsets_at(broker, here, with_bytes=False, counted=offsets),
                        {},
                        problems,
                    )
                )
                for broker, here in by_broker.items()
            ]
        return {
            queue: one.counts[0].count
            for task in calls
            for queue, one in task.result().items()
            if one.counts
        }

    async def _described(self, name: str) -> tuple[Group, tuple[RefusedClient, ...]]:
        request = pb.DescribeGroupRequest(group=name)
        answer = await self.ask(
            lambda limit_s: self.directory.nameserver().DescribeGroup(request, timeout=limit_s)
        )
        return group_from_pb(answer.group), tuple(map(refused_from_pb, answer.refused))

    async def _update_group(self, request: pb.UpdateGroupRequest) -> Group:
        answer = await self.ask(
            lambda limit_s: self.directory.nameserver().UpdateGroup(request, timeout=limit_s)
        )
        return group_from_pb(answer.group)

    async def _offsets_at(
        self,
        broker: str,
        queues: Sequence[QueueRef],
        with_bytes: bool,
        counted: Mapping[QueueRef, int] | None = None,
    ) -> dict[QueueRef, storage_pb.QueueOffsets]:
        offsets: dict[QueueRef, storage_pb.QueueOffsets] = {}
        for start in range(0, len(queues), QUEUES_PER_CALL):
            part = queues[start : start + QUEUES_PER_CALL]
            request = storage_pb.QueryOffsetsRequest(
                queues=map(queue_to_pb, part),
                with_bytes=with_bytes,
                counts=(
                    storage_pb.CountedOffset(queue_index=index, offset=counted[queue])
                    for index, queue in enumerate(part if counted else ())
                    if counted
                ),
            )

            async def ask(
                limit_s: float, request: storage_pb.QueryOffsetsRequest = request
            ) -> storage_pb.QueryOffsetsResponse:
                stub = await self.directory.storage(broker)
                answer = await stub.QueryOffsets(request, timeout=limit_s)
                _raise_if_repeatable(answer.outcomes)
                return answer

            outcomes = (await self.ask(ask)).outcomes
            for queue, outcome in zip(part, outcomes, strict=True):
                if outcome.HasField("offsets"):
                    offsets[queue] = outcome.offsets
        return offsets

    async def ask(
        self, ask: Callable[[float], Awaitable[Value]], *, timeout_s: float | None = None
    ) -> Value:
        """Return the result of `ask(limit_s)`; retry while the error allows it.

        Args:
            timeout_s: Timeout of the call with its retries; None for that of this client.

        Raises:
            BatonError: The last error.
        """
        loop = asyncio.get_running_loop()
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline, failures = loop.time() + limit_s, 0
        error: BatonError = Unreachable(f"no answer within {limit_s:g} s")
        try:
            async with timeouts.timeout_at(deadline):
                while True:
                    try:
                        return await ask(deadline - loop.time())
                    except grpc.aio.AioRpcError as failure:
                        error = from_rpc_error(failure)
                        error.__cause__ = failure
                    except BatonError as failure:
                        error = failure
                    if error.retry not in _AGAIN:
                        raise error
                    if isinstance(error, Unreachable):
                        self.directory.next_nameserver()
                    await self.directory.pause(error, failures)
                    failures += 1
        except TimeoutError:
            raise error from error.__cause__


def _raise_if_repeatable(outcomes: Iterable[storage_pb.QueryOffsetsOutcome]) -> None:
    """Raise if a broker can't answer for a queue now, such as one that has just started.

    A queue that does not exist, or is damaged, is a result.
    """
    for outcome in outcomes:
        if outcome.HasField("error"):
            error = error_from_pb(outcome.error)
            if error.retry is Retry.SAME_CALL:
                raise error


async def _or_problem(
    service: str, asking: Coroutine[Any, Any, Value], otherwise: Value, problems: list[str]
) -> Value:
    """Return the result; if `service` fails, add the error to `problems` and return `otherwise`."""
    try:
        return await asking
    except BatonError as error:
        problems.append(f"{service}: {error.reason}: {error.message}")
        return otherwise
