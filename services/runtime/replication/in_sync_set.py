"""Keeps a replica set together for its leader: who falls out, who comes in, what is confirmed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.common.v1 import replicas_pb2
from batonmq._common.clock import Clock
from batonmq.errors import NoQuorum, NotEnoughReplicas, NotLeader
from batonmq_server.runtime.election import Election
from batonmq_server.runtime.replication.in_sync_tracker import InSyncTracker
from batonmq_server.runtime.replication.replica_set import ReplicaSetRecord, ReplicaSetStore

log = logging.getLogger(__name__)

UPDATE_INTERVAL_MS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPolicy:
    """How a replica set keeps together.

    Attributes:
        min_in_sync: With fewer members in sync, the leader included, nothing is changed.
        lag_ms_max: A follower that has not had everything for so long is out of sync.
        hold_ms: How long a follower's question is held if there is nothing new.
    """

    min_in_sync: int
    lag_ms_max: int
    hold_ms: int


@dataclass(frozen=True, slots=True)
class Won:
    """An election, and the set as it has made it."""

    election: Election
    replicas: ReplicaSetStore
    standing: ReplicaSetRecord


class InSyncSet:
    """One leadership's part of a replica set.

    Args:
        position: Of the leader, durably.
        up: Node ids of the members that are registered.

    Attributes:
        members: Node ids of the set, by configuration.
        books: Who has what; whoever changes them calls `looked_at`.
        on_news: Called when the books have changed.
    """

    def __init__(
        self,
        won: Won,
        position: int,
        policy: ReplicaPolicy,
        clock: Clock,
        up: Callable[[], frozenset[str]],
    ) -> None:
        self._won, self._standing, self.members = won, won.standing, won.replicas.members
        self.policy, self._clock, self._up = policy, clock, up
        # One of the set has just died, as a rule; whoever is alive is heard of soon.
        level_ms = clock.monotonic_ms() - policy.lag_ms_max * 2 // 3
        self.books = InSyncTracker(won.standing.leader, won.standing.in_sync, position, level_ms)
        self.on_news: list[Callable[[], None]] = []
        self._problems: dict[str, str] = {}
        self._safe = self._first = 0
        self._news = asyncio.Event()
        self._changing, self._serves = asyncio.Lock(), False
        self._doubtful = False  # whether a change may have been made that is not in the books

    @property
    def epoch(self) -> int:
        """Of this leadership."""
        return self._standing.epoch

    @property
    def served_epoch(self) -> int:
        """The last one in which anything was answered: who has nothing of it must not answer."""
        return self._standing.served_epoch

    def check_room(self) -> None:
        """Refuse a change that could not be answered for now.

        Raises:
            NotEnoughReplicas: too few are in sync.
        """
        count, limit = len(self.books.in_sync), self.policy.min_in_sync
        if count < limit:
            raise NotEnoughReplicas(
                f"{count} replicas are in sync, {limit} have to be",
                retry_after_ms=1_000,
                facts={"in_sync": count, "limit": limit},
            )

    @property
    def safe(self) -> int:
        """The in-sync set, with enough members, has everything up to here. Never falls.

        What the leadership has begun with counts with fewer, too: it is there to be read.
        """
        enough = len(self.books.in_sync) >= self.policy.min_in_sync
        limit = self.books.confirmed if enough else min(self.books.confirmed, self._first)
        self._safe = max(self._safe, limit)
        return self._safe

    def told(self, name: str, problem: str) -> None:
        """Why follower `name` can't follow, by its own account; empty if it can."""
        self._problems[name] = problem

    def successors(self) -> frozenset[str]:
        """Members in sync, and up, that have been heard of and say that they can follow."""
        able = {name for name, problem in self._problems.items() if not problem}
        return (self.books.in_sync & self._up() & able) - {self.books.me}

    def looked_at(self) -> None:
        """The books have changed."""
        for call in self.on_news:
            call()
        self._news.set()

    def replicas(self) -> list[replicas_pb2.Replica]:
        """Every member, and whoever else follows, by node id."""
        books, now_ms = self.books, self._clock.monotonic_ms()
        leader = replicas_pb2.Replica(
            node_id=books.me, leader=True, in_sync=True, position=books.position
        )
        followers = [
            replicas_pb2.Replica(
                node_id=name,
                in_sync=name in books.in_sync,
                position=books.position - books.lag(name),
                lag=books.lag(name),
                lag_ms=books.lag_ms(name, now_ms) if books.lag(name) else 0,
                problem=self._problems.get(name, ""),
            )
            for name in books.followers
        ]
        silent = self.members - {books.me, *books.followers}
        followers += [
            replicas_pb2.Replica(node_id=name, lag=books.position, lag_ms=-1) for name in silent
        ]
        return sorted([leader, *followers], key=lambda replica: replica.node_id)

    async def begun(self, position: int) -> None:
        """Return when the in-sync set, however small, has what this leader begins with.

        Args:
            position: Everything up to here.
        """
        self._first = position
        await self.confirmed(position)

    async def confirmed(self, position: int) -> None:
        """Return when the in-sync set, with enough members, has everything up to `position`."""
        while self.safe < position:
            news = self._news = asyncio.Event() if self._news.is_set() else self._news
            await news.wait()

    async def serve(self) -> None:
        """Let etcd know that something is answered in this epoch: who lacks it is not elected.

        As long as etcd does not take it, it is tried again: the election tells when it is over.
        """
        self._serves = True
        while self._standing.served_epoch < self.epoch:
            try:
                async with self._changing:
                    await self._change(self.books.in_sync | self.books.joining)
            except (NoQuorum, NotLeader) as error:
                log.warning("the new leader waits for etcd error=%s", error)
                await asyncio.sleep(UPDATE_INTERVAL_MS / 1000)

    async def tend(self) -> None:
        """Let members out and in for ever; to be run as one task, while this is the leader.

        Who keeps up from outside is waited for, until it has what is confirmed and can join; who
        falls out is waited for until etcd knows that it can't be elected.
        """
        while True:
            await asyncio.sleep(UPDATE_INTERVAL_MS / 1000)
            try:
                async with self._changing:
                    await self._tend_once()
            except (NoQuorum, NotLeader) as error:
                log.warning("in-sync set not changed epoch=%d error=%s", self.epoch, error)

    async def _tend_once(self) -> None:
        books = self.books
        now_ms, lag_ms_max = self._clock.monotonic_ms(), self.policy.lag_ms_max
        up = self._up()
        leave = books.late(now_ms, lag_ms_max) | (books.in_sync - up - {books.me})
        books.wait_for(up, now_ms, lag_ms_max)
        enter = books.level()
        wanted = (books.in_sync | enter) - leave
        if wanted == books.in_sync and not books.joining and not self._doubtful:
            return
        books.join(enter)
        await self._change(wanted)
        log.info(
            "in-sync set epoch=%d in_sync=%s left=%s",
            self.epoch,
            ",".join(sorted(books.in_sync)),
            ",".join(sorted(leave)) or "-",
        )

    async def _change(self, in_sync: frozenset[str]) -> None:
        """Only one at a time, from the decision on: who joins meanwhile would be forgotten."""
        served_epoch = self.epoch if self._serves else self._standing.served_epoch
        wanted = replace(self._standing, in_sync=in_sync, served_epoch=served_epoch)
        self._doubtful = True
        self._standing = await self._won.replicas.change(self._won.election, self._standing, wanted)
        self._doubtful = False
        self.books.settled(self._standing.in_sync)
        self.looked_at()
