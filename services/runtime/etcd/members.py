"""Which member of etcd is asked, and when it is given up: one that stands still refuses nothing.

All goes to one member until it fails; then it is the last to be asked again. What may be carried
out twice is asked elsewhere after a short while. What may not, and watches, wait as long as their
member lives: a look-out asks it, and ends what waits for one that does not say so. A member that
lives and has lost the others ends its watches itself.
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
from aetcd import rpc

TRY_S = 0.5
"""A question that may be asked twice is asked elsewhere after so long, the next time after twice as
long: it may be that all of them are slow."""
LOOK_INTERVAL_S, LOOK_TIMEOUT_S = 0.4, 0.7
"""How often a silent member is asked whether it lives, and how long it may take to say so."""
FRESH_S = 1.0
"""A member that has been heard of so lately may be told what can't be told twice."""
_ELSEWHERE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
T = TypeVar("T")


class EtcdMember:
    """One member of etcd, at `address`."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address, self._channel = address, channel
        self.kv = rpc.KVStub(self._channel)
        self.leases = rpc.LeaseStub(self._channel)
        self.watches = rpc.WatchStub(self._channel)
        self.heard_s = -math.inf
        """When it answered last, by the time of the loop."""
        self._waiting: set[asyncio.Timeout] = set()

    @property
    def owes(self) -> bool:
        """Whether somebody waits for it."""
        return bool(self._waiting)

    @asynccontextmanager
    async def waited_for(self, timeout_s: float | None = None) -> AsyncIterator[None]:
        """Wait for the member inside, so long at most.

        Raises:
            TimeoutError: it took too long, or was given up.
        """
        async with asyncio.timeout(timeout_s) as waiting:
            self._waiting.add(waiting)
            try:
                yield
            finally:
                self._waiting.discard(waiting)
        self.heard_s = asyncio.get_running_loop().time()

    def give_up(self) -> None:
        """Let nobody wait for it any longer."""
        now_s = asyncio.get_running_loop().time()
        for waiting in self._waiting:
            if not waiting.expired():
                waiting.reschedule(now_s)

    async def close(self) -> None:
        """End the connection."""
        await self._channel.close()


Question = Callable[[EtcdMember], Awaitable[T]]


class EtcdMembers:
    """All members, the one that is asked first.

    Args:
        addresses: host:port each.
        random: So that not all processes begin with the same one.
        connect: Makes a channel to an address.
    """

    def __init__(
        self, addresses: Sequence[str], random: Random, connect: Callable[[str], grpc.aio.Channel]
    ) -> None:
        self._order = [EtcdMember(address, connect(address)) for address in addresses]
        random.shuffle(self._order)

    @property
    def first(self) -> EtcdMember:
        """Who is asked now."""
        return self._order[0]

    async def ask(self, question: Question[T], timeout_s: float, try_s: float = math.inf) -> T:
        """The first answer; what is asked may be carried out more than once.

        Args:
            timeout_s: Bound of all tries.
            try_s: Of the first, if there is another member to be asked; later ones get more.

        Raises:
            TimeoutError: nobody answered.
            AioRpcError: all have refused, one after the other, or one for a reason that is no
                trouble of its own.
        """
        now_s = asyncio.get_running_loop().time
        end_s, refused = now_s() + timeout_s, 0
        if len(self._order) == 1:
            try_s = math.inf
        while True:
            member, left_s = self.first, end_s - now_s()
            try:
                return await self._ask(member, question, min(left_s, try_s))
            except TimeoutError:
                if now_s() >= end_s:
                    raise
                try_s, refused = 2 * try_s, 0
            except grpc.aio.AioRpcError as error:
                refused += 1
                if error.code() not in _ELSEWHERE or refused >= len(self._order):
                    raise

    async def ask_once(self, question: Question[T], timeout_s: float) -> T:
        """The answer of a member that lived a moment ago.

        Raises:
            TimeoutError, AioRpcError: not known whether it was carried out, or refused.
        """
        now_s = asyncio.get_running_loop().time()
        if len(self._order) > 1 and now_s - self.first.heard_s > FRESH_S:
            await self.ask(_is_there, timeout_s, TRY_S)
        return await self._ask(self.first, question, timeout_s)

    async def run(self) -> None:
        """Give up members that stand still; to be run as one task, which ends if there is one."""
        now_s = asyncio.get_running_loop().time
        while len(self._order) > 1:
            await asyncio.sleep(LOOK_INTERVAL_S)
            async with asyncio.TaskGroup() as tasks:
                for member in self._order:
                    if member.owes and now_s() - member.heard_s > LOOK_INTERVAL_S:
                        tasks.create_task(self._look_at(member))

    def later(self, member: EtcdMember) -> None:
        """Ask it again after all others."""
        self._order.remove(member)
        self._order.append(member)

    async def close(self) -> None:
        """End all connections."""
        for member in self._order:
            await member.close()

    async def _look_at(self, member: EtcdMember) -> None:
        try:
            await self._ask(member, _is_there, LOOK_TIMEOUT_S)
        except (TimeoutError, grpc.aio.AioRpcError):
            member.give_up()

    async def _ask(self, member: EtcdMember, question: Question[T], timeout_s: float) -> T:
        try:
            async with member.waited_for(timeout_s):
                return await question(member)
        except TimeoutError:
            self.later(member)
            raise
        except grpc.aio.AioRpcError as error:
            if error.code() in _ELSEWHERE:
                self.later(member)
            raise


def _is_there(member: EtcdMember) -> Awaitable[Any]:
    """Nothing but a life sign: what the member has itself, without asking the others."""
    request = rpc.RangeRequest(key=b"\0", serializable=True, count_only=True)
    answer: Awaitable[Any] = member.kv.Range(request)
    return answer
