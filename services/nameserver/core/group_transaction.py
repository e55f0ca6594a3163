"""The changes that requests make to one group's record, decided one after the other.

The rule behind all policies except WARN (protocol section 14): a group never has two subscriptions
in force at one time. A subscription is changed in two steps. First the change is decided: the
record says "draining", no queue is assigned, and every owner releases its queues. Once no queue has
an owner, the new subscription is in force and the queues are assigned anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from batonmq._core.queues import Incarnation
from batonmq.errors import ClientIdInUse, Difference, GroupInUse, Overloaded
from batonmq_server.nameserver.core.assignment import AssignmentStrategy
from batonmq_server.nameserver.core.differences import conflict_error, differences, longest_member
from batonmq_server.nameserver.core.groups import (
    MEMBERS_MAX,
    Group,
    Heartbeat,
    Member,
    Pause,
    StagedSubscription,
    SubscriptionPolicy,
    Subscriptions,
    Terms,
    assign_topics,
    beginnings_of,
    hash_of,
)
from batonmq_server.nameserver.core.topics import Topic

DRAIN_RETRY_MS = 1_000
CLIENT_ID_RETRY_MS = 1_000


class SubscriptionVerdictKind(Enum):
    """What the policy decided about the subscription of an accepted heartbeat."""

    ACCEPTED = "ACCEPTED"
    STAGED = "STAGED"
    REPLACED = "REPLACED"
    OVERRULED = "OVERRULED"


@dataclass(frozen=True, slots=True)
class SubscriptionVerdict:
    """The verdict on a subscription, and its differences to the group's."""

    kind: SubscriptionVerdictKind
    differences: tuple[Difference, ...] = ()


