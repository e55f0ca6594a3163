"""Who may make the calls of the lock manager. Rules of locks are in `core`."""

from __future__ import annotations

from typing import Any

from batonmq_server.runtime.access.permissions import ANYTHING, OPERATE, Need, administer, join
from batonmq_server.runtime.access.rules import Rules, needs, of_queue, of_queues, on, rules_of


def _of_group(request: Any) -> list[Need]:
    """A request without a group is about all of them."""
    return [join(request.group) if request.group else OPERATE]


RULES: Rules = rules_of(
    "baton.lockmgr.v1.LockmgrService",
    {
        "Acquire": on(of_queues("items")),
        "KeepAlive": on(of_queues("holds")),
        "Release": on(of_queues("holds")),
        "ReleaseAll": on(_of_group),
        "ForceRelease": on(lambda request: [administer(request.queue.group)]),
        # Of one incarnation, whose random id only it and those it talks to know.
        "Watch": needs(ANYTHING),
        "Describe": on(lambda request: of_queue(request.queue), ["nameserver"]),
        "List": on(_of_group, ["nameserver"]),
    },
)
