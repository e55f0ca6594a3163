"""Decides over one group: what its record becomes when somebody comes, goes or disagrees.

The rule behind all policies but WARN (protocol section 14): two subscriptions never serve a group
at one time. A subscription is changed in two steps. First the change is decided: the record says
"draining", nobody gets a queue any more, and every owner gives back what it has. Once no queue has
an owner, the new subscription counts and the queues are dealt out anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

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


class SubscriptionVerdictKind(Enum):
    """What became of the subscription of a heartbeat that was accepted."""

    ACCEPTED = "ACCEPTED"
    STAGED = "STAGED"
    REPLACED = "REPLACED"
    OVERRULED = "OVERRULED"


@dataclass(frozen=True, slots=True)
class SubscriptionVerdict:
    """What became of a subscription, and on what it differs from the group's."""

    kind: SubscriptionVerdictKind
    differences: tuple[Difference, ...] = ()


ACCEPTED = SubscriptionVerdict(SubscriptionVerdictKind.ACCEPTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """Settings to change; None leaves them as they are.

    Attributes:
        paused: Whether an operator stops the deliveries; then `pause` says who and why.
    """

    policy: SubscriptionPolicy | None = None
    owned: bool | None = None
    strategy: AssignmentStrategy | None = None
    paused: bool | None = None
    pause: Pause | None = None


class GroupTransaction:
    """One group's record, and what is asked of it in turn; `settled` is what it becomes.

    What raises has changed nothing.

    Args:
        group: The record as it stands; None if the group is new.
        live: Incarnation ids of the processes whose member lease is alive, by client id. It is
            at least as new as `group`. A recorded member that is not here has died.
        lease_ms: Length of a member lease.
        first_generation: Of the record if it is new.

    Attributes:
        joined: Incarnation ids, by client id, of members that need a live key.
        left: Client ids of members that gave theirs up.
        replaced: Differences by client id, of those who replaced the subscription of others.
    """

    def __init__(
        self,
        name: str,
        group: Group | None,
        live: Mapping[str, int],
        *,
        now_unix_ms: int,
        lease_ms: int,
        first_generation: int = 1,
    ) -> None:
        self._stored = group
        self._before = group or Group(name=name, generation=first_generation - 1)
        self._group = self._before
        self._members = {member.client_id: member for member in self._before.members}
        self._live = dict(live)
        self._now_unix_ms, self._lease_ms = now_unix_ms, lease_ms
        self._settled: Group | None = None
        self._wanted = False
        self.joined: dict[str, int] = {}
        self.left: set[str] = set()
        self.replaced: dict[str, tuple[Difference, ...]] = {}

    def join(self, heartbeat: Heartbeat) -> None:
        """Make the sender a member, or let it stay one, on its terms.

        A member that comes back before it was taken out stays one, even if its lease has ended.

        Raises:
            ClientIdInUse: another living process has the client id.
            SubscriptionConflict: the policy refuses its terms.
            Overloaded: the group is full.
        """
        self._check_client_id(heartbeat)
        member = self._members.get(heartbeat.client_id)
        if member is not None and not heartbeat.is_from(member):
            member = None
        others = [m for m in self._living() if not heartbeat.is_from(m)]
        if member is None and len(others) >= MEMBERS_MAX:
            raise Overloaded(
                f"the group has {MEMBERS_MAX} members, the most it may have",
                remedy="Use more than one group, or fewer processes.",
                retry_after_ms=10_000,
                facts={"limit": MEMBERS_MAX},
            )
        self._agree(heartbeat, member, others)
        self._admit(heartbeat, member)

    def leave(self, client_id: str, incarnation_id: int) -> bool:
        """Take this process out; False if it is no member."""
        member = self._members.get(client_id)
        if member is None or member.incarnation_id != incarnation_id:
            return False
        self._settled = None
        del self._members[client_id]
        self._live.pop(client_id, None)
        self.joined.pop(client_id, None)
        self.left.add(client_id)
        return True

    def update(self, settings: GroupSettings) -> None:
        """Change settings; a group that does not exist comes into being.

        Raises:
            GroupInUse: ownership can't change while a member lives.
        """
        group = self._group
        if settings.owned not in (None, group.owned):
            self.check_unused("its ownership can't be changed")
        self._settled, self._wanted = None, True
        self._group = replace(
            group,
            policy=settings.policy or group.policy,
            owned=group.owned if settings.owned is None else settings.owned,
            strategy=settings.strategy or group.strategy,
            pause=_paused(group.pause, settings),
        )

    def check_unused(self, why: str) -> None:
        """Refuse what needs a group without members.

        Raises:
            GroupInUse: one lives.
        """
        count = len(self._living())
        if count:
            raise GroupInUse(
                f"group {self._group.name} has {count} live members: {why}",
                facts={"group": self._group.name, "members": count},
            )

    def finish_draining(self) -> None:
        """Let the staged subscription count. Only when no queue of the group has an owner."""
        staged = self._group.staged
        if staged is not None and staged.draining:
            self._settled = None
            self._subscribe(staged.subscriptions)

    def settled(self) -> Group:
        """The record without the dead, with what follows from who asks for what; not yet dealt."""
        if self._settled is not None:
            return self._settled
        members = tuple(sorted(self._living(), key=lambda member: member.client_id))
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
        """Whether the record stays as it is, unless queues have to be dealt anew."""
        return self.settled() == self._before and not (self._wanted and self._stored is None)

    def dealt(self, topics: Iterable[Topic]) -> Group | None:
        """The record with its queues dealt out; the very record that stands if nothing changes.

        Args:
            topics: What the settled group subscribes to, as far as it exists.
        """
        after = self.settled()
        topics = list(topics)
        dealt = assign_topics(after, topics, self._before)
        after = replace(after, assignments=dealt, beginnings=beginnings_of(after, topics))
        if after == self._before and not (self._wanted and self._stored is None):
            return self._stored
        return replace(after, generation=self._before.generation + 1)

    def expired(self) -> tuple[Member, ...]:
        """Recorded members that have died and did not come back, ascending by client id."""
        dead = self._members.keys() - {member.client_id for member in self._living()}
        return tuple(self._members[client_id] for client_id in sorted(dead))

    def verdict(self, heartbeat: Heartbeat, after: Group) -> SubscriptionVerdict:
        """What became of a heartbeat that was accepted here; `after` is the record now."""
        replaced = self.replaced.get(heartbeat.client_id)
        if replaced and heartbeat.terms.subscriptions == target_of(after):
            return SubscriptionVerdict(SubscriptionVerdictKind.REPLACED, replaced)
        return verdict_of(after, heartbeat)

    def _living(self) -> list[Member]:
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
                    f"that crashed, try again until the old session has expired, "
                    f"{self._lease_ms} ms after its last heartbeat."
                ),
                retry_after_ms=self._lease_ms,
                facts={"client_id": member.client_id, "host": member.host},
            )

    def _admit(self, heartbeat: Heartbeat, member: Member | None) -> None:
        """Write the sender into the record."""
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
        )
        self.left.discard(client_id)
        if self._live.get(client_id) != incarnation_id:
            self._live[client_id] = self.joined[client_id] = incarnation_id

    def _agree(self, heartbeat: Heartbeat, member: Member | None, others: list[Member]) -> None:
        """Make the terms of the group and those of the sender agree, as the policy says.

        Args:
            member: The sender, if it is one already.
            others: Living members apart from the sender.

        Raises:
            SubscriptionConflict: the policy does not let them.
        """
        asked = heartbeat.terms
        if not asked.settings_agree(self._group.terms):
            if others:
                raise self._conflict(heartbeat, others, self._group.terms)
            kept = self._group.terms.subscriptions
            self._group = replace(self._group, terms=replace(asked, subscriptions=kept))
        target = target_of(self._group)
        if asked.subscriptions == target:
            return
        if asked.broadcasting or not target:
            if not others:
                self._subscribe(asked.subscriptions)
            return
        # Who just repeats what it asked for before does not win by that.
        is_new = member is None or member.subscription_hash != hash_of(asked.subscriptions)
        is_backed = any(m.subscription_hash == hash_of(target) for m in others)
        self._disagree(heartbeat, others, is_new=is_new, counts=is_new or not is_backed)

    def _disagree(
        self, heartbeat: Heartbeat, others: list[Member], *, is_new: bool, counts: bool
    ) -> None:
        """Do what the policy says of another subscription than the group has, or is to get.

        Args:
            is_new: The sender asks for it for the first time.
            counts: Also true if nobody else alive asks for what the group has.
        """
        asked, policy = heartbeat.terms.subscriptions, self._group.policy
        if policy is SubscriptionPolicy.WARN:
            if counts:
                self._replace(heartbeat, others)
        elif not others:
            self._stage(asked, draining=True)
        elif policy is SubscriptionPolicy.REJECT:
            raise self._conflict(heartbeat, others, self._group.terms)
        elif self._group.draining:
            if is_new and asked != self._group.terms.subscriptions:
                raise self._conflict(heartbeat, others, self._group.terms)
        elif policy is SubscriptionPolicy.STAGED_LATEST:
            if counts:
                self._stage(asked, draining=True)
        else:
            self._wait(heartbeat, others)

    def _wait(self, heartbeat: Heartbeat, others: list[Member]) -> None:
        """Stage the sender's subscription, unless others wait for another one already."""
        staged, asked = self._group.staged, heartbeat.terms.subscriptions
        if staged is not None and staged.subscriptions != asked:
            waiting = hash_of(staged.subscriptions)
            if any(m.subscription_hash == waiting for m in others):
                terms = replace(self._group.terms, subscriptions=staged.subscriptions)
                raise self._conflict(heartbeat, others, terms)
            staged = None
        if staged is None:
            self._stage(asked, draining=False)

    def _conflict(self, heartbeat: Heartbeat, others: list[Member], terms: Terms) -> Exception:
        """The refusal, with the differences to `terms`; while draining, to those that come."""
        if self._group.draining:
            terms = replace(terms, subscriptions=target_of(self._group))
        named = longest_member(others, hash_of(terms.subscriptions))
        retry_after_ms = DRAIN_RETRY_MS if self._group.draining else 0
        return conflict_error(heartbeat, terms, named, retry_after_ms=retry_after_ms)

    def _replace(self, heartbeat: Heartbeat, others: list[Member]) -> None:
        """Let the sender's subscription count at once, whatever the others want."""
        previous = replace(self._group.terms, subscriptions=target_of(self._group))
        if self._group.draining:
            self._stage(heartbeat.terms.subscriptions, draining=True)
        else:
            self._subscribe(heartbeat.terms.subscriptions)
        if others:
            named = longest_member(others, hash_of(previous.subscriptions))
            found = differences(heartbeat, previous, named)
            self.replaced[heartbeat.client_id] = found

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
    """What counts, or what is sure to count next."""
    if group.staged is not None and group.staged.draining:
        return group.staged.subscriptions
    return group.terms.subscriptions


