"""Administration of a cluster: topics, groups, locks, resets, dead letters, access, replicas.

from batonmq.admin import Admin, DeadLetters

The names in `__all__` are public; the modules of this package are not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batonmq._core.dead_letters import Criteria, DeadLetter
    from batonmq._core.message_trace import MessageState, MessageTrace, TraceEvent, TraceEventKind
    from batonmq._core.reset_targets import ShiftBy, ToEarliest, ToLatest, ToOffset, ToTime
    from batonmq.admin.access import (
        AccessBlock,
        AccessCheck,
        AccessControl,
        IdentityGrants,
        IssuedToken,
        NewToken,
        Role,
        RoleGrant,
    )
    from batonmq.admin.admin import Admin
    from batonmq.admin.dead_letters import DeadLetters, DeadLetterSummaries, DeadLetterSummary
    from batonmq.admin.diagnostics import Diagnostics
    from batonmq.admin.effective_settings import NodeSetting, node_settings
    from batonmq.admin.event_watch import EventWatch
    from batonmq.admin.group_lag import GroupLag, group_lags
    from batonmq.admin.group_reports import (
        Assignment,
        Group,
        GroupProgress,
        Member,
        Pause,
        QueueDiagnosis,
        QueueProgress,
        RefusedClient,
        StagedSubscriptions,
        Subscription,
    )
    from batonmq.admin.locks import Denial, ForcedRelease, LockDetail, Locks, ReleasedQueues
    from batonmq.admin.message_queries import (
        KeyMatches,
        MessagePage,
        MessageQueries,
        StoredMessage,
        StoreTimeRange,
    )
    from batonmq.admin.message_tracer import GroupTrace, MessageCopy, MessageTracer, TraceReport
    from batonmq.admin.operation import Operation
    from batonmq.admin.placement import GroupMove, OffsetsPlacement, locate_group, move_group
    from batonmq.admin.quotas import IdentityQuota, QuotaLimits, Quotas
    from batonmq.admin.redriver import RedriveOptions, Redriver, RedriveResult
    from batonmq.admin.replication import (
        AcceptedLoss,
        ElectionPlan,
        Replica,
        ReplicaPosition,
        elect,
        replicas,
        replicas_of,
    )
    from batonmq.admin.reports import (
        ClusterNodes,
        CreatedTopic,
        Lock,
        Node,
        QueueExtent,
        Topic,
        TopicDetail,
        TopicPurge,
    )
    from batonmq.admin.resets import (
        RecordedReset,
        ResetPlan,
        ResetResult,
        Resets,
        ResetScope,
        ResetStep,
    )
    from batonmq.admin.topic_stats import QueueStats, TopicStats
    from batonmq.admin.transactions import TransactionDetail, Transactions

__all__ = [
    "AcceptedLoss",
    "AccessBlock",
    "AccessCheck",
    "AccessControl",
    "Admin",
    "Assignment",
    "ClusterNodes",
    "CreatedTopic",
    "Criteria",
    "DeadLetter",
    "DeadLetterSummaries",
    "DeadLetterSummary",
    "DeadLetters",
    "Denial",
    "Diagnostics",
    "ElectionPlan",
    "EventWatch",
    "ForcedRelease",
    "Group",
    "GroupLag",
    "GroupMove",
    "GroupProgress",
    "GroupTrace",
    "IdentityGrants",
    "IdentityQuota",
    "IssuedToken",
    "KeyMatches",
    "Lock",
    "LockDetail",
    "Locks",
    "Member",
    "MessageCopy",
    "MessagePage",
    "MessageQueries",
    "MessageState",
    "MessageTrace",
    "MessageTracer",
    "NewToken",
    "Node",
    "NodeSetting",
    "OffsetsPlacement",
    "Operation",
    "Pause",
    "QueueDiagnosis",
    "QueueExtent",
    "QueueProgress",
    "QueueStats",
    "QuotaLimits",
    "Quotas",
    "RecordedReset",
    "RedriveOptions",
    "RedriveResult",
    "Redriver",
    "RefusedClient",
    "ReleasedQueues",
    "Replica",
    "ReplicaPosition",
    "ResetPlan",
    "ResetResult",
    "ResetScope",
    "ResetStep",
    "Resets",
    "Role",
    "RoleGrant",
    "ShiftBy",
    "StagedSubscriptions",
    "StoreTimeRange",
    "StoredMessage",
    "Subscription",
    "ToEarliest",
    "ToLatest",
    "ToOffset",
    "ToTime",
    "Topic",
    "TopicDetail",
    "TopicPurge",
    "TopicStats",
    "TraceEvent",
    "TraceEventKind",
    "TraceReport",
    "TransactionDetail",
    "Transactions",
    "elect",
    "group_lags",
    "locate_group",
    "move_group",
    "node_settings",
    "replicas",
    "replicas_of",
]

_HOMES = {
    "AcceptedLoss": "batonmq.admin.replication",
    "AccessBlock": "batonmq.admin.access",
    "AccessCheck": "batonmq.admin.access",
    "AccessControl": "batonmq.admin.access",
    "Admin": "batonmq.admin.admin",
    "Assignment": "batonmq.admin.group_reports",
    "ClusterNodes": "batonmq.admin.reports",
    "CreatedTopic": "batonmq.admin.reports",
    "Criteria": "batonmq._core.dead_letters",
    "DeadLetter": "batonmq._core.dead_letters",
    "DeadLetterSummaries": "batonmq.admin.dead_letters",
    "DeadLetterSummary": "batonmq.admin.dead_letters",
    "DeadLetters": "batonmq.admin.dead_letters",
    "Denial": "batonmq.admin.locks",
    "Diagnostics": "batonmq.admin.diagnostics",
    "ElectionPlan": "batonmq.admin.replication",
    "EventWatch": "batonmq.admin.event_watch",
    "ForcedRelease": "batonmq.admin.locks",
    "Group": "batonmq.admin.group_reports",
    "GroupLag": "batonmq.admin.group_lag",
    "GroupMove": "batonmq.admin.placement",
    "GroupProgress": "batonmq.admin.group_reports",
    "GroupTrace": "batonmq.admin.message_tracer",
    "IdentityGrants": "batonmq.admin.access",
    "IdentityQuota": "batonmq.admin.quotas",
    "IssuedToken": "batonmq.admin.access",
    "KeyMatches": "batonmq.admin.message_queries",
    "Lock": "batonmq.admin.reports",
    "LockDetail": "batonmq.admin.locks",
    "Locks": "batonmq.admin.locks",
    "Member": "batonmq.admin.group_reports",
    "MessageCopy": "batonmq.admin.message_tracer",
    "MessagePage": "batonmq.admin.message_queries",
    "MessageQueries": "batonmq.admin.message_queries",
    "MessageState": "batonmq._core.message_trace",
    "MessageTrace": "batonmq._core.message_trace",
    "MessageTracer": "batonmq.admin.message_tracer",
    "NewToken": "batonmq.admin.access",
    "Node": "batonmq.admin.reports",
    "NodeSetting": "batonmq.admin.effective_settings",
    "OffsetsPlacement": "batonmq.admin.placement",
    "Operation": "batonmq.admin.operation",
    "Pause": "batonmq.admin.group_reports",
    "QueueDiagnosis": "batonmq.admin.group_reports",
    "QueueExtent": "batonmq.admin.reports",
    "QueueProgress": "batonmq.admin.group_reports",
    "QueueStats": "batonmq.admin.topic_stats",
    "QuotaLimits": "batonmq.admin.quotas",
    "Quotas": "batonmq.admin.quotas",
    "RecordedReset": "batonmq.admin.resets",
    "RedriveOptions": "batonmq.admin.redriver",
    "RedriveResult": "batonmq.admin.redriver",
    "Redriver": "batonmq.admin.redriver",
    "RefusedClient": "batonmq.admin.group_reports",
    "ReleasedQueues": "batonmq.admin.locks",
    "Replica": "batonmq.admin.replication",
    "ReplicaPosition": "batonmq.admin.replication",
    "ResetPlan": "batonmq.admin.resets",
    "ResetResult": "batonmq.admin.resets",
    "ResetScope": "batonmq.admin.resets",
    "ResetStep": "batonmq.admin.resets",
    "Resets": "batonmq.admin.resets",
    "Role": "batonmq.admin.access",
    "RoleGrant": "batonmq.admin.access",
    "ShiftBy": "batonmq._core.reset_targets",
    "StagedSubscriptions": "batonmq.admin.group_reports",
    "StoreTimeRange": "batonmq.admin.message_queries",
    "StoredMessage": "batonmq.admin.message_queries",
    "Subscription": "batonmq.admin.group_reports",
    "ToEarliest": "batonmq._core.reset_targets",
    "ToLatest": "batonmq._core.reset_targets",
    "ToOffset": "batonmq._core.reset_targets",
    "ToTime": "batonmq._core.reset_targets",
    "Topic": "batonmq.admin.reports",
    "TopicDetail": "batonmq.admin.reports",
    "TopicPurge": "batonmq.admin.reports",
    "TopicStats": "batonmq.admin.topic_stats",
    "TraceEvent": "batonmq._core.message_trace",
    "TraceEventKind": "batonmq._core.message_trace",
    "TraceReport": "batonmq.admin.message_tracer",
    "TransactionDetail": "batonmq.admin.transactions",
    "Transactions": "batonmq.admin.transactions",
    "elect": "batonmq.admin.replication",
    "group_lags": "batonmq.admin.group_lag",
    "locate_group": "batonmq.admin.placement",
    "move_group": "batonmq.admin.placement",
    "node_settings": "batonmq.admin.effective_settings",
    "replicas": "batonmq.admin.replication",
    "replicas_of": "batonmq.admin.replication",
}


def __getattr__(name: str) -> object:
    """Load a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'batonmq.admin' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
