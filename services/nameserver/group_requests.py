"""Requests about one group, and what was written for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from batonmq.errors import BatonError, Difference
from batonmq_server.nameserver.core.group_transaction import GroupTransaction, SubscriptionVerdict
from batonmq_server.nameserver.core.groups import Group, Heartbeat, Member


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChange:
    """A group record that was written.

    Attributes:
        before: The record before; None if the group is new.
        expired: Members that were removed because they were dead.
        joined: Client ids of members that joined or came back.
        left: Client ids of members that a request removed.
        replaced: Differences, by client id, of members whose subscription replaced that of others.
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
    """The outcome of a request.

    Attributes:
        group: The record after it; None if there is none.
        group_revision: Revision of that record in etcd.
        live_revision: Revision at which live keys were written or deleted; 0 if none were.
        change: What was written for this request and perhaps others; None if nothing was.
        verdict: On the subscription of a heartbeat.
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
    """The record after a batch of requests; revision 0 if another writer was faster."""

    group: Group | None
    revision: int
    live_revision: int = 0
    change: GroupChange | None = None


@dataclass(eq=False, slots=True)
class GroupRequest:
    """A request about a group; done once it has an outcome or an error.

    Attributes:
        apply: Applies the request to a transaction; returns True for a member that leaves.
        heartbeat: The heartbeat, if the request is one.
        maintains: Whether a finished drain is to be ended, and queues are to be assigned anew.
    """

    apply: Callable[[GroupTransaction], bool | None]
    heartbeat: Heartbeat | None = None
    maintains: bool = False
    left: bool = False
    error: BatonError | None = None
    outcome: GroupOutcome | None = None

    @property
    def is_done(self) -> bool:
        """Whether there is an outcome or an error."""
        return self.error is not None or self.outcome is not None

    def apply_to(self, transaction: GroupTransaction) -> None:
        """Apply the request to the transaction; keep the error if it is refused."""
        try:
            self.left = bool(self.apply(transaction))
        except BatonError as error:
            self.error = error

    def finish(self, transaction: GroupTransaction, written: GroupWrite) -> None:
        """Take what was written as the outcome, unless the request was refused."""
        if self.error is not None:
            return
        verdict = None
        if self.heartbeat is not None and written.group is not None:
            verdict = transaction.verdict(self.heartbeat, written.group)
        self.outcome = GroupOutcome(
            group=written.group,
            group_revision=written.revision,
            live_revision=written.live_revision,
            change=written.change,
            verdict=verdict,
            left=self.left,
        )
