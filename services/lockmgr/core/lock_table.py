"""The lock entries of one leader: leases, observations, waiters, changes in progress.

An entry changes in three steps: `begin_change` marks it, the leader fences and persists, and one of
`end_granted`, `end_freed`, `end_unchanged` and `end_reloaded` ends it. From `begin_change` until
the outcome is known, no lease of the entry is renewed and no other change begins (protocol section
5, stories 6 and 7).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeVar

from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import BatonError, HandoverPending
from batonmq_server.lockmgr.core.decision import Decision, WaitDecision, decide
from batonmq_server.lockmgr.core.defibus_decision import decide_defibus
from batonmq_server.lockmgr.core.lock_entry import (
    DENIALS_MAX,
    ChangeStep,
    DecisionProfile,
    Denial,
    LockEntry,
    LockPolicy,
    LockRecord,
    LockState,
    Observation,
    PendingChange,
    Requester,
    RunningHandler,
    Waiter,
    WantedNotice,
    WantedReason,
)


class HoldState(Enum):
    """The result of a keep-alive for one entry; names as in the contract."""

    OK = "OK"
    WANTED = "WANTED"
    NOT_OWNER = "NOT_OWNER"
    PENDING = "PENDING"
    ORPHAN = "ORPHAN"


class HoldReport(NamedTuple):
    """State of one entry after a keep-alive; `token` is the entry's."""

    key: GroupQueue
    state: HoldState
    token: int
    wanted: WantedNotice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAliveCall:
    """A keep-alive of an owner, with what the leader knows of its groups.

    Attributes:
        acquire_seq: Highest request of which the owner has received the outcomes.
        holds: Every queue that it owns, with the token.
        evicted_groups: Groups of `holds` that it is not a member of.
        draining_groups: Groups of `holds` with a subscription change in progress.
        running: The handler calls that queues of `holds` wait for.
    """

    incarnation: Incarnation
    acquire_seq: int
    holds: Sequence[tuple[GroupQueue, int]]
    evicted_groups: frozenset[str] = frozenset()
    draining_groups: frozenset[str] = frozenset()
    running: Mapping[GroupQueue, RunningHandler] = field(default_factory=dict)


