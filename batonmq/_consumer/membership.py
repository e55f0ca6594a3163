"""Keeps a client a member of its group: sends heartbeats and follows the group's record."""

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
from batonmq.errors import BatonError, ClientIdInUse, Difference, Retry, Unreachable

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
    """The decision of the group's policy on a member's subscription (protocol section 14).

    Attributes:
        kind: `accepted`: it is the group's subscription. `staged`: it becomes the group's next one,
            and no queue is assigned to the member until then. `replaced`: it is the group's now,
            though other members requested another one. `overruled`: another member replaced it,
            and this member gets the messages of that subscription.
        differences: The differences from the group's subscription.
    """

    kind: VerdictKind = "accepted"
    differences: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        """Return kind and differences in one line."""
        listed = "; ".join(
            f"{d.topic or d.setting}: {d.newcomer_client_id} requests {d.newcomer_value!r}, "
            f"{d.member_client_id} has {d.member_value!r}"
            for d in self.differences
        )
        return f"{self.kind}: {listed}" if listed else self.kind


class Membership:
    """Keeps one client in its group.

    Args:
        heartbeat: The request, which is sent unchanged each time.
        on_view: Called each time a newer generation of the group's record arrives.

    Attributes:
        verdict: The decision on the subscription, from the last heartbeat.
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
        """Repeat a heartbeat until it is answered.

        Args:
            timeout_ms: How long to try; None for no limit.

        With a time limit, this member begins, and an earlier process with its client id may have
        died a moment ago. The heartbeat is then repeated until that process is no member any more.

        Raises:
            SubscriptionConflict, TopicNotFound, InvalidName: the nameserver refused, and a
                repetition would not help.
            BadExpression: as `run_watch`.
            ClientIdInUse: another process has the client id, for the whole time if it is limited.
            Unreachable, NoQuorum: no nameserver served it in time.
        """
        clock, failures, waited = self._session.clock, 0, False
        deadline_ms = None if timeout_ms is None else clock.monotonic_ms() + timeout_ms
        while True:
            try:
                return await self._beat()
            except BatonError as error:
                late = deadline_ms is not None and clock.monotonic_ms() >= deadline_ms
                waits = isinstance(error, ClientIdInUse) and timeout_ms is not None
                if late or (error.retry is Retry.NEVER and not waits):
                    raise
                if waits and not waited:
                    waited = True
                    log.warning(
                        "client id is in use, waiting for the end of its session timeout_ms=%s "
                        "error=%s",
                        timeout_ms,
                        error,
                    )
                log.debug("heartbeat is repeated error=%s", error)
                await self._session.directory.pause(error, failures)
                failures += 1

    async def run_heartbeats(self) -> None:
        """Send heartbeats until `leave`.

        Raises:
            SubscriptionConflict, ClientIdInUse: the group does not accept this member any more.
            TopicNotFound: a topic was deleted.
            BadExpression: as `run_watch`.
        """
        soon = self._session.heartbeat_soon
        while not self._left:
            await wait_until(soon, self._interval_ms)
            soon.clear()
            if not self._left:
                await self.join()

    async def run_watch(self) -> None:
        """Follow the group's record until cancelled; the stream is also this member's session.

        When the stream breaks, a heartbeat is sent at once, before the nameserver removes the
        member, and the stream is reopened. After `leave` it is not.

        Raises:
            BadExpression: this version of the library can't read the group's subscription.
        """
        session, failures = self._session, 0
        request = pb.WatchGroupRequest(group=session.group, incarnation=session.incarnation)
        while not self._left:
            error: BatonError = Unreachable("the nameserver ended the WatchGroup stream")
            try:
                async for answer in session.directory.nameserver().WatchGroup(request):
                    failures = 0
                    self._apply(answer.group)
            except grpc.aio.AioRpcError as failure:
                error = from_rpc_error(failure)
                session.directory.next_nameserver()
            log.debug("group watch reopens error=%s", error)
            session.heartbeat_soon.set()
            await session.directory.pause(error, failures)
            failures += 1

    async def leave(self) -> None:
        """Leave the group. If no nameserver answers, the membership expires.

        No heartbeat is under way then, and none follows, as it would join the group again. A second
        caller waits for the call of the first.
        """
        if self._left:
            async with self._calling:
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
        self._note_verdict(answer)
        self._apply(answer.group)

    def _note_verdict(self, answer: pb.HeartbeatResponse) -> None:
        kind = _KINDS.get(answer.verdict, "accepted")
        verdict = SubscriptionVerdict(kind, differences_from_pb(answer.differences))
        if verdict != self.verdict:
            level = logging.INFO if kind == "accepted" else logging.WARNING
            log.log(level, "subscription of group %s is %s", self._session.group, verdict)
        self.verdict = verdict

    def _apply(self, group: pb.Group) -> None:
        session = self._session
        if group.generation <= session.view.generation:
            return
        before, own = session.view, self._heartbeat.subscriptions
        session.view = GroupView.of(group, session.incarnation, own)
        changed = session.view.subscription_generation != before.subscription_generation
        if (changed and before.member) or not session.view.member:
            session.heartbeat_soon.set()  # to get a new verdict, or to join again
        if session.view.paused and not before.paused:
            log.warning("group %s is paused by %s: %s", session.group, *session.view.paused)
        elif before.paused and not session.view.paused:
            log.warning("group %s is not paused any more", session.group)
        self._on_view()
