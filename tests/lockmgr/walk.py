"""A cluster without sockets: the real lock table, the real progress table of offsets, and clients
that keep the protocol. Every message between them can be lost, late, repeated or overtaken.

A hand-over is done in steps here, so that a leader can crash between any two of them. `World.step`
makes one random move and then checks the invariants (protocol section 16).

The simulation (tests/simulation) runs whole services, but far fewer steps per second. A lock table
that uses an observation from before a hand-over (`UsesStaleObservations` in test_walk) is found
here within 20 seeds, and was not found by 36 runs there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import BatonError, Fenced, OldEpoch, Superseded, TokenMismatch
from batonmq_server.lockmgr.core import lock_entry as locks
from batonmq_server.lockmgr.core import lock_table as table
from batonmq_server.lockmgr.core.decision import (
    DenyDecision,
    FenceCondition,
    FreeDecision,
    GrantDecision,
    WaitDecision,
    decide_clear,
)
from batonmq_server.offsets.core import values
from batonmq_server.offsets.core.progress import Progress
from batonmq_server.offsets.core.progress_table import ProgressTable
from batonmq_server.offsets.core.ranges import RangeSet

KEY = GroupQueue("g", "t", "b", 0)
OFFSETS_KEY = GroupQueue("g", "t", "b", 0)
POLICY = locks.LockPolicy()
MESSAGES = 300
MARGIN_MS = 3_000
LOST, LATE_MAX = 0.1, 6
Offsets = frozenset[int]
NONE: Offsets = frozenset()


class Violated(AssertionError):
    """A promise was broken."""


def offsets_of(ranges: RangeSet) -> Offsets:
    """Return the offsets of a range set."""
    return frozenset(o for first, next_ in ranges.runs for o in range(first, next_))


def ranges_of(offsets: Iterable[int]) -> RangeSet:
    """Return the range set of these offsets."""
    return RangeSet.merged([(o, o + 1) for o in sorted(offsets)])


@dataclass(eq=False)
class Client:
    """A consumer, with its token and the offsets that are in flight, finished and acknowledged."""

    name: str
    incarnation_id: int = 1
    generation: int = 0
    assigned: bool = False
    seq: int = 0
    acquiring: bool = False
    token: int = 0
    closing: bool = False
    deadline_ms: int = 0
    pull_id: int = 0
    pulling: bool = False
    in_flight: Offsets = NONE
    finished: Offsets = NONE
    known_acked: Offsets = NONE
    flagged: Offsets = NONE
    close_acks: Offsets | None = None

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(self.name, self.incarnation_id)

    def lose_token(self) -> None:
        """Drop the token; messages in flight stay only if the queue may be acquired again."""
        if self.closing or not self.assigned:
            self.in_flight = self.finished = NONE
        self.token, self.closing, self.pulling, self.close_acks = 0, False, False, None

    def next_offset(self) -> int:
        """Return the first offset that this client has not received."""
        received = self.known_acked | self.in_flight | self.finished
        return next((o for o in range(MESSAGES) if o not in received), MESSAGES)


@dataclass(frozen=True)
class SentAcquire:
    """An Acquire in flight."""

    client: Client
    requester: locks.Requester
    resume: Offsets
    sent_ms: int


@dataclass
class HandOver:
    """A hand-over by one leader under a gate of the group; without `acquire` it frees the queue."""

    acquire: SentAcquire | None
    term: int
    grant: GrantDecision
    gate: int
    tried: int = 0
    attempt: str = ""


@dataclass
class World:
    """The cluster; `step` makes one move."""

    random: Random
    make_table: Callable[[locks.LockPolicy], table.LockTable] = table.LockTable
    now_ms: int = 1_000_000
    term: int = 0
    generation: int = 0
    attempts: int = 0
    stored: locks.LockRecord = field(default_factory=locks.LockRecord)
    revision: int = 0
    gate: int = 1
    draining: bool = False
    started: Offsets = NONE
    excused: Offsets = NONE
    forced: frozenset[int] = frozenset()
    answered_acks: Offsets = NONE
    committed: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    mail: list[tuple[int, Client | None, Callable[[], None]]] = field(default_factory=list)
    paused: Client | None = None

    def __post_init__(self) -> None:
        self.offsets = ProgressTable(values.QueueLimits(), 1, 0, self.instant())
        self.clients = [Client("a"), Client("b"), Client("c")]
        self.take_over()

    def instant(self) -> values.Instant:
        return values.Instant(self.now_ms, 0)

    # One move

    def step(self) -> None:
        """Make one random move, then check all promises."""
        self.pass_time(self.random.randint(0, 250))
        move = self.random.random()
        if self.random.random() < 0.4 + 0.05 * len(self.mail) and self.deliver():
            pass
        elif move < 0.93:
            self.act(self.random.choice(self.clients))
        elif move < 0.95:
            self.rebalance()
        elif move < 0.96:
            self.take_over()
        elif move < 0.965:
            self.crash(self.random.choice(self.clients))
        elif move < 0.966:
            self.force()
        elif move < 0.97:
            self.change_subscription()
        elif move < 0.972:
            self.free_abandoned()
        elif move < 0.98 and self.paused is None:
            self.paused = self.random.choice(self.clients)
            self.pass_time(self.random.choice([0, POLICY.lease_ms + 1_000]))
        else:
            self.paused = None
        self.check()

    def pass_time(self, ms: int) -> None:
        self.now_ms += ms
        for client in self.clients:
            if client.token and self.now_ms > client.deadline_ms:
                self.excused |= client.in_flight | client.finished

    def send(
        self,
        deliver: Callable[[], None],
        *,
        to: Client | None = None,
        lossy: bool = True,
        twice: float = 0.0,
    ) -> None:
        """Send a message, which may overtake others and is not delivered to a paused client."""
        if lossy and self.random.random() < LOST:
            self.seen["lost"] += 1
            return
        for _ in range(1 + (self.random.random() < twice)):
            late_max = LATE_MAX if self.random.random() < 0.8 else 10 * LATE_MAX
            self.mail.append((self.random.randint(0, late_max), to, deliver))

    def deliver(self) -> bool:
        """Deliver the next message, if there is one for a client that is not paused."""
        awake = [i for i, (_, to, _) in enumerate(self.mail) if to is None or to != self.paused]
        if not awake:
            return False
        place = min(awake, key=lambda i: (self.mail[i][0], i))
        _, _, message = self.mail.pop(place)
        self.mail = [
            (late - (to is None or to != self.paused), to, other) for late, to, other in self.mail
        ]
        message()
        return True

    # Operators, and the nameserver that changes the subscription

    def force(self) -> None:
        """Force the release of the queue, as an operator does."""
        entry = self.table.get(KEY)
        if entry is None or not self.revision or entry.pending is not None:
            return
        self.table.begin_change(KEY, locks.ChangeStep.FENCE)
        grant = GrantDecision((FenceCondition.FORCED,), self.observation())
        self.fence_next(HandOver(None, self.term, grant, self.gate))

    def change_subscription(self) -> None:
        """Change the subscription: it begins once all queues are released and etcd has no owner."""
        if not self.draining:
            self.draining, self.gate = True, self.gate + 1
        elif self.stored.owner is None:
            seen = self.observation()
            holders = [c.name for c in self.clients if c.token and c.token == seen.token]
            if holders and not seen.closed:
                raise Violated(f"two filters: {holders} still use the old one")
            self.draining, self.gate = False, self.gate + 1
            self.seen["new subscription"] += 1
        else:
            self.clear()

    def free_abandoned(self) -> None:
        """Free the queue of a silent owner to which it is not assigned, as `LockRemover` does."""
        entry = self.table.get(KEY)
        if entry is None or self.now_ms - entry.lease_start_ms <= POLICY.lease_ms:
            return
        if not any(c.assigned and c.incarnation == entry.lock.owner for c in self.clients):
            self.seen["abandoned"] += entry.lock.owner is not None
            self.clear()

    def clear(self) -> None:
        """Clear a queue, as `QueueReleaser.clear` does."""
        entry = self.table.get(KEY)
        if entry is None or entry.lock.owner is None or entry.pending is not None:
            return
        decision = decide_clear(entry, self.observation(), self.now_ms, POLICY)
        if isinstance(decision, FreeDecision):
            self.free(entry.lock.owner, entry.lock.token)
            self.seen["freed"] += 1
        elif decision is not None:
            self.table.begin_change(KEY, locks.ChangeStep.FENCE)
            self.fence_next(HandOver(None, self.term, decision, self.gate))

    # Faults

    def take_over(self) -> None:
        """Crash the leader; the next one loads the locks and announces its term."""
        self.term += 1
        self.offsets.announce(self.term)
        self.table = self.make_table(POLICY)
        if self.revision:
            token = self.progress().token
            self.table.load(KEY, self.stored, self.revision, self.now_ms)
            self.table.confirm(KEY, token, self.now_ms)
            phantom = self.stored.owner is not None and token != self.stored.token
            self.seen["phantom"] += phantom
        self.seen["leader"] += 1

    def crash(self, client: Client) -> None:
        """Restart a client under the same client id."""
        self.excused |= client.in_flight | client.finished
        client.assigned = client.acquiring = False
        client.lose_token()
        place = self.clients.index(client)
        self.clients[place] = Client(client.name, client.incarnation_id + 1)
        self.seen["crash"] += 1

    def rebalance(self) -> None:
        """Assign the queue to another client; each client is notified at its own time."""
        self.generation += 1
        owner_name, generation = self.random.choice(self.clients).name, self.generation
        for name in [client.name for client in self.clients]:

            def notify(name: str = name) -> None:
                client = next(c for c in self.clients if c.name == name)
                if generation > client.generation:
                    client.generation, client.assigned = generation, name == owner_name
                    if not client.assigned and client.token:
                        client.closing, client.pulling = True, False

            self.send(notify, lossy=False)

    # Clients

    def act(self, client: Client) -> None:
        """Make one move of a client."""
        if client is self.paused:
            return
        moves: list[Callable[[Client], None]] = []
        if client.acquiring:
            moves += [self.send_acquire, self.give_up]
        elif not client.token and client.assigned:
            moves += [self.acquire]
        elif not client.token and client.in_flight | client.finished:
            moves += [self.drop]
        if client.token:
            moves += [self.keep_alive, self.finish, self.finish, self.commit]
            in_time = self.now_ms <= client.deadline_ms
            if not client.closing and in_time and client.next_offset() < MESSAGES:
                moves += [self.pull, self.pull]
            if client.closing and not client.in_flight:
                moves += [self.close]
        elif self.random.random() < 0.1:
            moves += [self.keep_alive]
        if moves:
            self.random.choice(moves)(client)

    def acquire(self, client: Client) -> None:
        client.seq += 1
        client.acquiring = True
        self.send_acquire(client)

    def send_acquire(self, client: Client) -> None:
        requester = locks.Requester(client.incarnation, client.seq, client.generation)
        acquire = SentAcquire(client, requester, client.in_flight | client.finished, self.now_ms)
        self.send(lambda: self.arrived(acquire), twice=0.2)

    def give_up(self, client: Client) -> None:
        client.acquiring = False

    def drop(self, client: Client) -> None:
        client.in_flight = client.finished = NONE

    def granted(self, acquire: SentAcquire, token: int, start: values.FenceGrant) -> None:
        """Deliver the grant of an Acquire to the client."""
        client = acquire.client
        if not client.acquiring or client.seq != acquire.requester.acquire_seq:
            return
        client.acquiring, client.token = False, token
        client.closing, client.pulling = not client.assigned, False
        client.deadline_ms = acquire.sent_ms + POLICY.lease_ms - MARGIN_MS
        client.known_acked = offsets_of(start.acked) | frozenset(range(start.committed_offset))
        client.flagged = offsets_of(start.maybe_seen)
        client.in_flight -= client.known_acked
        client.finished -= client.known_acked

    def pull(self, client: Client) -> None:
        client.pull_id += 1
        client.pulling = True
        token, pull_id, sent_ms = client.token, client.pull_id, self.now_ms
        first = client.next_offset()
        next_ = min(MESSAGES, first + self.random.randint(1, 2))

        def record() -> None:
            try:
                run = values.DeliveryRange(first, next_)
                delivery = self.offsets.record_delivered(OFFSETS_KEY, token, run, self.instant())
            except BatonError as error:
                if isinstance(error, Fenced):
                    self.send(lambda: self.fenced(client, token), to=client)
                return
            flagged = offsets_of(delivery.maybe_seen)
            self.send(
                lambda: self.receive(client, (token, pull_id, sent_ms), (first, next_), flagged),
                to=client,
            )

        self.send(record)

    def receive(
        self, client: Client, pull: tuple[int, int, int], run: tuple[int, int], flagged: Offsets
    ) -> None:
        """Deliver messages to the client, which starts those that it may."""
        token, pull_id, sent_ms = pull
        is_newest_pull = client.token == token and client.pulling and client.pull_id == pull_id
        if not is_newest_pull or client.closing or self.now_ms > client.deadline_ms:
            return
        client.pulling = False
        client.deadline_ms = max(client.deadline_ms, sent_ms + POLICY.lease_ms - MARGIN_MS)
        received = client.known_acked | client.in_flight | client.finished
        new = frozenset(range(*run)) - received
        again = new & self.started
        if again - flagged - client.flagged:
            raise Violated(f"V7: {sorted(again)} started again without a flag")
        if again - self.excused:
            raise Violated(f"V6: {sorted(again)} started again without an excuse")
        if new & self.answered_acks and token == self.progress().token:
            raise Violated(f"V9: {sorted(new)} started though its ack was answered")
        self.seen["started again"] += len(again)
        self.seen["started"] += len(new)
        self.started |= new
        self.excused = self.excused | new if token in self.forced else self.excused - new
        client.in_flight |= new

    def finish(self, client: Client) -> None:
        if client.in_flight:
            handled = frozenset([self.random.choice(sorted(client.in_flight))])
            client.in_flight -= handled
            client.finished |= handled

    def commit(self, client: Client) -> None:
        if client.close_acks is not None:
            return
        token, acks = client.token, client.finished

        def apply() -> None:
            try:
                acks_item = values.Acks(0, 0, ranges_of(acks))
                self.offsets.commit(OFFSETS_KEY, token, acks_item, self.instant())
            except Fenced:
                self.send(lambda: self.fenced(client, token), to=client)
                return
            self.send(answered, to=client)

        def answered() -> None:
            self.answered_acks |= acks
            if client.token == token:
                client.finished -= acks
                client.known_acked |= acks

        self.send(apply, twice=0.1)

    def close(self, client: Client) -> None:
        if client.close_acks is None:
            client.close_acks = client.finished
        token, acks = client.token, client.close_acks

        def apply() -> None:
            try:
                acks_item = values.Acks(0, 0, ranges_of(acks))
                self.offsets.close(OFFSETS_KEY, token, acks_item, RangeSet(), self.instant())
            except Fenced:
                self.send(lambda: self.fenced(client, token), to=client)
                return
            self.send(answered, to=client)

        def answered() -> None:
            self.answered_acks |= acks
            if client.token == token:
                client.lose_token()
                self.seen["closed"] += 1
                self.send(lambda: self.release(client.incarnation, token, self.term))

        self.send(apply, twice=0.1)

    def fenced(self, client: Client, token: int) -> None:
        if client.token == token:
            self.seen["fenced"] += 1
            client.lose_token()

    def keep_alive(self, client: Client) -> None:
        holds = [(KEY, client.token)] if client.token else []
        seen_seq = client.seq - client.acquiring
        sent_ms, token = self.now_ms, client.token

        def renew() -> None:
            call = table.KeepAliveCall(
                incarnation=client.incarnation,
                acquire_seq=seen_seq,
                holds=holds,
                draining_groups=frozenset([KEY.group] if self.draining else []),
            )
            for report in self.table.keep_alive(call, self.now_ms):
                self.seen[report.state.value] += 1
                self.send(partial(answered, report), to=client)

        def answered(report: table.HoldReport) -> None:
            if report.state is table.HoldState.ORPHAN:
                if not client.token and not client.acquiring:
                    owner = client.incarnation
                    self.send(lambda: self.release(owner, report.token, self.term))
            elif client.token == token and report.state is table.HoldState.NOT_OWNER:
                self.fenced(client, token)
            elif client.token == token and report.state is not table.HoldState.PENDING:
                until_ms = sent_ms + POLICY.lease_ms - MARGIN_MS
                client.deadline_ms = max(client.deadline_ms, until_ms)
                if report.wanted and report.wanted.reason is locks.WantedReason.SUBSCRIPTION:
                    client.closing, client.pulling = True, False
                    self.seen["SUBSCRIPTION"] += 1

        self.send(renew)

    # The lock manager, step by step

    def arrived(self, acquire: SentAcquire) -> None:
        """Deliver an Acquire to the leader, which observes the queue; the answer may be late."""
        version, term = self.table.begin_observation(KEY), self.term
        seen = self.observation()

        def decide() -> None:
            if term == self.term:
                self.table.end_observation(KEY, seen, version, self.now_ms)
                self.decide(acquire)

        self.send(decide, lossy=False)

    def decide(self, acquire: SentAcquire) -> None:
        if self.draining:
            self.seen["SUBSCRIPTION_DRAINING"] += 1
            return
        decision = self.table.decide(KEY, acquire.requester, self.now_ms)
        if decision is None:
            self.send(lambda: self.arrived(acquire))
        elif isinstance(decision, DenyDecision | WaitDecision):
            self.seen[decision.error.reason] += 1
            if isinstance(decision, WaitDecision):
                self.table.add_waiter(KEY, acquire.requester.incarnation, self.now_ms)
                if acquire.client.acquiring and acquire.client.seq == acquire.requester.acquire_seq:
                    self.send(lambda: self.arrived(acquire))
        elif isinstance(decision, GrantDecision):
            self.table.begin_change(KEY, locks.ChangeStep.FENCE)
            self.fence_next(HandOver(acquire, self.term, decision, self.gate))
        else:
            self.repeat(acquire)

    def fence_next(self, hand_over: HandOver) -> None:
        self.attempts += 1
        hand_over.attempt = f"{hand_over.term}-{self.attempts}"
        self.send(lambda: self.fence(hand_over), lossy=False)

    def fence(self, hand_over: HandOver) -> None:
        """Deliver a fence to offsets, even if its leader is deposed."""
        condition = hand_over.grant.conditions[hand_over.tried]
        seen = hand_over.grant.observation
        call = self.fence_call(hand_over.acquire, condition, seen, hand_over.attempt)
        try:
            start = self.offsets.fence(OFFSETS_KEY, hand_over.term, call, self.instant())
        except OldEpoch:
            self.seen["late fence"] += 1
            return
        except BatonError as error:
            if hand_over.term == self.term:
                self.fence_refused(hand_over, error)
            return
        if condition is FenceCondition.FORCED:
            self.forced |= {seen.token}
            for client in self.clients:
                self.excused |= client.in_flight | client.finished
        if self.random.random() < LOST:
            self.seen["fence repeated"] += 1
            self.send(lambda: self.fence(hand_over), lossy=False)
        else:
            self.seen[condition.value] += 1
            self.send(lambda: self.persist(hand_over, start), lossy=False)

    def fence_refused(self, hand_over: HandOver, error: BatonError) -> None:
        hand_over.tried += 1
        is_stale = isinstance(error, TokenMismatch | Superseded)
        if not is_stale and hand_over.tried < len(hand_over.grant.conditions):
            self.fence_next(hand_over)
            return
        self.table.end_unchanged(KEY)
        if is_stale:
            self.table.discard_observation(KEY)
        self.retry_acquire(hand_over)

    def retry_acquire(self, hand_over: HandOver) -> None:
        acquire = hand_over.acquire
        if acquire is not None:
            self.send(lambda: self.arrived(acquire))

    def persist(self, hand_over: HandOver, start: values.FenceGrant) -> None:
        """Deliver a transaction to etcd, even if its leader is deposed."""
        if hand_over.term != self.term:
            self.seen["late persist"] += 1
            return
        lock = self.lock(hand_over, start)
        entry = self.table.get(KEY)
        assert entry is not None
        if self.stored != lock and hand_over.acquire is not None and hand_over.gate != self.gate:
            self.table.end_reloaded(KEY, self.stored, self.revision, fenced=True)
            self.seen["overtaken"] += 1
            self.retry_acquire(hand_over)
            return
        if self.stored != lock:
            if entry.revision != self.revision:
                raise Violated("two changes of one entry at the same time")
            self.stored, self.revision = lock, self.revision + 1
            if self.random.random() < LOST:
                self.send(lambda: self.persist(hand_over, start), lossy=False)
                return
        acquire = hand_over.acquire
        if acquire is None:
            self.table.end_freed(KEY, lock, self.revision, self.now_ms)
            self.seen["freed by a fence"] += 1
            return
        newly_acquired = hand_over.grant.newly_acquired
        self.table.end_granted(KEY, lock, self.revision, self.now_ms, newly_acquired=newly_acquired)
        self.seen["granted"] += 1
        self.send(lambda: self.granted(acquire, start.token, start), to=acquire.client)

    def lock(self, hand_over: HandOver, start: values.FenceGrant) -> locks.LockRecord:
        if hand_over.acquire is None:
            return replace(self.stored.freed(), token=start.token)
        requester = hand_over.acquire.requester
        return locks.LockRecord(
            owner=requester.incarnation,
            token=start.token,
            acquire_seq=requester.acquire_seq,
            attempt=hand_over.attempt,
            generation=requester.generation,
        )

    def repeat(self, acquire: SentAcquire) -> None:
        lock = self.stored
        before = locks.Observation(token=lock.token - 1)
        call = self.fence_call(acquire, FenceCondition.SAME_HOLDER, before, lock.attempt)
        start = self.offsets.fence(OFFSETS_KEY, self.term, call, self.instant())
        if start.token != lock.token or start.changed:
            raise Violated("a repeated grant differs from the first")
        self.table.renew_lease(KEY, self.now_ms)
        self.seen["repeated"] += 1
        self.send(lambda: self.granted(acquire, start.token, start), to=acquire.client)

    def release(self, owner: Incarnation, token: int, term: int) -> None:
        if not self.table.owns(KEY, owner, token):
            return
        entry = self.table.get(KEY)
        assert entry is not None
        if entry.pending is not None:
            self.send(lambda: self.release(owner, token, term))
            return
        self.free(owner, token)

    def free(self, owner: Incarnation, token: int) -> None:
        assert self.table.owns(KEY, owner, token)
        self.table.begin_change(KEY, locks.ChangeStep.RELEASE)
        leader = self.term

        def write() -> None:
            if leader == self.term:
                self.stored, self.revision = self.stored.freed(), self.revision + 1
                self.table.end_freed(KEY, self.stored, self.revision, self.now_ms)
                self.seen["released"] += 1

        self.send(write, lossy=False)

    def fence_call(
        self,
        acquire: SentAcquire | None,
        condition: FenceCondition,
        seen: locks.Observation,
        attempt: str,
    ) -> values.FenceAttempt:
        return values.FenceAttempt(
            attempt=attempt,
            expected_token=seen.token,
            condition=values.FenceCondition(condition.value),
            holder=Incarnation(*acquire.requester.incarnation) if acquire else None,
            resume=ranges_of(acquire.resume if acquire else ()),
            idle_ms=POLICY.lease_ms if condition is FenceCondition.IDLE else 0,
            token_min=self.stored.token,
            observed_delivered_offset=seen.delivered,
            observed_reset_epoch=seen.reset_epoch,
        )

    # Invariants

    def progress(self) -> Progress:
        return self.offsets.query(OFFSETS_KEY)

    def observation(self) -> locks.Observation:
        try:
            progress = self.progress()
        except BatonError:
            return locks.Observation()
        return locks.Observation(
            token=progress.token,
            closed=progress.closed,
            committed=progress.committed_offset,
            delivered=progress.delivered_offset,
            reset_epoch=progress.reset_epoch,
            unacked_count=progress.in_flight().count,
        )

    def check(self) -> None:
        seen = self.observation()
        if self.stored.token > seen.token:
            raise Violated(f"V1: etcd has token {self.stored.token}, offsets {seen.token}")
        holders = [c.name for c in self.clients if c.token and c.token == seen.token]
        if len(holders) > 1 and not seen.closed:
            raise Violated(f"V2: {holders} hold token {seen.token}")
        if seen.committed < self.committed:
            raise Violated(f"V5: committed fell from {self.committed} to {seen.committed}")
        if seen.delivered < seen.committed:
            raise Violated("V10: delivered is below committed")
        if any(client.token > self.stored.token for client in self.clients):
            raise Violated("V11: a client uses a token that etcd does not have")
        self.committed = seen.committed