class LockTable:
    """The entries of one term of leadership. It has no clock: every call passes the time."""

    def __init__(self, policy: LockPolicy) -> None:
        self._policy = policy
        self._entries: dict[GroupQueue, LockEntry] = {}
        self._keys: list[GroupQueue] = []  # those of `_entries`, ascending
        self._owned: dict[Incarnation, set[GroupQueue]] = {}
        self._owned_in: dict[str, set[GroupQueue]] = {}
        self._waited: dict[Incarnation, set[GroupQueue]] = {}
        self._transient: dict[GroupQueue, None] = {}
        """Queues with waiters or without a lock in etcd: all that housekeeping has to look at."""

    # Queries

    def get(self, key: GroupQueue) -> LockEntry | None:
        """Return the entry of `key`; the caller must not change it."""
        return self._entries.get(key)

    def entries(
        self, group: str = "", topic: str = "", after: GroupQueue | None = None
    ) -> Iterator[LockEntry]:
        """Yield entries, ascending by key: in etcd, being changed, or waited for.

        The table must not change during the iteration.

        Args:
            group: Only of this group; empty for all.
            topic: Only of this topic; empty for all.
            after: Only entries with a greater key; None for all.
        """
        start = bisect_left(self._keys, (group,))
        if after is not None:
            start = max(start, bisect_right(self._keys, after))
        for index in range(start, len(self._keys)):
            key = self._keys[index]
            if group and key.group != group:
                return
            entry = self._entries[key]
            known = entry.revision or entry.pending is not None or entry.waiters
            if known and topic in ("", key.topic):
                yield entry

    def owned_by(self, incarnation: Incarnation) -> list[GroupQueue]:
        """Return the queues that the incarnation owns, ascending."""
        return sorted(self._keys_of(incarnation))

    def is_granting(self, key: GroupQueue, incarnation: Incarnation) -> bool:
        """Return whether a change is in progress that gives the queue to the incarnation."""
        entry = self._entries.get(key)
        return (
            entry is not None
            and entry.pending is not None
            and incarnation.matches(entry.pending.next_owner)
        )

    def owned_in(self, group: str) -> list[GroupQueue]:
        """Return the queues of the group that have an owner, ascending."""
        return sorted(self._owned_in.get(group, ()))

    def groups_with_owners(self) -> list[str]:
        """Return the groups of which some queue has an owner."""
        return list(self._owned_in)

    def with_owner(self, incarnation: Incarnation) -> Incarnation:
        """Return the incarnation with the same ids that owns queues; itself if none does."""
        return next((one for one in self._owned if one[:2] == incarnation[:2]), incarnation)

    def waited_for_by(self, incarnation: Incarnation) -> list[GroupQueue]:
        """Return the queues that the incarnation was refused and still waits for, ascending."""
        return sorted(self._waited.get(incarnation, ()))

    def waited_for_in(self, group: str) -> list[GroupQueue]:
        """Return the queues of the group that have a waiter, ascending."""
        return sorted({key for keys in self._waited.values() for key in keys if key.group == group})

    def counts(self) -> Counter[LockState]:
        """Return the number of entries in each state."""
        return Counter(entry.state for entry in self.stored())

    def stored(self) -> Iterator[LockEntry]:
        """Yield the entries that etcd has; the table may change during the iteration."""
        return (entry for entry in list(self._entries.values()) if entry.revision)

    # The beginning of a term

    def load(self, key: GroupQueue, lock: LockRecord, revision: int, now_ms: int) -> None:
        """Add an entry of the previous leader; it is pending until `confirm`."""
        entry = self._get_or_add(key)
        entry.lease_start_ms = entry.held_since_ms = now_ms
        self._set_lock(entry, lock, revision)
        entry.pending = PendingChange(ChangeStep.ANNOUNCE)

    def confirm(self, key: GroupQueue, offsets_token: int, now_ms: int) -> None:
        """Put a loaded entry into service; its lease starts now.

        Args:
            offsets_token: Answered by offsets after it has learnt of this term. If it is not the
                owner's, the owner was fenced and must not be renewed (story 12).
        """
        entry = self._end_change(key)
        entry.lease_start_ms = entry.held_since_ms = now_ms
        entry.phantom = entry.lock.owner is not None and entry.lock.token != offsets_token
        entry.offsets_token = offsets_token

    # Observations

    def needs_observation(self, key: GroupQueue, requester: Requester, now_ms: int) -> bool:
        """Return whether the queue must be observed before a decision.

        All requesters of a queue share one observation per slot; except in the profile `defibus`,
        which counts polls. An owner's own request always gets a new one.
        """
        entry = self._entries.get(key)
        if entry is None:
            return True
        if entry.pending is not None:
            return False
        if entry.observation is None or requester.incarnation.matches(entry.lock.owner):
            return True
        if self._policy.profile is DecisionProfile.DEFIBUS:
            return True
        return self.due_ms(key, now_ms) <= 0

    def due_ms(self, key: GroupQueue, now_ms: int) -> int:
        """Return the time until the next observation of `key` counts."""
        entry = self._entries.get(key)
        return 0 if entry is None else entry.observed_ms + self._policy.slot_ms - now_ms

    def begin_observation(self, key: GroupQueue) -> int:
        """Return the version of the entry, to be passed to `end_observation`."""
        return self._get_or_add(key).version

    def end_observation(
        self, key: GroupQueue, observation: Observation, version: int, now_ms: int
    ) -> None:
        """Store what offsets showed; ignored if the entry has another version by now."""
        entry = self._get_or_add(key)
        if entry.version != version or entry.pending is not None:
            return
        before, entry.observation, entry.observed_ms = entry.observation, observation, now_ms
        entry.offsets_token = observation.token
        if entry.lock.owner is not None:
            entry.phantom = observation.token != entry.lock.token
        if before is None or _progress(before) != _progress(observation):
            entry.quiet_slots, entry.slot_start_ms = 0, now_ms
        elif now_ms - entry.slot_start_ms >= self._policy.slot_ms:
            entry.quiet_slots, entry.slot_start_ms = entry.quiet_slots + 1, now_ms

    def observation_failed(self, key: GroupQueue, now_ms: int) -> None:
        """Note a failed observation, so that the next one waits for its slot."""
        self._get_or_add(key).observed_ms = now_ms

    def discard_observation(self, key: GroupQueue) -> None:
        """Forget the last observation, because offsets has contradicted it."""
        self._get_or_add(key).observation = None

    # Decisions

    def decide(self, key: GroupQueue, requester: Requester, now_ms: int) -> Decision | None:
        """Return what is decided about a request; None if the queue must be observed first."""
        entry = self._get_or_add(key)
        if entry.pending is not None:
            error = HandoverPending(
                f"{key} is being handed over",
                retry_after_ms=100,
                facts={"attempt": entry.pending.attempt, "step": entry.pending.step.value},
            )
            return WaitDecision(error)
        if entry.observation is None:
            return None
        if self._policy.profile is DecisionProfile.DEFAULT:
            return decide(entry, requester, entry.observation, now_ms, self._policy)
        decision, entry.poll_count = decide_defibus(
            entry, requester, entry.observation, now_ms, self._policy
        )
        return decision

    def record_denial(
        self, key: GroupQueue, requester: Incarnation, error: BatonError, now_ms: int
    ) -> None:
        """Remember a refusal for `Describe`; ignored for a queue without an entry."""
        entry = self._entries.get(key)
        if entry is None:
            return
        denials = entry.denials
        denials.pop(requester.client_id, None)
        denials[requester.client_id] = Denial(requester.client_id, error, now_ms)
        if len(denials) > DENIALS_MAX:
            del denials[next(iter(denials))]

    # Waiters

    def add_waiter(
        self, key: GroupQueue, requester: Incarnation, now_ms: int, *, held_delta: int = 0
    ) -> bool:
        """Note that the requester was refused for a reason that can clear.

        Args:
            held_delta: 1 when a request starts to be held, -1 when that ends.

        Returns:
            Whether the requester is a new waiter, of which the owner has to be notified.
        """
        entry = self._get_or_add(key)
        waiter = entry.waiters.get(requester)
        new = waiter is None
        if waiter is None:
            if held_delta < 0:
                return False  # granted while it was held
            waiter = entry.waiters[requester] = Waiter(now_ms, now_ms)
            self._transient[key] = None
            self._waited.setdefault(requester, set()).add(key)
        waiter.last_request_ms = now_ms
        waiter.held_count += held_delta
        return new

    def drop_old_waiters(self, now_ms: int) -> None:
        """Drop waiters that have not sent a request lately, and entries without any content."""
        oldest_ms = now_ms - self._policy.waiter_memory_ms
        count = len(self._entries)
        for key in list(self._transient):
            entry = self._entries[key]
            for requester, waiter in list(entry.waiters.items()):
                if not waiter.held_count and waiter.last_request_ms < oldest_ms:
                    self._drop_waiter(entry, requester)
            known = entry.revision or entry.pending or entry.waiters
            if not known and entry.observed_ms < oldest_ms:
                del self._entries[key]
            if key not in self._entries or (entry.revision and not entry.waiters):
                del self._transient[key]
        if len(self._entries) < count:
            self._keys = [key for key in self._keys if key in self._entries]

    # Changes

    def begin_change(
        self, key: GroupQueue, step: ChangeStep, next_owner: Incarnation | None = None
    ) -> PendingChange:
        """Mark the entry: a change begins, and its outcome is not known."""
        entry = self._get_or_add(key)
        assert entry.pending is None, f"{key} is being changed already"
        entry.pending = PendingChange(step, next_owner)
        entry.version += 1
        return entry.pending

    def end_unchanged(self, key: GroupQueue, *, fenced: bool = False) -> None:
        """End a change that has changed nothing in etcd.

        Args:
            fenced: Whether it has fenced the owner at offsets, so that the lock's token is invalid.
        """
        entry = self._end_change(key)
        entry.phantom = entry.phantom or (fenced and entry.lock.owner is not None)

    def end_granted(
        self, key: GroupQueue, lock: LockRecord, revision: int, now_ms: int, *, newly_acquired: bool
    ) -> int:
        """End a change: the lock is in etcd, and the owner's lease starts now.

        Returns:
            Time from the first refusal of the new owner until now, in milliseconds.
        """
        assert lock.owner is not None
        entry = self._end_change(key)
        self._set_lock(entry, lock, revision)
        entry.lease_start_ms = entry.held_since_ms = now_ms
        entry.newly_acquired = newly_acquired
        waiter = self._drop_waiter(entry, lock.owner)
        return 0 if waiter is None else now_ms - waiter.since_ms

    def end_freed(self, key: GroupQueue, lock: LockRecord, revision: int, now_ms: int) -> None:
        """End a change: etcd has the entry as `lock`, without an owner.

        Owners close their token before they release, so this counts as an observation of the queue,
        except in the profile `defibus`, which counts polls. If the token is open, the next fence is
        refused, and the queue is observed.
        """
        assert lock.owner is None
        entry = self._end_change(key)
        self._set_lock(entry, lock, revision)
        if self._policy.profile is DecisionProfile.DEFAULT:
            if entry.observation is None:
                entry.observation = Observation(token=lock.token, closed=True)
            entry.observed_ms = now_ms

    def end_removed(self, key: GroupQueue) -> None:
        """End a change: etcd has no entry any more."""
        self._set_lock(self._end_change(key), LockRecord(), 0)

    def end_reloaded(
        self, key: GroupQueue, lock: LockRecord | None, revision: int, *, fenced: bool
    ) -> None:
        """End a change that etcd rejected, because its entry was not the one of this table.

        Args:
            lock: What etcd has; None if it has no entry.
            fenced: Whether offsets has issued a newer token, so that the lock's is invalid.
        """
        entry = self._end_change(key)
        self._set_lock(entry, lock or LockRecord(), revision)
        entry.phantom, entry.observation = fenced and entry.lock.owner is not None, None

    # Leases

    def renew_lease(self, key: GroupQueue, now_ms: int) -> None:
        """Start the owner's lease anew, after its grant was repeated to it."""
        self._entries[key].lease_start_ms = now_ms

    def keep_alive(self, call: KeepAliveCall, now_ms: int) -> list[HoldReport]:
        """Renew the leases of the holds that match their entries.

        Returns:
            One report per hold, in order, then one per entry that the owner did not list.
        """
        reports = [self._renew(call, key, token, now_ms) for key, token in call.holds]
        unlisted = self._keys_of(call.incarnation) - {key for key, _ in call.holds}
        for key in sorted(unlisted):
            entry = self._entries[key]
            # An outcome that the owner has not received yet is in flight to it: no orphan.
            if entry.lock.acquire_seq <= call.acquire_seq and entry.pending is None:
                reports.append(HoldReport(key, HoldState.ORPHAN, entry.lock.token))
        return reports

    def owns(self, key: GroupQueue, incarnation: Incarnation, token: int) -> bool:
        """Return whether the incarnation owns the queue by this token."""
        entry = self._entries.get(key)
        if entry is None or entry.lock.token != token:
            return False
        return incarnation.matches(entry.lock.owner)

    def wanted_notice(
        self, key: GroupQueue, *, evicted: bool, draining: bool
    ) -> WantedNotice | None:
        """Return why the owner of `key` should release it, if it should; it counts as notified.

        Args:
            evicted: Whether the owner is not a member of the group any more.
            draining: Whether the subscription of the group is being changed.
        """
        entry = self._entries[key]
        if not (evicted or draining or entry.waiters):
            return None
        waiter = next(
            (waiter for waiter in entry.waiters if not waiter.matches(entry.lock.owner)), None
        )
        by = waiter.client_id if waiter else ""
        if evicted:
            notice = WantedNotice(WantedReason.NOT_MEMBER, by)
        elif draining:
            notice = WantedNotice(WantedReason.SUBSCRIPTION, by)
        elif waiter:
            notice = WantedNotice(WantedReason.WAITER, by)
        else:
            return None
        entry.owner_notified = True
        return notice

    def _renew(self, call: KeepAliveCall, key: GroupQueue, token: int, now_ms: int) -> HoldReport:
        entry = self._entries.get(key)
        if entry is None or not self.owns(key, call.incarnation, token):
            return HoldReport(key, HoldState.NOT_OWNER, 0 if entry is None else entry.lock.token)
        if entry.pending is not None:
            return HoldReport(key, HoldState.PENDING, token)
        if entry.phantom:
            return HoldReport(key, HoldState.NOT_OWNER, token)
        evicted = key.group in call.evicted_groups
        if not evicted:
            entry.evicted_since_ms = None
        elif entry.evicted_since_ms is None:
            entry.evicted_since_ms = now_ms
        elif now_ms - entry.evicted_since_ms > self._policy.evicted_renewal_ms:
            return HoldReport(key, HoldState.NOT_OWNER, token)
        entry.lease_start_ms = now_ms
        entry.running, entry.running_at_ms = call.running.get(key), now_ms
        draining = key.group in call.draining_groups
        wanted = self.wanted_notice(key, evicted=evicted, draining=draining)
        return HoldReport(key, HoldState.WANTED if wanted else HoldState.OK, token, wanted)

    # Entries

    def _keys_of(self, incarnation: Incarnation) -> set[GroupQueue]:
        """Return the queues that the incarnation owns, also by locks without a known owner number.

        Locks with one are not searched for an incarnation without one.
        """
        return self._owned.get(incarnation, set()) | self._owned.get(
            incarnation._replace(owner=0), set()
        )

    def _get_or_add(self, key: GroupQueue) -> LockEntry:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = LockEntry(key)
            self._transient[key] = None
            insort(self._keys, key)
        return entry

    def _end_change(self, key: GroupQueue) -> LockEntry:
        entry = self._entries[key]
        assert entry.pending is not None, f"{key} is not being changed"
        entry.pending = None
        entry.version += 1
        return entry

    def _set_lock(self, entry: LockEntry, lock: LockRecord, revision: int) -> None:
        before = entry.lock
        if before.owner is not None:
            _discard(self._owned, before.owner, entry.key)
            _discard(self._owned_in, entry.key.group, entry.key)
        if lock.owner is not None:
            self._owned.setdefault(lock.owner, set()).add(entry.key)
            self._owned_in.setdefault(entry.key.group, set()).add(entry.key)
        entry.lock, entry.revision = lock, revision
        if not revision:
            self._transient[entry.key] = None
        entry.phantom, entry.evicted_since_ms, entry.owner_notified = False, None, False
        entry.quiet_slots = 0
        entry.offsets_token = max(entry.offsets_token, lock.token)
        # A freed entry with the same token keeps its observation, which the next fence uses.
        if lock.owner is not None or lock.token != before.token:
            entry.observation = None

    def _drop_waiter(self, entry: LockEntry, requester: Incarnation) -> Waiter | None:
        _discard(self._waited, requester, entry.key)
        return entry.waiters.pop(requester, None)


K = TypeVar("K")


def _discard(index: dict[K, set[GroupQueue]], name: K, key: GroupQueue) -> None:
    """Remove `key` from the set of `name`, and an empty set from the index."""
    keys = index.get(name)
    if keys is not None:
        keys.discard(key)
        if not keys:
            del index[name]


def _progress(observation: Observation) -> tuple[int, int, int]:
    return observation.token, observation.committed, observation.delivered
