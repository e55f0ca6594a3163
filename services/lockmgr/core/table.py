"""All queues of one leader: leases, observations, waiters, changes under way.

An entry changes in three steps: `begin` marks it, the shell fences and persists, and exactly one
of `granted`, `freed`, `refused` and `reloaded` ends it. From `begin` until the outcome is known
nobody is renewed and nothing else begins (protocol section 5, stories 6 and 7).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeVar

from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import BatonError, HandoverPending
from batonmq_server.lockmgr.core.access import Decision, Deny, decide_access
from batonmq_server.lockmgr.core.defibus import decide_access_defibus
from batonmq_server.lockmgr.core.locks import (
    DENIALS_MAX,
    Asker,
    Denial,
    Entry,
    Lock,
    LockState,
    Observation,
    Pending,
    Policy,
    Profile,
    Step,
    Waiter,
    Wanted,
    WantedReason,
)


class HoldState(Enum):
    """What a keep-alive did to an entry."""

    OK = "OK"
    WANTED = "WANTED"
    NOT_OWNER = "NOT_OWNER"
    PENDING = "PENDING"
    ORPHAN = "ORPHAN"


class Report(NamedTuple):
    """State of one entry after a keep-alive; `token` is the entry's."""

    key: GroupQueue
    state: HoldState
    token: int
    wanted: Wanted | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAlive:
    """What an owner says about itself.

    Attributes:
        acquire_seq: Highest request whose outcomes it has seen.
        holds: Everything it owns, with the tokens.
        evicted_groups: Groups of `holds` in which it is no member any more.
        draining_groups: Groups of `holds` whose subscription is being changed.
    """

    incarnation: Incarnation
    acquire_seq: int
    holds: Sequence[tuple[GroupQueue, int]]
    evicted_groups: frozenset[str] = frozenset()
    draining_groups: frozenset[str] = frozenset()


