"""Being a member of a group: heartbeats out, generations in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc.aio
from baton.nameserver.v1 import nameserver_service_pb2 as pb

from batonmq.common.aio import wait_until
from batonmq.common.errors import BatonError, Retry, Unreachable
from batonmq.common.rpc import from_rpc_error
from batonmq.consuming.session import Session
from batonmq.directory import CALL_TIMEOUT_S

log = logging.getLogger(__name__)


class Membership:
    """Keeps one client in its group.

    Args:
        heartbeat: Sent as it is, again and again.
        on_group: Called with the group each time a newer generation of it is seen.
    """

    def __init__(
        self,
        session: Session,
        heartbeat: pb.HeartbeatRequest,
        on_group: Callable[[pb.Group], None],
    ) -> None:
        self._session, self._heartbeat, self._on_group = session, heartbeat, on_group
        self._interval_ms = 10_000
        self._rejoin = asyncio.Event()
        self._calling = asyncio.Lock()
        self._left = False

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
        """
        while not self._left:
            await wait_until(self._rejoin, self._interval_ms)
            self._rejoin.clear()
            if not self._left:
                await self.join()

    async def run_watch(self) -> None:
        """Follow the group for ever; a lost stream is reopened."""
        directory, failures = self._session.directory, 0
        while True:
            error: BatonError = Unreachable("the watch ended")
            try:
                request = pb.WatchGroupRequest(group=self._session.group)
                async for answer in directory.nameserver().WatchGroup(request):
                    failures = 0
                    self._see(answer.group)
            except grpc.aio.AioRpcError as failure:
                error = from_rpc_error(failure)
                directory.next_nameserver()
            log.debug("group watch reopens error=%s", error)
            await directory.pause(error, failures)
            failures += 1

    async def leave(self) -> None:
        """Tell the nameserver that we go; if it is away it finds out by itself.

        No heartbeat is under way then, and none follows: it would join the group again.
        """
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
        self._see(answer.group)

    def _see(self, group: pb.Group) -> None:
        if group.generation <= self._session.generation:
            return
        self._session.generation = group.generation
        mine = self._session.incarnation
        if not self._left and all(member.incarnation != mine for member in group.members):
            self._rejoin.set()
        self._on_group(group)
