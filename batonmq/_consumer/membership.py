"""Being a member of a group: heartbeats out, the group's record in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import grpc.aio

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common.aio import wait_until
from batonmq._common.rpc import differences_from_pb, from_rpc_error
from batonmq._connection.directory import CALL_TIMEOUT_S
from batonmq._consumer.group_view import GroupView
from batonmq._consumer.session import Session
from batonmq.errors import BatonError, Difference, Retry, Unreachable

log = logging.getLogger(__name__)

VerdictKind = Literal["accepted", "staged", "replaced", "overruled"]

_KINDS: Mapping[pb.SubscriptionVerdict.ValueType, VerdictKind] = {
    pb.SUBSCRIPTION_VERDICT_ACCEPTED: "accepted",
    pb.SUBSCRIPTION_VERDICT_STAGED: "staged",
    pb.SUBSCRIPTION_VERDICT_REPLACED: "replaced",
    pb.SUBSCRIPTION_VERDICT_OVERRULED: "overruled",
}


@dataclass(frozen=True, slots=True)
class SubscriptionVerdict:
    """What the group's policy says of a member's subscription (protocol section 14).

    Attributes:
        kind: `accepted`: it is the group's. `staged`: it is to be the group's next one, and the
            member has no queues until then. `replaced`: it is the group's now, against the will
            of other members. `overruled`: another member has replaced it, and this one gets what
            that one asked for.
        differences: On what it differs from the group's.
    """

    kind: VerdictKind = "accepted"
    differences: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        """All of it in a line."""
        told = "; ".join(
            f"{d.topic or d.setting}: {d.newcomer_client_id} asks for {d.newcomer_value!r}, "
            f"{d.member_client_id} has {d.member_value!r}"
            for d in self.differences
        )
        return f"{self.kind}: {told}" if told else self.kind


class Membership:
    """Keeps one client in its group.

    Args:
        heartbeat: Sent as it is, again and again.
        on_view: Called each time a newer generation of the group is seen.

    Attributes:
        verdict: On the subscription, by the last heartbeat.
    """

    def __init__(
        self, session: Session, heartbeat: pb.HeartbeatRequest, on_view: Callable[[], None]
    ) -> None:
        self._session, self._heartbeat, self._on_view = session, heartbeat, on_view
        self._interval_ms = 10_000
        self._calling = asyncio.Lock()
        self._left = False
        self.verdict = SubscriptionVerdict()

    async def join(self, timeout_ms: int | None = None) -> None:
        """Send a heartbeat until it is answered.

        Args:
            timeout_ms: Give up after this time; None tries for ever.

        Raises:
            SubscriptionConflict, ClientIdInUse, TopicNotFound, InvalidName: refused for good.
            Unreachable: nobody answered in time.
        """
        clock, failures = self._session.clock, 0
        deadline_ms = None if timeout_ms is None else clock.monotonic_ms() + timeout_ms
        while True:
            try:
                return await self._beat()
            except BatonError as error:
                late = deadline_ms is not None and clock.monotonic_ms() > deadline_ms
                if error.retry is Retry.NEVER or late:
                    raise
                log.debug("heartbeat is repeated error=%s", error)
                await self._session.directory.pause(error, failures)
                failures += 1

    async def run_heartbeats(self) -> None:
        """Stay a member until `leave`.

        Raises:
            SubscriptionConflict, ClientIdInUse: the group does not take us back.
            TopicNotFound: a topic is gone.
        """
        soon = self._session.heartbeat_soon
        while not self._left:
            await wait_until(soon, self._interval_ms)
            soon.clear()
            if not self._left:
                await self.join()

    async def run_watch(self) -> None:
        """Follow the group for ever: the stream is the session of this member.

        When it breaks a heartbeat goes out at once, before the session's grace is over, and the
        stream is reopened.
        """
        session, failures = self._session, 0
        request = pb.WatchGroupRequest(group=session.group, incarnation=session.incarnation)
        while True:
            error: BatonError = Unreachable("the watch ended")
            try:
                async for answer in session.directory.nameserver().WatchGroup(request):
                    failures = 0
                    self._see(answer.group)
            except grpc.aio.AioRpcError as failure:
                error = from_rpc_error(failure)
                session.directory.next_nameserver()
            log.debug("group watch reopens error=%s", error)
            session.heartbeat_soon.set()
            await session.directory.pause(error, failures)
            failures += 1

    async def leave(self) -> None:
        """Tell the nameserver that we go; if it is away it finds out by itself.

        No heartbeat is under way then, and none follows: it would join the group again.
        """
        if self._left:
            return
        self._left = True
        session = self._session
        request = pb.LeaveRequest(group=session.group, incarnation=session.incarnation)
        try:
            async with self._calling:
                await session.directory.nameserver().Leave(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.warning("leave not confirmed error=%s", from_rpc_error(error))

    async def _beat(self) -> None:
        directory = self._session.directory
        try:
            async with self._calling:
                if self._left:
                    return
                answer = await directory.nameserver().Heartbeat(
                    self._heartbeat, timeout=CALL_TIMEOUT_S
                )
        except grpc.aio.AioRpcError as error:
            directory.next_nameserver()
            raise from_rpc_error(error) from error
        self._interval_ms = answer.interval_ms or self._interval_ms
        self._judge(answer)
        self._see(answer.group)

    def _judge(self, answer: pb.HeartbeatResponse) -> None:
        kind = _KINDS.get(answer.verdict, "accepted")
        verdict = SubscriptionVerdict(kind, differences_from_pb(answer.differences))
        if verdict != self.verdict:
            level = logging.INFO if kind == "accepted" else logging.WARNING
            log.log(level, "subscription of group %s is %s", self._session.group, verdict)
        self.verdict = verdict

    def _see(self, group: pb.Group) -> None:
        session = self._session
        if group.generation <= session.view.generation:
            return
        before, own = session.view, self._heartbeat.subscriptions
        session.view = GroupView.of(group, session.incarnation, own)
        changed = session.view.subscription_generation != before.subscription_generation
        if (changed and before.member) or not session.view.member:
            session.heartbeat_soon.set()  # for another verdict, or to be a member again
        if session.view.paused and not before.paused:
            log.warning("group %s is paused by %s: %s", session.group, *session.view.paused)
        elif before.paused and not session.view.paused:
            log.warning("group %s goes on, no longer paused", session.group)
        self._on_view()