class LockTable:
    """The entries of one term of leadership. Holds no clock: every call brings the time."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._entries: dict[GroupQueue, Entry] = {}
        self._keys: list[GroupQueue] = []  # those of `_entries`, ascending
        self._owned: dict[Incarnation, set[GroupQueue]] = {}
        self._owned_in: dict[str, set[GroupQueue]] = {}
        self._waited: dict[Incarnation, set[GroupQueue]] = {}

    # What is there

    def get(self, key: GroupQueue) -> Entry | None:
        """The entry of `key`, not to be changed by the caller."""
        return self._entries.get(key)

    def entries(
        self, group: str = "", topic: str = "", after: GroupQueue | None = None
    ) -> Iterator[Entry]:
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
        """Queues the incarnation owns, ascending."""
        return sorted(self._owned.get(incarnation, ()))

    def owned_in(self, group: str) -> list[GroupQueue]:
        """Queues of the group that somebody owns, ascending."""
        return sorted(self._owned_in.get(group, ()))

    def owning_groups(self) -> list[str]:
        """Groups of which somebody owns a queue."""
        return list(self._owned_in)

    def waited_for_by(self, incarnation: Incarnation) -> list[GroupQueue]:
        """Queues the incarnation was refused and still waits for, ascending."""
        return sorted(self._waited.get(incarnation, ()))

    def waited_for_in(self, group: str) -> list[GroupQueue]:
        """Queues of the group that somebody waits for, ascending."""
        return sorted({key for keys in self._waited.values() for key in keys if key.group == group})

    def counts(self) -> Counter[LockState]:
        """How many entries are in which state."""
        return Counter(entry.state for entry in self._entries.values() if entry.revision)

    # A leader begins

    def load(self, key: GroupQueue, lock: Lock, revision: int, now_ms: int) -> None:
        """Take over an entry of the leader before, to be confirmed: until then nothing is done."""
        entry = self._touch(key)
        entry.lease_start_ms = entry.held_since_ms = now_ms
        self._put(entry, lock, revision)
        entry.pending = Pending(Step.ANNOUNCE)

    def confirm(self, key: GroupQueue, offsets_token: int, now_ms: int) -> None:
        """Begin with a loaded entry: its lease starts now.

        Args:
            offsets_token: Answered by offsets after it has learnt of this term. If it is not the
                owner's, the owner was fenced and must not be renewed (story 12).
        """
        entry = self._settle(key)
        entry.lease_start_ms = entry.held_since_ms = now_ms
        entry.phantom = entry.lock.owner is not None and entry.lock.token != offsets_token
        entry.offsets_token = offsets_token

    # Observing

    def needs_look(self, key: GroupQueue, asker: Asker, now_ms: int) -> bool:
        """Whether the queue must be observed before deciding.

        However many contenders there are, they share one observation per slot; but not in the
        profile `defibus`, which counts polls. An owner's own request always gets a fresh one.
        """
        entry = self._entries.get(key)
        if entry is None:
            return True
        if entry.pending is not None:
            return False
        if entry.seen is None or entry.lock.owner == asker.incarnation:
            return True
        if self._policy.profile is Profile.DEFIBUS:
            return True
        return self.due_ms(key, now_ms) <= 0

    def due_ms(self, key: GroupQueue, now_ms: int) -> int:
        """Time until the next observation of `key` may count."""
        entry = self._entries.get(key)
        return 0 if entry is None else entry.seen_ms + self._policy.slot_ms - now_ms

    def look(self, key: GroupQueue) -> int:
        """Begin an observation; the stamp to be given to `observe`."""
        return self._touch(key).stamp

    def observe(self, key: GroupQueue, seen: Observation, stamp: int, now_ms: int) -> None:
        """Note what offsets showed; ignored if the entry has changed since `look`."""
        entry = self._touch(key)
        if entry.stamp != stamp or entry.pending is not None:
            return
        before, entry.seen, entry.seen_ms = entry.seen, seen, now_ms
        entry.offsets_token = seen.token
        if entry.lock.owner is not None:
            entry.phantom = seen.token != entry.lock.token
        if before is None or _progress(before) != _progress(seen):
            entry.slots, entry.slot_start_ms = 0, now_ms
        elif now_ms - entry.slot_start_ms >= self._policy.slot_ms:
            entry.slots, entry.slot_start_ms = entry.slots + 1, now_ms

    def unseen(self, key: GroupQueue, now_ms: int) -> None:
        """Note that an observation failed, so that the next one waits for its slot."""
        self._touch(key).seen_ms = now_ms

    def distrust(self, key: GroupQueue) -> None:
        """Forget the last observation: offsets has contradicted it."""
        self._touch(key).seen = None

    # Deciding

    def decide(self, key: GroupQueue, asker: Asker, now_ms: int) -> Decision | None:
        """What to do about the asker's wish; None if the queue must be observed first."""
        entry = self._touch(key)
        if entry.pending is not None:
            error = HandoverPending(
                f"{key} is being handed over",
                retry_after_ms=100,
                facts={"attempt": entry.pending.attempt, "step": entry.pending.step.value},
            )
            return Deny(error, clears=True)
        if entry.seen is None:
            return None
        if self._policy.profile is Profile.DEFAULT:
            return decide_access(entry, asker, entry.seen, now_ms, self._policy)
        decision, entry.count = decide_access_defibus(
            entry, asker, entry.seen, now_ms, self._policy
        )
        return decision

    def denied(self, key: GroupQueue, asker: Incarnation, error: BatonError, now_ms: int) -> None:
        """Remember a refusal, for people; not of a queue that nothing is known of."""
        entry = self._entries.get(key)
        if entry is None:
            return
        denials = entry.denials
        denials.pop(asker.client_id, None)
        denials[asker.client_id] = Denial(asker.client_id, error, now_ms)
        if len(denials) > DENIALS_MAX:
            del denials[next(iter(denials))]

    def wait(self, key: GroupQueue, asker: Incarnation, now_ms: int, *, parked: int = 0) -> bool:
        """Note a refusal that can clear.

        Args:
            parked: 1 when a call starts to be held, -1 when it ends.

        Returns:
            Whether the asker is a new waiter: the owner is to learn of it.
        """
        entry = self._touch(key)
        waiter = entry.waiters.get(asker)
        new = waiter is None
        if waiter is None:
            if parked < 0:
                return False  # granted while it was held
            waiter = entry.waiters[asker] = Waiter(now_ms, now_ms)
            self._waited.setdefault(asker, set()).add(key)
        waiter.seen_ms = now_ms
        waiter.parked_count += parked
        return new

    def forget_waiters(self, now_ms: int) -> None:
        """Drop waiters that have not asked lately, and entries that nothing is known of."""
        oldest_ms = now_ms - self._policy.waiter_memory_ms
        count = len(self._entries)
        for entry in list(self._entries.values()):
            for asker, waiter in list(entry.waiters.items()):
                if not waiter.parked_count and waiter.seen_ms < oldest_ms:
                    self._forget_waiter(entry, asker)
            known = entry.revision or entry.pending or entry.waiters
            if not known and entry.seen_ms < oldest_ms:
                del self._entries[entry.key]
        if len(self._entries) < count:
            self._keys = [key for key in self._keys if key in self._entries]

    # Changing

    def begin(self, key: GroupQueue, step: Step) -> Pending:
        """Mark the entry: a change starts and its outcome is open."""
        entry = self._touch(key)
        assert entry.pending is None, f"{key} is being changed already"
        entry.pending = Pending(step)
        entry.stamp += 1
        return entry.pending

    def refused(self, key: GroupQueue) -> None:
        """End a change that changed nothing anywhere."""
        self._settle(key)

    def granted(
        self, key: GroupQueue, lock: Lock, revision: int, now_ms: int, *, newly_acquired: bool
    ) -> int:
        """End a change: the lock is in etcd, the owner's lease starts now.

        Returns:
            How long the new owner has waited since it was first refused, in milliseconds.
        """
        assert lock.owner is not None
        entry = self._settle(key)
        self._put(entry, lock, revision)
        entry.lease_start_ms = entry.held_since_ms = now_ms
        entry.newly_acquired = newly_acquired
        waiter = self._forget_waiter(entry, lock.owner)
        return 0 if waiter is None else now_ms - waiter.since_ms

    def freed(self, key: GroupQueue, lock: Lock, revision: int) -> None:
        """End a change: etcd has the entry as `lock`, which nobody owns."""
        assert lock.owner is None
        self._put(self._settle(key), lock, revision)

    def reloaded(self, key: GroupQueue, lock: Lock | None, revision: int, *, fenced: bool) -> None:
        """End a change that etcd refused: it has another lock than the entry had.

        Args:
            lock: What etcd has; None for nothing.
            fenced: offsets has raised the token, so the lock's is dead.
        """
        entry = self._settle(key)
        self._put(entry, lock or Lock(), revision)
        entry.phantom, entry.seen = fenced and entry.lock.owner is not None, None

    # Owners

    def renew(self, key: GroupQueue, now_ms: int) -> None:
        """Start the owner's lease anew, after its grant was repeated to it."""
        self._entries[key].lease_start_ms = now_ms

    def keep_alive(self, call: KeepAlive, now_ms: int) -> list[Report]:
        """Renew what matches: a report per hold, in order, then the owner's unlisted entries."""
        reports = [self._renew(call, key, token, now_ms) for key, token in call.holds]
        unlisted = self._owned.get(call.incarnation, set()) - {key for key, _ in call.holds}
        for key in sorted(unlisted):
            entry = self._entries[key]
            # An outcome that the owner has not seen yet is on its way to it: no orphan.
            if entry.lock.acquire_seq <= call.acquire_seq and entry.pending is None:
                reports.append(Report(key, HoldState.ORPHAN, entry.lock.token))
        return reports

    def owns(self, key: GroupQueue, incarnation: Incarnation, token: int) -> bool:
        """Whether the entry's lock is this incarnation's, by this token."""
        entry = self._entries.get(key)
        return entry is not None and (entry.lock.owner, entry.lock.token) == (incarnation, token)

    def _renew(self, call: KeepAlive, key: GroupQueue, token: int, now_ms: int) -> Report:
        entry = self._entries.get(key)
        if entry is None or not self.owns(key, call.incarnation, token):
            return Report(key, HoldState.NOT_OWNER, 0 if entry is None else entry.lock.token)
        if entry.pending is not None:
            return Report(key, HoldState.PENDING, token)
        if entry.phantom:
            return Report(key, HoldState.NOT_OWNER, token)
        evicted = key.group in call.evicted_groups
        if not evicted:
            entry.evicted_since_ms = None
        elif entry.evicted_since_ms is None:
            entry.evicted_since_ms = now_ms
        elif now_ms - entry.evicted_since_ms > self._policy.evicted_renewal_ms:
            return Report(key, HoldState.NOT_OWNER, token)
        entry.lease_start_ms = now_ms
        wanted = self.wanted(key, evicted=evicted, draining=key.group in call.draining_groups)
        return Report(key, HoldState.WANTED if wanted else HoldState.OK, token, wanted)

    def wanted(self, key: GroupQueue, *, evicted: bool, draining: bool) -> Wanted | None:
        """Why the owner of `key` should give it back, if it should; it counts as told.

        Args:
            evicted: The owner is no member of the group any more.
            draining: The subscription of the group is being changed.
        """
        entry = self._entries[key]
        if not (evicted or draining or entry.waiters):
            return None
        waiter = next((asker for asker in entry.waiters if asker != entry.lock.owner), None)
        by = waiter.client_id if waiter else ""
        if evicted:
            wanted = Wanted(WantedReason.NOT_MEMBER, by)
        elif draining:
            wanted = Wanted(WantedReason.SUBSCRIPTION, by)
        elif waiter:
            wanted = Wanted(WantedReason.WAITER, by)
        else:
            return None
        entry.told = True
        return wanted

    def _forget_waiter(self, entry: Entry, asker: Incarnation) -> Waiter | None:
        _discard(self._waited, asker, entry.key)
        return entry.waiters.pop(asker, None)

    def _touch(self, key: GroupQueue) -> Entry:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Entry(key)
            insort(self._keys, key)
        return entry

    def _settle(self, key: GroupQueue) -> Entry:
        entry = self._entries[key]
        assert entry.pending is not None, f"{key} is not being changed"
        entry.pending = None
        entry.stamp += 1
        return entry

    def _put(self, entry: Entry, lock: Lock, revision: int) -> None:
        """Every change of a lock: keeps the index of owners, and forgets what was seen."""
        before = entry.lock
        if before.owner is not None:
            _discard(self._owned, before.owner, entry.key)
            _discard(self._owned_in, entry.key.group, entry.key)
        if lock.owner is not None:
            self._owned.setdefault(lock.owner, set()).add(entry.key)
            self._owned_in.setdefault(entry.key.group, set()).add(entry.key)
        entry.lock, entry.revision = lock, revision
        entry.phantom, entry.evicted_since_ms, entry.told = False, None, False
        entry.slots = 0
        entry.offsets_token = max(entry.offsets_token, lock.token)
        if lock.owner is not None or lock.token != before.token:
            entry.seen = None  # else the token stands, and what was seen of it serves a fence


K = TypeVar("K")


def _discard(index: dict[K, set[GroupQueue]], name: K, key: GroupQueue) -> None:
    """Take `key` out of the set of `name`; an empty set goes too."""
    keys = index.get(name)
    if keys is not None:
        keys.discard(key)
        if not keys:
            del index[name]


def _progress(seen: Observation) -> tuple[int, int, int]:
    return seen.token, seen.committed, seen.delivered
