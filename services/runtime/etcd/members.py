"""The members of etcd: which one is called, and when a call to it is given up.

All calls go to one member until it fails; then it becomes the last choice. A call that may be
repeated goes to the next member after a short time. A call that must not be repeated, and a watch,
wait as long as their member is alive: a life check asks the member, and ends its calls if it does
not answer. A member that is alive and has no leader ends its watches itself.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any, TypeVar

import grpc
import grpc.aio

from batonmq._common import timeouts
from batonmq_server.etcd_api import rpc_pb2 as pb
from batonmq_server.etcd_api import rpc_pb2_grpc as pb_grpc

TRY_S = 0.5
"""Timeout of the first try of a call that may be repeated. Each later try gets twice as long,
because all members may be slow."""
CHECK_INTERVAL_S, CHECK_TIMEOUT_S = 0.4, 0.7
"""Interval and timeout of the life checks of a silent member."""
FRESH_S = 1.0
"""A call that must not be repeated goes to a member that answered within this time."""
_NEXT_MEMBER = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
T = TypeVar("T")


class EtcdMember:
    """One member of etcd, at `address`.

    Attributes:
        answered_s: Loop time of its last answer.
    """

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address, self._channel = address, channel
        self.kv = pb_grpc.KVStub(self._channel)
        self.leases = pb_grpc.LeaseStub(self._channel)
        self.watches = pb_grpc.WatchStub(self._channel)
        self.maintenance = pb_grpc.MaintenanceStub(self._channel)
        self.answered_s = -math.inf
        self._pending: set[asyncio.Timeout] = set()

    @property
    def has_pending_calls(self) -> bool:
        """Whether a call waits for this member."""
        return bool(self._pending)

    @asynccontextmanager
    async def waited_for(self, timeout_s: float | None = None) -> AsyncIterator[None]:
        """Bound a wait for this member by `timeout_s`, if given, and by `give_up`.

        Raises:
            TimeoutError: it took too long, or was given up.
        """
        async with timeouts.timeout(timeout_s) as waiting:
            self._pending.add(waiting)
            try:
                yield
            finally:
                self._pending.discard(waiting)
        self.answered_s = asyncio.get_running_loop().time()

    def give_up(self) -> None:
        """End all pending calls with TimeoutError."""
        now_s = asyncio.get_running_loop().time()
        for waiting in self._pending:
            if not waiting.expired():
                waiting.reschedule(now_s)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


Call = Callable[[EtcdMember], Awaitable[T]]


class EtcdMembers:
    """All members of etcd in the order in which they are called.

    Args:
        addresses: host:port of each member.
        random: Shuffles the order, so that processes start with different members.
        connect: Makes a channel to an address.
    """

    def __init__(
        self, addresses: Sequence[str], random: Random, connect: Callable[[str], grpc.aio.Channel]
    ) -> None:
        self._order = [EtcdMember(address, connect(address)) for address in addresses]
        random.shuffle(self._order)

    @property
    def first(self) -> EtcdMember:
        """The member that is called now."""
        return self._order[0]

    async def call(self, call: Call[T], timeout_s: float, try_s: float = math.inf) -> T:
        """Return the first answer; the call may be carried out more than once.

        Args:
            timeout_s: Timeout of all tries together.
            try_s: Timeout of the first try, if there is another member; later tries get more.

        Raises:
            TimeoutError: no member answered in time.
            AioRpcError: all members failed one after the other, or one rejected the call.
        """
        now_s = asyncio.get_running_loop().time
        end_s, failures = now_s() + timeout_s, 0
        if len(self._order) == 1:
            try_s = math.inf
        while True:
            member, left_s = self.first, end_s - now_s()
            try:
                return await self._call(member, call, min(left_s, try_s))
            except TimeoutError:
                if now_s() >= end_s:
                    raise
                try_s, failures = 2 * try_s, 0
            except grpc.aio.AioRpcError as error:
                failures += 1
                if error.code() not in _NEXT_MEMBER or failures >= len(self._order):
                    raise

    async def call_once(self, call: Call[T], timeout_s: float) -> T:
        """Return the answer of a member that was alive a moment ago; the call is not repeated.

        Raises:
            TimeoutError, AioRpcError: it failed, or the outcome is not known.
        """
        now_s = asyncio.get_running_loop().time()
        if len(self._order) > 1 and now_s - self.first.answered_s > FRESH_S:
            await self.call(_check_alive, timeout_s, TRY_S)
        return await self._call(self.first, call, timeout_s)

    async def run(self) -> None:
        """Give up members that do not respond; run as one task, which ends if there is only one."""
        now_s = asyncio.get_running_loop().time
        while len(self._order) > 1:
            await asyncio.sleep(CHECK_INTERVAL_S)
            async with asyncio.TaskGroup() as tasks:
                for member in self._order:
                    silent = now_s() - member.answered_s > CHECK_INTERVAL_S
                    if member.has_pending_calls and silent:
                        tasks.create_task(self._check(member))

    def demote(self, member: EtcdMember) -> None:
        """Make `member` the last choice."""
        self._order.remove(member)
        self._order.append(member)

    async def close(self) -> None:
        """Close all channels."""
        for member in self._order:
            await member.close()

    async def _check(self, member: EtcdMember) -> None:
        try:
            await self._call(member, _check_alive, CHECK_TIMEOUT_S)
        except (TimeoutError, grpc.aio.AioRpcError):
            member.give_up()

    async def _call(self, member: EtcdMember, call: Call[T], timeout_s: float) -> T:
        try:
            async with member.waited_for(timeout_s):
                return await call(member)
        except TimeoutError:
            self.demote(member)
            raise
        except grpc.aio.AioRpcError as error:
            if error.code() in _NEXT_MEMBER:
                self.demote(member)
            raise


def _check_alive(member: EtcdMember) -> Awaitable[Any]:
    """Ask the member for something that it answers without asking the others."""
    request = pb.RangeRequest(key=b"\0", serializable=True, count_only=True)
    answer: Awaitable[Any] = member.kv.Range(request)
    return answer
