"""Administration of a cluster: topics, groups, locks, resets, dead letters, traces, access.

from batonmq.admin import Admin, DeadLetters

The names in `__all__` are public; the modules of this package are not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batonmq._core.dead_letters import Criteria, DeadLetter
    from batonmq._core.reset_targets import ShiftBy, ToEarliest, ToLatest, ToOffset, ToTime
    from batonmq.admin.access import AccessControl, Role
    from batonmq.admin.admin import Admin
    from batonmq.admin.dead_letters import DeadLetters
    from batonmq.admin.diagnostics import Diagnostics
    from batonmq.admin.event_watch import EventWatch
    from batonmq.admin.locks import Locks
    from batonmq.admin.message_queries import MessageQueries
    from batonmq.admin.message_tracer import MessageTracer
    from batonmq.admin.operation import Operation
    from batonmq.admin.redriver import Redriver
    from batonmq.admin.resets import Resets, ResetScope
    from batonmq.admin.topic_stats import TopicStats

__all__ = [
    "AccessControl",
    "Admin",
    "Criteria",
    "DeadLetter",
    "DeadLetters",
    "Diagnostics",
    "EventWatch",
    "Locks",
    "MessageQueries",
    "MessageTracer",
    "Operation",
    "Redriver",
    "ResetScope",
    "Resets",
    "Role",
    "ShiftBy",
    "ToEarliest",
    "ToLatest",
    "ToOffset",
    "ToTime",
    "TopicStats",
]

_HOMES = {
    "AccessControl": "batonmq.admin.access",
    "Admin": "batonmq.admin.admin",
    "Criteria": "batonmq._core.dead_letters",
    "DeadLetter": "batonmq._core.dead_letters",
    "DeadLetters": "batonmq.admin.dead_letters",
    "Diagnostics": "batonmq.admin.diagnostics",
    "EventWatch": "batonmq.admin.event_watch",
    "Locks": "batonmq.admin.locks",
    "Operation": "batonmq.admin.operation",
    "MessageQueries": "batonmq.admin.message_queries",
    "Redriver": "batonmq.admin.redriver",
    "Resets": "batonmq.admin.resets",
    "Role": "batonmq.admin.access",
    "ResetScope": "batonmq.admin.resets",
    "ShiftBy": "batonmq._core.reset_targets",
    "ToEarliest": "batonmq._core.reset_targets",
    "ToLatest": "batonmq._core.reset_targets",
    "ToOffset": "batonmq._core.reset_targets",
    "ToTime": "batonmq._core.reset_targets",
    "TopicStats": "batonmq.admin.topic_stats",
    "MessageTracer": "batonmq.admin.message_tracer",
}


def __getattr__(name: str) -> object:
    """Load a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'batonmq.admin' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
