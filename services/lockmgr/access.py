"""Permissions that the calls of the lock manager need."""

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
    """Return the permission for a group; a request without a group concerns all groups."""
    return [join_group(request.group) if request.group else OPERATE]


def _release_all(request: Any) -> list[Permission]:
    """Return the permission to release own queues, or those of another client."""
    if request.by and request.group:
        return [administer_group(request.group)]
    return [OPERATE] if request.by else _of_group(request)


RULES: AccessRules = rules_by_path(
    "baton.lockmgr.v1.LockmgrService",
    {
        "Acquire": requires_by_request(queues_permissions("items")),
        "KeepAlive": requires_by_request(queues_permissions("holds")),
        "Release": requires_by_request(queues_permissions("holds")),
        "ReleaseAll": requires_by_request(_release_all),
        "ForceRelease": requires_by_request(
            lambda request: [administer_group(request.queue.group)]
        ),
        # A stream concerns one incarnation, which includes the owner number of the caller.
        "Watch": requires(ANY_GRANT),
        "Describe": requires_by_request(
            lambda request: queue_permissions(request.queue), ["nameserver"]
        ),
        "List": requires_by_request(_of_group, ["nameserver"]),
    },
)
