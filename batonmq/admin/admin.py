"""Looking at a cluster and changing its topics and groups, from one nameserver address.

What the commands of `baton` show, as values of `batonmq.admin.reports` and
`batonmq.admin.group_reports`. A report that joins several services says in `problems` which of them
did not answer, and has None where their values would stand. Progress is moved in
`batonmq.admin.resets`, locks in `batonmq.admin.locks`, messages are looked up in
`batonmq.admin.message_queries`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Literal, Self, TypeVar

import grpc.aio

from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.storage.v1 import storage_service_pb2 as storage_pb
from batonmq._common.rpc import from_rpc_error
from batonmq._connection.directory import (
    CALL_TIMEOUT_S,
    ClientEnvironment,
    Directory,
    with_reachable_addresses,
)
from batonmq._connection.security import Security
from batonmq._core.queues import QueueRef
from batonmq._core.retries import retry_topic
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
from batonmq.admin.pagination import iter_pages
from batonmq.admin.reports import (
    ClusterNodes,
    CreatedTopic,
    Lock,
    QueueExtent,
    Topic,
    TopicDetail,
    lock_from_pb,
    node_from_pb,
    queue_from_pb,
    queue_to_pb,
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
_AGAIN = (Retry.SAME_CALL, Retry.REFRESH_ROUTE)
Value = TypeVar("Value")
Strategy = Literal["", "sticky", "average", "average_by_circle", "consistent_hash", "machine_room"]


class Admin:
    """Runs inside `async with`. Failures are raised as the classes of `batonmq.errors`.

    Args:
        nameserver: host:port of a nameserver; several, separated by commas, are tried in turn.
        timeout_s: Bound of every question to a service. What may be asked again (the service
            starts, moves, or can't be reached) is, within that bound.
        security: How to use TLS; None for none.
        environment: Randomness and transport; the real ones by default.
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

    async def create_topic(self, name: str, queue_count: int = 0) -> CreatedTopic:
        """Create a topic, or find it with the same settings.

        Args:
            name: 1 to 127 characters of A-Z a-z 0-9 _ % -.
            queue_count: On all brokers together; 0 for the server's default, 8.

        Raises:
            TopicExists: it exists with another number of queues.
            InvalidName, LimitExceeded, NoBroker: as they say.
        """
        request = pb.CreateTopicRequest(topic=name, queue_count=queue_count)
        answer = await self.ask(
            lambda limit_s: self.directory.nameserver().CreateTopic(request, timeout=limit_s)
        )
        return CreatedTopic(topic_from_pb(answer.topic), answer.created)

    async def list_topics(self) -> tuple[Topic, ...]:
        """All topics by name, also those that the system uses itself: BATON_SYS_..."""

        def page(page_token: str) -> Awaitable[pb.ListTopicsResponse]:
            request = pb.ListTopicsRequest(page_token=page_token)
            return self.ask(
                lambda limit_s: self.directory.nameserver().ListTopics(request, timeout=limit_s)
            )

        return tuple([topic_from_pb(t) async for answer in iter_pages(page) for t in answer.topics])

    async def describe_topic(self, name: str) -> TopicDetail:
        """A topic, and what its queues hold.

        Raises:
            TopicNotFound: there is none.
        """
        request = pb.DescribeTopicRequest(topic=name)
        answer = await self.ask(
            lambda limit_s: self.directory.nameserver().DescribeTopic(request, timeout=limit_s)
        )
        topic = topic_from_pb(answer.topic)
        held, problems = await self.extents(topic.queues)
        extents = tuple(QueueExtent(q, *held.get(q, (None, None))) for q in topic.queues)
        return TopicDetail(topic, extents, problems)

    async def update_topic(
        self,
        name: str,
        *,
        queue_count: int = 0,
        permission: Literal["", "read_write", "read", "write"] = "",
        inherited: bool | None = None,
    ) -> Topic:
        """Change a topic; what it is now.

        Args:
            queue_count: On all brokers together; 0 leaves it. More are there at once. Fewer: the
                last ones take no more messages, and are gone once every group has read them.
            permission: Empty leaves it.
            inherited: Whether topics that are created on demand may take their settings from this
                one, if it is the nameserver's `auto_create_template`; None leaves it.

        Raises:
            TopicNotFound: there is none.
            LimitExceeded: more than 1,024 queues, or fewer than brokers that have some.
        """
        request = pb.UpdateTopicRequest(topic=name, queue_count=queue_count, inherited=inherited)
        if permission:
            request.permission = pb.TopicPermission.Value(f"TOPIC_PERMISSION_{permission.upper()}")
        answer = await self.ask(
            lambda limit_s: self.directory.nameserver().UpdateTopic(request, timeout=limit_s)
        )
        return topic_from_pb(answer.topic)

    async def delete_topic(self, name: str) -> None:
        """Delete a topic and all its messages. Asked once: see `TopicNotFound` after a failure.

        Raises:
            TopicNotFound: there is none.
        """
        request = pb.DeleteTopicRequest(topic=name)
        try:
            await self.directory.nameserver().DeleteTopic(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as failure:
            raise from_rpc_error(failure) from failure

    async def cluster(self) -> ClusterNodes:
        """The live processes."""
        asked = ""

        def describe(limit_s: float) -> Awaitable[pb.DescribeClusterResponse]:
            nonlocal asked
            asked = self.directory.nameserver_address
            request = pb.DescribeClusterRequest()
            return self.directory.nameserver().DescribeCluster(request, timeout=limit_s)

        answer = await self.ask(describe)
        nodes = tuple(map(node_from_pb, with_reachable_addresses(answer.nodes, asked)))
        return ClusterNodes(answer.cluster, answer.generation, nodes)

    async def list_groups(self) -> tuple[Group, ...]:
        """All groups by name, those without members included."""

        def page(page_token: str) -> Awaitable[pb.ListGroupsResponse]:
            request = pb.ListGroupsRequest(page_token=page_token)
            return self.ask(
                lambda limit_s: self.directory.nameserver().ListGroups(request, timeout=limit_s)
            )

        return tuple([group_from_pb(g) async for answer in iter_pages(page) for g in answer.groups])

    async def describe_group(self, name: str) -> Group:
        """One group.

        Raises:
            GroupNotFound: nobody ever joined it or created it.
        """
        return (await self._described(name))[0]

    async def group_progress(self, name: str) -> GroupProgress:
        """A group's progress on every queue it subscribes to or ever had, and who is not let in.

        Raises:
            GroupNotFound: nobody ever joined it or created it.
        """
        (group, refused), topics = await self._described(name), await self.list_topics()
        problems: list[str] = []
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(_or_problem("offsets", self.progress(name), (), problems))
            locks = tasks.create_task(_or_problem("lockmgr", self.list_locks(name), (), problems))
        progress = asked.result()
        wanted = {subscription.topic for subscription in group.subscriptions}
        queues = {queue for topic in topics if topic.name in wanted for queue in topic.queues}
        queues.update(queue_from_pb(found.queue.queue) for found in progress)
        # Read after the committed offsets, which so can't have passed the ends.
        extents, away = await self.extents(sorted(queues))
        ends = {queue: next_offset for queue, (_, next_offset) in extents.items()}
        rows = join_progress(group, queues, progress, locks.result(), ends)
        return GroupProgress(group, rows, refused, (*problems, *away))

    async def update_group(
        self,
        name: str,
        *,
        policy: Literal["", "reject", "staged", "staged_latest", "warn"] = "",
        ownership: Literal["", "on", "off"] = "",
        strategy: Strategy = "",
    ) -> Group:
        """Change the settings of a group, which is created if there is none; what it is now.

        Args:
            policy: What happens to another subscription than the group's; empty leaves it.
            ownership: Whether queues are owned; empty leaves it.
            strategy: How queues are dealt out; empty leaves it.

        Raises:
            GroupInUse: ownership changes only while the group has no live member.
            InvalidName: no group can have this name.
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

    async def pause_group(self, name: str, by: str, reason: str) -> Group:
        """Stop the deliveries of a group; what was delivered is still handled and acknowledged.

        Args:
            by: Who does it.
            reason: Why; both are shown to whoever wonders.

        Raises:
            GroupNotFound: there is none.
        """
        await self.describe_group(name)
        return await self._update_group(
            pb.UpdateGroupRequest(group=name, paused=True, by=by, reason=reason)
        )

    async def resume_group(self, name: str, by: str, reason: str = "") -> Group:
        """Let the deliveries of a paused group go on; no error if they do.

        `by` and `reason` are as for `pause_group`.

        Raises:
            GroupNotFound: there is none.
        """
        await self.describe_group(name)
        return await self._update_group(
            pb.UpdateGroupRequest(group=name, paused=False, by=by, reason=reason)
        )

    async def delete_group(self, name: str) -> int:
        """Delete a group without members, and its progress; on how many queues it had some.

        Its retry topic goes too, with what still waits there to be handled again. Its dead letters
        stay: they are nobody's progress, and somebody may want them.

        Asked once; asking again after a failure finishes what was begun.

        Raises:
            GroupNotFound: there is none.
            GroupInUse: it has live members, or was created again meanwhile.
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
        with contextlib.suppress(TopicNotFound, InvalidName):  # or none can be of that name
            await self.delete_topic(retry_topic(group))

    async def why_stuck(
        self, group: str, topic: str = "", broker: str = "", queue_id: int | None = None
    ) -> tuple[QueueDiagnosis, ...]:
        """Why the queues of a group are not moving, by topic, broker and queue.

        Args:
            topic: Only this topic; empty for all that the group subscribes to.
            broker: Only queues of this broker; empty for all.
            queue_id: Only the queue of this index.

        The nameserver asks the others, and says so if one does not answer: the bound is three
        times that of other questions.

        Raises:
            GroupNotFound, TopicNotFound: as they say.
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
        """First and next offset of the queues that their brokers know, and who did not answer."""
        by_broker: dict[str, list[QueueRef]] = defaultdict(list)
        for queue in queues:
            by_broker[queue.broker].append(queue)
        problems: list[str] = []
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(_or_problem(broker, self._extents_at(broker, here), {}, problems))
                for broker, here in by_broker.items()
            ]
        found = {queue: extent for task in asked for queue, extent in task.result().items()}
        return found, tuple(problems)

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

    async def _extents_at(
        self, broker: str, queues: Sequence[QueueRef]
    ) -> dict[QueueRef, tuple[int, int]]:
        found: dict[QueueRef, tuple[int, int]] = {}
        for start in range(0, len(queues), QUEUES_PER_CALL):
            part = queues[start : start + QUEUES_PER_CALL]
            request = storage_pb.QueryOffsetsRequest(queues=map(queue_to_pb, part))

            async def ask(
                limit_s: float, request: storage_pb.QueryOffsetsRequest = request
            ) -> storage_pb.QueryOffsetsResponse:
                stub = await self.directory.storage(broker)
                return await stub.QueryOffsets(request, timeout=limit_s)

            outcomes = (await self.ask(ask)).outcomes
            for queue, outcome in zip(part, outcomes, strict=True):
                if outcome.HasField("offsets"):
                    found[queue] = (outcome.offsets.first_offset, outcome.offsets.next_offset)
        return found

    async def ask(
        self, ask: Callable[[float], Awaitable[Value]], *, timeout_s: float | None = None
    ) -> Value:
        """The answer of `ask(limit_s)`, which is called again while that may help.

        Args:
            timeout_s: Another bound than the usual one.

        Raises:
            BatonError: why there is none.
        """
        loop = asyncio.get_running_loop()
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline, failures = loop.time() + limit_s, 0
        error: BatonError = Unreachable(f"no answer within {limit_s:g} s")
        try:
            async with asyncio.timeout_at(deadline):
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


async def _or_problem(
    who: str, asking: Coroutine[Any, Any, Value], otherwise: Value, problems: list[str]
) -> Value:
    """The answer of `who`, or `otherwise` and an entry in `problems`."""
    try:
        return await asking
    except BatonError as error:
        problems.append(f"{who}: {error.reason}: {error.message}")
        return otherwise
