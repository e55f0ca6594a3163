"""One call about a group on its way: what it asks, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from batonmq.errors import BatonError, Difference
from batonmq_server.nameserver.core.group_transaction import GroupTransaction, SubscriptionVerdict
from batonmq_server.nameserver.core.groups import Group, Heartbeat, Member


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChange:
    """A record that was written.

    Attributes:
        before: The record before; None if it is new.
        expired: Members that were taken out because they had died.
        joined: Client ids of members that came or came back.
        left: Client ids of members that were taken out by a call.
        replaced: Differences, by client id, of who replaced the subscription of others.
    """

    before: Group | None
    group: Group
    revision: int
    expired: tuple[Member, ...] = ()
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    replaced: Mapping[str, tuple[Difference, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """What became of a call.

    Attributes:
        group: The record now; None if there is none.
        group_revision: At which it was written.
        live_revision: At which live keys were written or deleted; 0 if none were.
        change: What was written for this call and perhaps others; None if nothing was.
        verdict: On a heartbeat.
        left: Whether the process that leaves was a member.
    """

    group: Group | None
    group_revision: int
    live_revision: int = 0
    change: GroupChange | None = None
    verdict: SubscriptionVerdict | None = None
    left: bool = False


@dataclass(frozen=True, slots=True)
class GroupWrite:
    """The record after a batch of calls; revision 0 if the race was lost."""

    group: Group | None
    revision: int
    live_revision: int = 0
    change: GroupChange | None = None


@dataclass(eq=False, slots=True)
class GroupRequest:
    """One call about a group; settled once it has an outcome or an error.

    Attributes:
        decide: Puts the call to the ledger; returns True for a member that leaves.
        heartbeat: If that is what the call is.
        tends: Whether what is due is to be done.
    """

    decide: Callable[[GroupTransaction], bool | None]
    heartbeat: Heartbeat | None = None
    tends: bool = False
    left: bool = False
    error: BatonError | None = None
    outcome: GroupOutcome | None = None

    @property
    def is_settled(self) -> bool:
        """Whether it is known what became of it."""
        return self.error is not None or self.outcome is not None

    def put_to(self, ledger: GroupTransaction) -> None:
        """Let the ledger decide; a refusal is kept."""
        try:
            self.left = bool(self.decide(ledger))
        except BatonError as error:
            self.error = error

    def settle(self, ledger: GroupTransaction, written: GroupWrite) -> None:
        """Take what was written as the outcome, unless it was refused."""
        if self.error is not None:
            return
        verdict = None
        if self.heartbeat is not None and written.group is not None:
            verdict = ledger.verdict(self.heartbeat, written.group)
        self.outcome = GroupOutcome(
            group=written.group,
            group_revision=written.revision,
            live_revision=written.live_revision,
            change=written.change,
            verdict=verdict,
            left=self.left,
        )
