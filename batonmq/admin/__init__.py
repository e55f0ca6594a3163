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
    from batonmq.admin.operation import Operation
    from batonmq.admin.query import Queries
    from batonmq.admin.redriving import Redriving
    from batonmq.admin.resets import Resets, Scope
    from batonmq.admin.topic_stats import TopicStats
    from batonmq.admin.trace import Tracer

__all__ = [
    "AccessControl",
    "Admin",
    "Criteria",
    "DeadLetter",
    "DeadLetters",
    "Diagnostics",
    "EventWatch",
    "Locks",
    "Operation",
    "Queries",
    "Redriving",
    "Resets",
    "Role",
    "Scope",
    "ShiftBy",
    "ToEarliest",
    "ToLatest",
    "ToOffset",
    "ToTime",
    "TopicStats",
    "Tracer",
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
    "Queries": "batonmq.admin.query",
    "Redriving": "batonmq.admin.redriving",
    "Resets": "batonmq.admin.resets",
    "Role": "batonmq.admin.access",
    "Scope": "batonmq.admin.resets",
    "ShiftBy": "batonmq._core.reset_targets",
    "ToEarliest": "batonmq._core.reset_targets",
    "ToLatest": "batonmq._core.reset_targets",
    "ToOffset": "batonmq._core.reset_targets",
    "ToTime": "batonmq._core.reset_targets",
    "TopicStats": "batonmq.admin.topic_stats",
    "Tracer": "batonmq.admin.trace",
}


def __getattr__(name: str) -> object:
    """Load a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'batonmq.admin' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
