"""The calls about groups. The rules are in the core; here requests are checked and answered."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq._core.names import check_group
from batonmq.errors import (
    BatonError,
    ClientIdInUse,
    LimitExceeded,
    Overloaded,
    SubscriptionConflict,
)
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.config import NameserverSettings
from batonmq_server.nameserver.core.change_budget import ChangeBudget
from batonmq_server.nameserver.core.group_transaction import ACCEPTED, SubscriptionVerdict
from batonmq_server.nameserver.core.groups import Group, Heartbeat, Member, hash_of
from batonmq_server.nameserver.group_events import GroupEvents
from batonmq_server.nameserver.group_proto import (
    group_to_pb,
    group_to_stored,
    heartbeat_from_pb,
    incarnation_from_pb,
    settings_from_pb,
    verdict_to_pb,
)
from batonmq_server.nameserver.group_store import GroupStore, group_not_found
from batonmq_server.nameserver.member_sessions import MemberSessions, SessionKey
from batonmq_server.nameserver.placement_calls import PlacementCalls
from batonmq_server.nameserver.progress_deleter import ProgressDeleter
from batonmq_server.nameserver.refused_clients import RefusedClients
from batonmq_server.nameserver.topic_calls import TopicCalls
from batonmq_server.runtime.access.quotas import UNLIMITED, Quota
from batonmq_server.runtime.etcd.session import KeyValue
from batonmq_server.runtime.log_limiter import LogLimiter
from batonmq_server.runtime.paging import key_of_token, listed, page_of

log = logging.getLogger(__name__)

REFUSAL_LINE_INTERVAL_MS = 60_000
"""Time between two lines of log about refused heartbeats of one group."""


class _Recorded(NamedTuple):
    """A group, a member of it, and the key of its session."""

    group: Group
    member: Member
    live: KeyValue


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCalls:
    """Carries out the calls about groups; each method is the call of that name in the proto."""

    settings: NameserverSettings
    clock: Clock
    catalog: Catalog
    store: GroupStore
    topics: TopicCalls
    sessions: MemberSessions
    refused: RefusedClients
    progress_deleter: ProgressDeleter
    placement: PlacementCalls
    events: GroupEvents
    refusal_lines: LogLimiter
    budget: ChangeBudget
    quota_of: Callable[[str], Quota] = lambda _: UNLIMITED

    async def heartbeat(
        self, request: pb.HeartbeatRequest, identity: str = ""
    ) -> pb.HeartbeatResponse:
        """See the proto.

        Args:
            identity: The caller; empty while authorization is off.
        """
        try:
            heartbeat = heartbeat_from_pb(request)
            self.catalog.check_ready()
            verdict = await self._renew(heartbeat)
            if verdict is None:
                self._check_budget(heartbeat)
                self._check_quota(heartbeat, identity)
                verdict = await self._join(heartbeat)
        except BatonError as error:
            self.events.heartbeat_refused(error)
            raise
        self.sessions.heartbeat_received(_session(heartbeat))
        group = self.catalog.message(heartbeat.group)
        self.events.heartbeat_accepted(heartbeat, group.generation if group else 0)
        kind, differences = verdict_to_pb(verdict)
        return pb.HeartbeatResponse(
            group=group,
            interval_ms=self.settings.heartbeat_interval_ms,
            verdict=kind,
            differences=differences,
        )

    async def leave(self, request: pb.LeaveRequest) -> pb.LeaveResponse:
        """See the proto."""
        group = check_group(request.group)
        incarnation = incarnation_from_pb(request.incarnation)
        self.catalog.check_ready()
        outcome = await self.store.leave(group, *incarnation)
        if outcome.left:
            await self.catalog.caught_up(groups=outcome.group_revision, live=outcome.live_revision)
        return pb.LeaveResponse(left=outcome.left)

    async def watch(self, request: pb.WatchGroupRequest) -> AsyncGenerator[pb.WatchGroupResponse]:
        """See the proto."""
        session = None
        if request.HasField("incarnation"):
            session = SessionKey(
                check_group(request.group), *incarnation_from_pb(request.incarnation)
            )
        name = (await self.group(request.group)).name
        generation = 0
        with ExitStack() as stack:
            changed = stack.enter_context(self.catalog.watching_group(name))
            if session is not None:
                stack.enter_context(self.sessions.open(session))
            while True:
                changed.clear()
                present = self.catalog.watch_message(name)
                if present is None:
                    raise group_not_found(name)
                if present.group.generation > generation:
                    generation = present.group.generation
                    yield present
                await changed.wait()

    async def list(
        self, request: pb.ListGroupsRequest, visible: Callable[[str], bool]
    ) -> pb.ListGroupsResponse:
        """See the proto.

        Args:
            visible: Whether the caller may see a group.
        """
        after = key_of_token(request.page_token)
        self.catalog.check_ready()

        def find(name: str) -> pb.Group | None:
            return self.catalog.message(name) if visible(name) else None

        found = await listed(self.catalog.groups, after, find, request.page_size)
        page = page_of(found, request.page_size)
        return pb.ListGroupsResponse(groups=page.entries, next_page_token=page.next_page_token)

    async def describe(self, request: pb.DescribeGroupRequest) -> pb.DescribeGroupResponse:
        """See the proto."""
        group = await self.group(request.group)
        return pb.DescribeGroupResponse(
            group=self.catalog.message(group.name), refused=self.refused.of_group(group.name)
        )

    async def update(self, request: pb.UpdateGroupRequest) -> pb.UpdateGroupResponse:
        """See the proto."""
        name = check_group(request.group)
        settings = settings_from_pb(request, self.clock.unix_ms())
        self.catalog.check_ready()
        await self.placement.place_if_possible(name)
        outcome = await self.store.update(name, settings)
        await self.catalog.caught_up(groups=outcome.group_revision)
        assert outcome.group is not None
        if outcome.change is not None:
            log.info(
                "group settings group=%s policy=%s owned=%s strategy=%s paused=%s by=%r reason=%r",
                name,
                outcome.group.policy.value,
                outcome.group.owned,
                outcome.group.strategy.value,
                outcome.group.pause is not None,
                request.by,
                request.reason,
            )
        return pb.UpdateGroupResponse(group=group_to_pb(group_to_stored(outcome.group)))

    async def delete(self, request: pb.DeleteGroupRequest) -> pb.DeleteGroupResponse:
        """See the proto."""
        name = check_group(request.group)
        self.catalog.check_ready()
        revision, queue_count = await self.store.delete(name, self.progress_deleter.delete_group)
        await self.catalog.caught_up(groups=revision)
        log.info("group deleted group=%s queues=%d", name, queue_count)
        return pb.DeleteGroupResponse(queue_count=queue_count)

    async def group(self, name: str) -> Group:
        """Return the group, from etcd if the catalog does not have it.

        Raises:
            InvalidName, NotServing, GroupNotFound: see the proto.
        """
        check_group(name)
        self.catalog.check_ready()
        if (group := self.catalog.groups.get(name)) is not None:
            return group
        entry = await self.store.read(name)
        if entry is None:
            raise group_not_found(name)
        await self.catalog.caught_up(groups=entry[1])
        return entry[0]

    async def _renew(self, heartbeat: Heartbeat) -> SubscriptionVerdict | None:
        """Renew the lease if the sender is a member on the group's terms; None if it is not.

        No record is written, so this is the whole cost of most heartbeats.
        """
        recorded = self._recorded(heartbeat)
        if recorded is None or recorded.group.draining or recorded.member.differs:
            return None
        return ACCEPTED if await self.store.renew(recorded.live) else None

    def _check_budget(self, heartbeat: Heartbeat) -> None:
        """Take one change of groups from the budget of the sender's identity.

        A heartbeat that changes nothing takes none, even if it needs the record: while a group is
        draining, and while its members have different subscriptions, each heartbeat does.

        Raises:
            Overloaded: there is none left.
        """
        if not heartbeat.owner or self._recorded(heartbeat) is not None:
            return
        wait_ms = self.budget.wait_ms(heartbeat.owner, self.clock.monotonic_ms())
        if wait_ms:
            limit = self.settings.joins_per_s_max
            raise Overloaded(
                f"the members of this identity change groups more than {limit} times per second",
                remedy="Start fewer processes at once, or raise joins_per_s_max of the nameserver.",
                retry_after_ms=wait_ms,
                facts={"limit": limit},
            )

    def _recorded(self, heartbeat: Heartbeat) -> _Recorded | None:
        """Return what is recorded of a live member that repeats it; None for any other sender."""
        group = self.catalog.groups.get(heartbeat.group)
        live = self.catalog.live.values.get(f"{heartbeat.group}/{heartbeat.client_id}")
        member = group.member(heartbeat.client_id) if group is not None else None
        if group is None or live is None or member is None:
            return None
        recorded = (member.host, member.room, member.subscription_hash)
        requested = hash_of(heartbeat.terms.subscriptions)
        if heartbeat.owner not in (0, member.owner):
            return None  # the record does not know the owner yet
        if recorded != (heartbeat.host, heartbeat.room, requested):
            return None
        if not (heartbeat.is_from(member) and heartbeat.terms.settings_agree(group.terms)):
            return None
        return _Recorded(group, member, live)

    def _check_quota(self, heartbeat: Heartbeat, identity: str) -> None:
        """Return if an identity may join this group, or create it.

        Raises:
            LimitExceeded: the group does not exist, and the quota allows no other one.
        """
        groups = self.catalog.groups
        limit = self.quota_of(identity).groups if heartbeat.owner else None
        if limit is None or heartbeat.group in groups:
            return
        count = sum(1 for group in groups.values() if group.creator == heartbeat.owner)
        if count >= limit:
            raise LimitExceeded(
                f"{identity} has reached its quota groups={limit}",
                remedy="Delete a group, or ask an administrator for a higher quota: "
                "baton quota set IDENTITY --groups.",
                facts={"field": "groups", "limit": limit, "actual": count + 1},
            )

    async def _join(self, heartbeat: Heartbeat) -> SubscriptionVerdict:
        await self._check_topics_exist(heartbeat)
        await self.placement.place_if_possible(heartbeat.group)
        try:
            outcome = await self.store.join(heartbeat)
        except (SubscriptionConflict, ClientIdInUse) as error:
            if isinstance(error, SubscriptionConflict):
                self.events.subscription_refused(heartbeat, error)
            if count := self.refusal_lines.count(heartbeat.group):
                log.warning(
                    "heartbeat refused group=%s count=%d error=%s", heartbeat.group, count, error
                )
            await self.refused.record(heartbeat, error)
            raise
        await self.catalog.caught_up(groups=outcome.group_revision, live=outcome.live_revision)
        assert outcome.verdict is not None
        return outcome.verdict

    async def _check_topics_exist(self, heartbeat: Heartbeat) -> None:
        """Check the topics of a new member or subscription.

        Not those of a present member: it stays when one of its topics is deleted.
        """
        group = self.catalog.groups.get(heartbeat.group)
        member = group.member(heartbeat.client_id) if group is not None else None
        requested = heartbeat.terms.subscriptions
        if member is not None and member.subscription_hash == hash_of(requested):
            return
        for subscription in requested:
            await self.topics.topic(subscription.topic)


def _session(heartbeat: Heartbeat) -> SessionKey:
    return SessionKey(
        heartbeat.group, heartbeat.client_id, heartbeat.incarnation_id, heartbeat.owner
    )
