"""Who may make the calls of the lock manager. Rules of locks are in `core`."""

from __future__ import annotations

from typing import Any

from batonmq_server.runtime.access.permissions import (
    ANY_GRANT,
    OPERATE,
    Permission,
    administer_group,
    join_group,
)
from batonmq_server.runtime.access.rules import (
    AccessRules,
    queue_permissions,
    queues_permissions,
    requires,
    requires_by_request,
    rules_by_path,
)


def _of_group(request: Any) -> list[Permission]:
    """A request without a group is about all of them."""
    return [join_group(request.group) if request.group else OPERATE]


RULES: AccessRules = rules_by_path(
    "baton.lockmgr.v1.LockmgrService",
    {
        "Acquire": requires_by_request(queues_permissions("items")),
        "KeepAlive": requires_by_request(queues_permissions("holds")),
        "Release": requires_by_request(queues_permissions("holds")),
        "ReleaseAll": requires_by_request(_of_group),
        "ForceRelease": requires_by_request(
            lambda request: [administer_group(request.queue.group)]
        ),
        # Of one incarnation, whose random id only it and those it talks to know.
        "Watch": requires(ANY_GRANT),
        "Describe": requires_by_request(
            lambda request: queue_permissions(request.queue), ["nameserver"]
        ),
        "List": requires_by_request(_of_group, ["nameserver"]),
    },
)