ACCEPTED = SubscriptionVerdict(SubscriptionVerdictKind.ACCEPTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """Settings to change; None leaves a setting unchanged.

    Attributes:
        paused: Whether the deliveries are to be paused; if so, `pause` has operator and reason.
    """

    policy: SubscriptionPolicy | None = None
    owned: bool | None = None
    strategy: AssignmentStrategy | None = None
    paused: bool | None = None
    pause: Pause | None = None


class GroupTransaction:
    """One group's record, with requests applied to it one after the other.

    `settled` and `assigned` return the record that the requests result in. A request that raises
    has changed nothing.

    Args:
        group: The record in etcd; None if the group is new.
        live: Incarnation ids of the processes whose member lease has not expired, by client id. At
            least as new as `group`. A recorded member that is missing here is dead.
        lease_ms: Length of a member lease.
        first_generation: Generation of a new record.

    Attributes:
        joined: Incarnation ids, by client id, of members that need a live key.
        left: Client ids of the members of which the live key is to be deleted.
        replaced: Differences, by client id, of members whose subscription replaced that of others.
    """

    def __init__(  # noqa: PLR0913  keyword-only from the time on
        self,
        name: str,
        group: Group | None,
        live: Mapping[str, int],
        *,
        now_unix_ms: int,
        lease_ms: int,
        first_generation: int = 1,
        members_max: int = MEMBERS_MAX,
    ) -> None:
        self._stored = group
        self._before = group or Group(name=name, generation=first_generation - 1)
        self._group = self._before
        self._members = {member.client_id: member for member in self._before.members}
        self._live = dict(live)
        self._now_unix_ms, self._lease_ms = now_unix_ms, lease_ms
        self._members_max = members_max
        self._settled: Group | None = None
        self._updated = False
        self.joined: dict[str, int] = {}
        self.left: set[str] = set()
        self.replaced: dict[str, tuple[Difference, ...]] = {}

    def join(self, heartbeat: Heartbeat) -> None:
        """Make the sender a member, or keep it as one, on its terms.

        A member that is still recorded stays a member, even if its lease has expired.

        Raises:
            ClientIdInUse: another live process has the client id.
            SubscriptionConflict: the policy refuses its terms.
            Overloaded: the group has the maximum number of members.
        """
        self._check_client_id(heartbeat)
        member = self._members.get(heartbeat.client_id)
        if member is not None and not heartbeat.is_from(member):
            member = None
        others = [m for m in self._live_members() if not heartbeat.is_from(m)]
        if member is None and len(others) >= self._members_max:
            raise Overloaded(
                f"group {heartbeat.group} has {len(others)} members; the limit is "
                f"{self._members_max}",
                remedy="Use several groups, or fewer processes.",
                retry_after_ms=10_000,
                facts={"limit": self._members_max},
            )
        if self._stored is None:
            self._group = replace(self._group, creator=heartbeat.owner)
        self._apply_terms(heartbeat, member, others)
        self._put_member(heartbeat, member)

    def leave(self, client_id: str, incarnation_id: int, owner: int = 0) -> bool:
        """Remove this process; return False if it is not a member."""
        member = self._members.get(client_id)
        sender = Incarnation(client_id, incarnation_id, owner)
        if member is None or not sender.matches(member.incarnation):
            return False
        self._settled = None
        del self._members[client_id]
        self._live.pop(client_id, None)
        self.joined.pop(client_id, None)
        self.left.add(client_id)
        return True

    def update(self, settings: GroupSettings) -> None:
        """Change settings; create the group if it does not exist.

        Raises:
            GroupInUse: ownership is to change while a member is live.
        """
        group = self._group
        if settings.owned not in (None, group.owned):
            self.check_unused("ownership can only be changed without live members")
        self._settled, self._updated = None, True
        self._group = replace(
            group,
            policy=settings.policy or group.policy,
            owned=group.owned if settings.owned is None else settings.owned,
            strategy=settings.strategy or group.strategy,
            pause=_paused(group.pause, settings),
        )

    def check_unused(self, rule: str) -> None:
        """Raise GroupInUse if a member is live.

        Args:
            rule: Why there must be none, for the message.
        """
        count = len(self._live_members())
        if count:
            raise GroupInUse(
                f"group {self._group.name} has {count} live members: {rule}",
                facts={"group": self._group.name, "members": count},
            )

    def finish_draining(self) -> None:
        """Put the staged subscription in force; only to be called while no queue has an owner."""
        staged = self._group.staged
        if staged is not None and staged.draining:
            self._settled = None
            self._subscribe(staged.subscriptions)

    def settled(self) -> Group:
        """Return the record without dead members, its staged subscription up to date.

        The queues are not assigned yet.
        """
        if self._settled is not None:
            return self._settled
        members = tuple(sorted(self._live_members(), key=lambda member: member.client_id))
        staged = _still_staged(self._group, members)
        mine = hash_of(self._group.terms.subscriptions)
        broadcasting = self._group.terms.broadcasting
        shown = tuple(
            member if member.differs == differs else replace(member, differs=differs)
            for member in members
            for differs in [not broadcasting and member.subscription_hash != mine]
        )
        self._settled = replace(self._group, members=shown, staged=staged)
        return self._settled

    def is_unchanged(self) -> bool:
        """Return whether the record stays the same, if no queue has to be assigned anew."""
        return self.settled() == self._before and not (self._updated and self._stored is None)

    def assigned(self, topics: Iterable[Topic]) -> Group | None:
        """Return the record with its queues assigned; the record in etcd itself if nothing changes.

        Args:
            topics: The existing topics that the settled group subscribes to.
        """
        after = self.settled()
        topics = list(topics)
        assignments = assign_topics(after, topics, self._before)
        after = replace(after, assignments=assignments, beginnings=beginnings_of(after, topics))
        if after == self._before and not (self._updated and self._stored is None):
            return self._stored
        return replace(after, generation=self._before.generation + 1)

    def expired(self) -> tuple[Member, ...]:
        """Return the recorded members that are dead, ascending by client id."""
        dead = self._members.keys() - {member.client_id for member in self._live_members()}
        return tuple(self._members[client_id] for client_id in sorted(dead))

    def verdict(self, heartbeat: Heartbeat, after: Group) -> SubscriptionVerdict:
        """Return the verdict on a heartbeat that was accepted; `after` is the written record."""
        replaced = self.replaced.get(heartbeat.client_id)
        if replaced and heartbeat.terms.subscriptions == target_of(after):
            return SubscriptionVerdict(SubscriptionVerdictKind.REPLACED, replaced)
        return verdict_of(after, heartbeat)

    def _live_members(self) -> list[Member]:
        live = self._live
        return [m for m in self._members.values() if live.get(m.client_id) == m.incarnation_id]

    def _check_client_id(self, heartbeat: Heartbeat) -> None:
        member = self._members.get(heartbeat.client_id)
        if member is None or heartbeat.is_from(member):
            return
        if self._live.get(member.client_id) == member.incarnation_id:
            raise ClientIdInUse(
                f"client id {member.client_id!r} of group {heartbeat.group} belongs to a "
                f"live process on host {member.host or 'unknown'!r}",
                remedy=(
                    "Give each process a client id of its own. If this process replaces one "
                    "that crashed, try again until the session of the old process has ended: "
                    "usually a few seconds after its connection broke, and at the latest "
                    f"{self._lease_ms} ms after its last heartbeat."
                ),
                retry_after_ms=CLIENT_ID_RETRY_MS,
                facts={"client_id": member.client_id, "host": member.host},
            )

    def _put_member(self, heartbeat: Heartbeat, member: Member | None) -> None:
        """Add the sender to the members, or update its entry."""
        self._settled = None
        client_id, incarnation_id = heartbeat.client_id, heartbeat.incarnation_id
        self._members[client_id] = Member(
            client_id,
            incarnation_id,
            heartbeat.host,
            member.join_unix_ms if member else self._now_unix_ms,
            heartbeat.room,
            hash_of(heartbeat.terms.subscriptions),
            differs=member.differs if member else False,
            owner=heartbeat.owner or (member.owner if member else 0),
        )
        self.left.discard(client_id)
        if self._live.get(client_id) != incarnation_id:
            self._live[client_id] = self.joined[client_id] = incarnation_id

    def _apply_terms(
        self, heartbeat: Heartbeat, member: Member | None, others: list[Member]
    ) -> None:
        """Apply the policy to the sender's terms.

        Args:
            member: The sender, if it is a member already.
            others: Live members except the sender.

        Raises:
            SubscriptionConflict: the policy refuses the terms.
        """
        requested = heartbeat.terms
        if not requested.settings_agree(self._group.terms):
            if others:
                raise self._conflict(heartbeat, others, self._group.terms)
            kept = self._group.terms.subscriptions
            self._group = replace(self._group, terms=replace(requested, subscriptions=kept))
        target = target_of(self._group)
        if requested.subscriptions == target:
            return
        if requested.broadcasting or not target:
            if not others:
                self._subscribe(requested.subscriptions)
            return
        # A member that repeats its subscription must not win against a newer one by repetition.
        is_new = member is None or member.subscription_hash != hash_of(requested.subscriptions)
        is_backed = any(m.subscription_hash == hash_of(target) for m in others)
        self._apply_policy(heartbeat, others, is_new=is_new, may_replace=is_new or not is_backed)

    def _apply_policy(
        self, heartbeat: Heartbeat, others: list[Member], *, is_new: bool, may_replace: bool
    ) -> None:
        """Apply the policy to a subscription that differs from the present or the next one.

        Args:
            is_new: The sender has this subscription for the first time.
            may_replace: `is_new`, or no other live member has the group's subscription.
        """
        requested, policy = heartbeat.terms.subscriptions, self._group.policy
        if policy is SubscriptionPolicy.WARN:
            if may_replace:
                self._replace(heartbeat, others)
        elif not others:
            self._stage(requested, draining=True)
        elif policy is SubscriptionPolicy.REJECT:
            raise self._conflict(heartbeat, others, self._group.terms)
        elif self._group.draining:
            if is_new and requested != self._group.terms.subscriptions:
                raise self._conflict(heartbeat, others, self._group.terms)
        elif policy is SubscriptionPolicy.STAGED_LATEST:
            if may_replace:
                self._stage(requested, draining=True)
        else:
            self._stage_until_agreed(heartbeat, others)

    def _stage_until_agreed(self, heartbeat: Heartbeat, others: list[Member]) -> None:
        """Stage the sender's subscription until all members have it.

        Raises:
            SubscriptionConflict: another member has a third subscription staged.
        """
        staged, requested = self._group.staged, heartbeat.terms.subscriptions
        if staged is not None and staged.subscriptions != requested:
            waiting = hash_of(staged.subscriptions)
            if any(m.subscription_hash == waiting for m in others):
                terms = replace(self._group.terms, subscriptions=staged.subscriptions)
                raise self._conflict(heartbeat, others, terms)
            staged = None
        if staged is None:
            self._stage(requested, draining=False)

    def _conflict(self, heartbeat: Heartbeat, others: list[Member], terms: Terms) -> Exception:
        """Return the error with the differences to `terms`; while draining, to the next terms."""
        if self._group.draining:
            terms = replace(terms, subscriptions=target_of(self._group))
        named = longest_member(others, hash_of(terms.subscriptions))
        retry_after_ms = DRAIN_RETRY_MS if self._group.draining else 0
        return conflict_error(heartbeat, terms, named, retry_after_ms=retry_after_ms)

    def _replace(self, heartbeat: Heartbeat, others: list[Member]) -> None:
        """Put the sender's subscription in force at once, whatever the other members have."""
        previous = replace(self._group.terms, subscriptions=target_of(self._group))
        if self._group.draining:
            self._stage(heartbeat.terms.subscriptions, draining=True)
        else:
            self._subscribe(heartbeat.terms.subscriptions)
        if others:
            named = longest_member(others, hash_of(previous.subscriptions))
            replaced = differences(heartbeat, previous, named)
            self.replaced[heartbeat.client_id] = replaced

    def _stage(self, subscriptions: Subscriptions, *, draining: bool) -> None:
        before = self._group.staged
        since = before.since_unix_ms if before and before.draining else self._now_unix_ms
        self._group = replace(
            self._group, staged=StagedSubscription(subscriptions, draining, since)
        )

    def _subscribe(self, subscriptions: Subscriptions) -> None:
        self._group = replace(
            self._group,
            terms=replace(self._group.terms, subscriptions=subscriptions),
            subscription_generation=self._group.subscription_generation + 1,
            staged=None,
        )


def target_of(group: Group) -> Subscriptions:
    """Return the subscription in force; while draining, the decided next one."""
    if group.staged is not None and group.staged.draining:
        return group.staged.subscriptions
    return group.terms.subscriptions


def verdict_of(group: Group, heartbeat: Heartbeat) -> SubscriptionVerdict:
    """Return the verdict on the subscription of a member of this record."""
    requested = heartbeat.terms.subscriptions
    if group.terms.broadcasting or (requested == group.terms.subscriptions and not group.draining):
        return ACCEPTED
    terms = group.terms
    if group.staged is not None and group.staged.subscriptions == requested:
        kind = SubscriptionVerdictKind.STAGED
    else:
        kind = SubscriptionVerdictKind.OVERRULED
        terms = replace(terms, subscriptions=target_of(group))
    others = [m for m in group.members if not heartbeat.is_from(m)]
    named = longest_member(others, hash_of(terms.subscriptions))
    return SubscriptionVerdict(kind, differences(heartbeat, terms, named))


def _paused(pause: Pause | None, settings: GroupSettings) -> Pause | None:
    """Return the pause after the change; a repeated pause keeps its start."""
    if settings.paused is None:
        return pause
    if not settings.paused or settings.pause is None:
        return None
    same = pause is not None and (pause.by, pause.reason) == (
        settings.pause.by,
        settings.pause.reason,
    )
    return pause if same else settings.pause


def _still_staged(group: Group, members: tuple[Member, ...]) -> StagedSubscription | None:
    """Return what stays staged with these members."""
    staged = group.staged
    if staged is None or group.terms.broadcasting:
        return None
    if staged.draining:
        return staged
    waiting = hash_of(staged.subscriptions)
    agreeing = [member.subscription_hash == waiting for member in members]
    if group.policy not in (SubscriptionPolicy.STAGED, SubscriptionPolicy.STAGED_LATEST) or not any(
        agreeing
    ):
        return None
    decided = all(agreeing) or group.policy is SubscriptionPolicy.STAGED_LATEST
    return replace(staged, draining=decided)