def verdict_of(group: Group, heartbeat: Heartbeat) -> SubscriptionVerdict:
    """What a member's subscription is in this record."""
    asked = heartbeat.terms.subscriptions
    if group.terms.broadcasting or (asked == group.terms.subscriptions and not group.draining):
        return ACCEPTED
    terms = group.terms
    if group.staged is not None and group.staged.subscriptions == asked:
        kind = SubscriptionVerdictKind.STAGED
    else:
        kind = SubscriptionVerdictKind.OVERRULED
        terms = replace(terms, subscriptions=target_of(group))
    others = [m for m in group.members if not heartbeat.is_from(m)]
    named = longest_member(others, hash_of(terms.subscriptions))
    return SubscriptionVerdict(kind, differences(heartbeat, terms, named))


def _paused(pause: Pause | None, settings: GroupSettings) -> Pause | None:
    """The pause after the change; one that is repeated goes on."""
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
    """What is staged, now that these are the members."""
    staged = group.staged
    if staged is None or group.terms.broadcasting:
        return None
    if staged.draining:
        return staged
    waiting = hash_of(staged.subscriptions)
    asking = [member.subscription_hash == waiting for member in members]
    if group.policy not in (SubscriptionPolicy.STAGED, SubscriptionPolicy.STAGED_LATEST) or not any(
        asking
    ):
        return None
    decided = all(asking) or group.policy is SubscriptionPolicy.STAGED_LATEST
    return replace(staged, draining=decided)
