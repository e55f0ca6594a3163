"""The in-sync set of one leadership: the leader changes it in etcd and waits for it to confirm."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.common.v1 import replicas_pb2
from batonmq._common.clock import Clock
from batonmq.errors import NoQuorum, NotEnoughReplicas, NotLeader
from batonmq_server.runtime.replication.in_sync_tracker import InSyncTracker
from batonmq_server.runtime.replication.replica_set import ReplicaSetRecord, ReplicaSetStore

log = logging.getLogger(__name__)

UPDATE_INTERVAL_MS = 100
FIRST_CONTACT_MS = 10_000
"""Time after an election until which a follower is not counted as cut off, if it has not contacted
the new leader: its call to the previous leader may have to time out first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPolicy:
    """Settings of a replica set's in-sync set.

    Attributes:
        min_in_sync: Writes are rejected while fewer replicas keep up, the leader included. The
            in-sync set never shrinks below this number.
        lag_ms_max: A follower that has lacked something for longer leaves the in-sync set.
        hold_ms: How long the leader holds a follower's request while there is nothing new.
    """

    min_in_sync: int
    lag_ms_max: int
    hold_ms: int


class InSyncSet:
    """The in-sync set, from the election of a leader to the end of its leadership.

    Args:
        record: The replica set in etcd, as the election has written it.
        position: Durable position of the leader.
        registered: Returns the node ids of the set that are registered.

    Attributes:
        node_ids: Node ids of the replica set, by configuration.
        tracker: Positions of the replicas; callers that change it call `tracker_changed`.
        on_change: Called when the tracker has changed.
        resigns_from_ms: From this time on the leader resigns if it is cut off; see `cut_off`.
    """

    def __init__(
        self,
        store: ReplicaSetStore,
        record: ReplicaSetRecord,
        position: int,
        policy: ReplicaPolicy,
        clock: Clock,
        registered: Callable[[], frozenset[str]],
    ) -> None:
        self._store, self._record, self.node_ids = store, record, store.node_ids
        self.policy, self._clock, self._registered = policy, clock, registered
        # As a rule one replica of the set has just died; those that live will report soon.
        self._begin_ms = clock.monotonic_ms()
        level_ms = self._begin_ms - policy.lag_ms_max * 2 // 3
        self.tracker = InSyncTracker(record.leader, record.in_sync, position, level_ms)
        self._late: frozenset[str] = frozenset()
        self.resigns_from_ms = 0
        self.on_change: list[Callable[[], None]] = []
        self._problems: dict[str, str] = {}
        self._safe = self._first = 0
        self._changed = asyncio.Event()
        self._changing, self._serves = asyncio.Lock(), False
        self._uncertain = False  # etcd may have made a change that the tracker does not have

    @property
    def epoch(self) -> int:
        """Epoch of this leadership."""
        return self._record.epoch

    @property
    def served_epoch(self) -> int:
        """Last epoch in which a leader served; a replica without anything of it must not lead."""
        return self._record.served_epoch

    @property
    def current(self) -> frozenset[str]:
        """Members of the in-sync set that keep up, the leader included.

        The other members lag or are absent, and stay because the set would be too small without
        them: they have everything confirmed, so they may be elected.
        """
        return self.tracker.in_sync - self._late

    def check_size(self) -> None:
        """Return if enough replicas are in sync for a write.

        Raises:
            NotEnoughReplicas: fewer than `min_in_sync` keep up.
        """
        count, limit = len(self.current), self.policy.min_in_sync
        if count < limit:
            raise NotEnoughReplicas(
                f"{count} replicas are in sync; writes need {limit}",
                retry_after_ms=1_000,
                facts={"in_sync": count, "limit": limit},
            )

    @property
    def safe(self) -> int:
        """Position that clients may rely on: confirmed by at least `min_in_sync` replicas.

        Never goes back. What the leader had at the start of its epoch is safe with fewer replicas
        too, so that it can be read.
        """
        enough = len(self.tracker.in_sync) >= self.policy.min_in_sync
        limit = self.tracker.confirmed if enough else min(self.tracker.confirmed, self._first)
        self._safe = max(self._safe, limit)
        return self._safe

    def set_problem(self, name: str, problem: str) -> None:
        """Record why follower `name` says it can't follow; empty if it can."""
        self._problems[name] = problem

    def successors(self) -> frozenset[str]:
        """Return the followers that could lead: in sync, registered, and reporting no problem."""
        able = {name for name, problem in self._problems.items() if not problem}
        return (self.current & self._registered() & able) - {self.tracker.leader}

    def cut_off(self) -> dict[str, int]:
        """Return how long, in ms, each cut-off follower was silent; empty if they are a minority.

        A follower is cut off if it is registered, reports no problem, and no answer of the leader
        has reached it for `lag_ms_max`. If a majority of the replica set is cut off, and one of
        them can be elected, the leader had better resign.
        """
        now_ms = self._clock.monotonic_ms()
        if now_ms < self.resigns_from_ms:
            return {}
        silences_ms = {}
        for name in sorted(self._registered() - {self.tracker.leader}):
            silence_ms, limit_ms = self.tracker.silence_ms(name, now_ms), self.policy.lag_ms_max
            if silence_ms is None or name not in self._problems:
                silence_ms, limit_ms = now_ms - self._begin_ms, FIRST_CONTACT_MS
            if silence_ms > limit_ms and not self._problems.get(name):
                silences_ms[name] = silence_ms
        majority = len(self.node_ids) // 2 + 1
        return (
            silences_ms
            if len(silences_ms) >= majority and silences_ms.keys() & self.tracker.in_sync
            else {}
        )

    def tracker_changed(self) -> None:
        """Wake everything that waits for the tracker."""
        for call in self.on_change:
            call()
        self._changed.set()

    def replicas(self) -> list[replicas_pb2.Replica]:
        """Return the state of each replica of the set and of each other follower, by node id."""
        tracker, now_ms = self.tracker, self._clock.monotonic_ms()
        leader = replicas_pb2.Replica(
            node_id=tracker.leader, leader=True, in_sync=True, position=tracker.position
        )
        followers = [
            replicas_pb2.Replica(
                node_id=name,
                in_sync=name in self.current,
                position=tracker.position - tracker.lag(name),
                lag=tracker.lag(name),
                lag_ms=tracker.lag_ms(name, now_ms) if tracker.lag(name) else 0,
                problem=self._problems.get(name, ""),
            )
            for name in tracker.followers
        ]
        silent = self.node_ids - {tracker.leader, *tracker.followers}
        followers += [
            replicas_pb2.Replica(node_id=name, lag=tracker.position, lag_ms=-1) for name in silent
        ]
        return sorted([leader, *followers], key=lambda replica: replica.node_id)

    async def begun(self, position: int) -> None:
        """Return once the in-sync set, however small, has what this leader begins with.

        Args:
            position: The leader begins with everything up to here.
        """
        self._first = position
        await self.confirmed(position)

    async def confirmed(self, position: int) -> None:
        """Return once everything up to `position` is safe."""
        while self.safe < position:
            changed = self._changed = asyncio.Event() if self._changed.is_set() else self._changed
            await changed.wait()

    async def record_serving(self) -> None:
        """Write to etcd that this epoch serves: replicas without the epoch can't be elected.

        Tries again until etcd takes it; the election ends the leadership if it is lost.
        """
        self._serves = True
        while self._record.served_epoch < self.epoch:
            try:
                async with self._changing:
                    await self._change(self.tracker.in_sync | self.tracker.joining)
            except (NoQuorum, NotLeader) as error:
                log.warning("the new leader waits for etcd error=%s", error)
                await asyncio.sleep(UPDATE_INTERVAL_MS / 1000)

    async def run(self) -> None:
        """Let followers leave and join the set until cancelled; run as one task of the leader.

        A follower that keeps up from outside is waited for until it has everything confirmed and
        can join. A follower that leaves is waited for until etcd has the change and so can't
        elect it.
        """
        while True:
            await asyncio.sleep(UPDATE_INTERVAL_MS / 1000)
            try:
                async with self._changing:
                    await self._update()
            except (NoQuorum, NotLeader) as error:
                log.warning("in-sync set not changed epoch=%d error=%s", self.epoch, error)

    async def _update(self) -> None:
        tracker = self.tracker
        now_ms, lag_ms_max = self._clock.monotonic_ms(), self.policy.lag_ms_max
        registered = self._registered()
        absent = tracker.in_sync - registered - {tracker.leader}
        late = self._late = tracker.late(now_ms, lag_ms_max) | absent
        tracker.await_joiners(registered, now_ms, lag_ms_max)
        joining = tracker.ready_to_join()
        leaving = self._leaving(late, tracker.in_sync | joining)
        wanted = (tracker.in_sync | joining) - leaving
        if wanted == tracker.in_sync and not tracker.joining and not self._uncertain:
            return
        tracker.start_joining(joining)
        await self._change(wanted)
        log.info(
            "in-sync set epoch=%d in_sync=%s left=%s",
            self.epoch,
            ",".join(sorted(tracker.in_sync)),
            ",".join(sorted(leaving)) or "-",
        )

    def _leaving(self, late: frozenset[str], members: frozenset[str]) -> frozenset[str]:
        """Return those late members that may leave: all of them, or none.

        None leaves if fewer than `min_in_sync` would remain. Then nothing is confirmed, each member
        has everything that was, and each can be elected. Source: Kafka's eligible leader replicas
        (KIP-966), where a partition keeps as many electable replicas as a write needs. None leaves
        either while the leader is cut off from the majority, because one of them is its successor.
        """
        if len(members - late) < self.policy.min_in_sync or self.cut_off():
            return frozenset()
        return late

    async def _change(self, in_sync: frozenset[str]) -> None:
        """Write the set to etcd; callers hold `_changing` from their decision on.

        Otherwise a follower that joins in between would be dropped from the tracker.
        """
        served_epoch = self.epoch if self._serves else self._record.served_epoch
        wanted = replace(
            self._record,
            in_sync=in_sync,
            served_epoch=served_epoch,
            min_in_sync=self.policy.min_in_sync,
        )
        self._uncertain = True
        self._record = await self._store.change(self._record, wanted)
        self._uncertain = False
        self.tracker.set_in_sync(self._record.in_sync)
        self.tracker_changed()
