"""What checks of a cluster read, and what they find. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from batonmq.admin.access import IdentityGrants
from batonmq.admin.dead_letters import DeadLetterSummary
from batonmq.admin.group_lag import GroupLag
from batonmq.admin.group_reports import Group
from batonmq.admin.node_state import NodeReport, ProcessState
from batonmq.admin.quotas import IdentityQuota
from batonmq.admin.replication import Replica
from batonmq.admin.reports import BrokerRemoval, DrainedNode, Topic
from batonmq.admin.transactions import TransactionDetail


class CheckLevel(StrEnum):
    """Result of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    UNKNOWN = "unknown"
    """An input could not be read."""

    @property
    def passed(self) -> bool:
        """Whether nothing has to be done now."""
        return self in (CheckLevel.OK, CheckLevel.WARNING)


@dataclass(frozen=True, slots=True)
class BrokerDisk:
    """Disk and damage of one storage node; `state` is ok, warn, clean, clean_forcibly or full."""

    state: str
    used_percent: float
    seconds_until_full: int
    damaged_batch_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """What was read from a cluster.

    Attributes:
        now_unix_ms: Clock of this machine.
        health: Health of each node, by service and node id.
        copies: Replicas by service and node id.
        disks: By node id of storage.
        transactions: The oldest open transaction of each broker.
        unread: By input, why it could not be read; see `ClusterCheck.inputs`.
    """

    now_unix_ms: int
    nodes: tuple[NodeReport, ...] = ()
    health: Mapping[tuple[str, str], str] = field(default_factory=dict)
    etcd_alarms: tuple[str, ...] = ()
    etcd_db_bytes: int = 0
    drained: tuple[DrainedNode, ...] = ()
    removals: tuple[BrokerRemoval, ...] = ()
    copies: Mapping[tuple[str, str], Replica] = field(default_factory=dict)
    disks: Mapping[str, BrokerDisk] = field(default_factory=dict)
    topics: tuple[Topic, ...] = ()
    groups: tuple[Group, ...] = ()
    lags: tuple[GroupLag, ...] = ()
    transactions: tuple[TransactionDetail, ...] = ()
    dead_letters: tuple[DeadLetterSummary, ...] = ()
    quotas: tuple[IdentityQuota, ...] = ()
    identities: tuple[IdentityGrants, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)

    @property
    def states(self) -> Iterator[tuple[str, ProcessState]]:
        """Name and state of each node that told its state."""
        return ((one.name, one.state) for one in self.nodes if one.state is not None)


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """What a check has found."""

    level: CheckLevel
    text: str
