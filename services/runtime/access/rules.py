"""Access rules: which permissions each method requires. Services declare theirs in tables.

A table has one rule for every method, under its full path. While access is on, calls of a method
without a rule are rejected. A rule depends on the request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

from batonmq._core.names import METRICS_TOPIC
from batonmq.errors import BatonError, LimitExceeded
from batonmq_server.runtime.access.permissions import (
    ANY_GRANT,
    OPERATE,
    Permission,
    consume,
    join_group,
)
from batonmq_server.runtime.access.quotas import Traffic

PERMISSIONS_MAX = 50_000
"""Permissions that one request may require: more than any request that a servicer takes. They are
found and checked without an await."""
FindPermissions = Callable[[Any], Iterable[Permission]]
"""Returns the permissions that a request requires."""


class PerItemRule(NamedTuple):
    """How the items of a batched call are rejected one by one.

    Attributes:
        items: Name of the request's repeated field.
        permission: Returns the permission that one item requires.
        outcomes: Name of the answer's repeated field, which has one outcome for each item.
        rejected: Makes the outcome of an item that is rejected.
    """

    items: str
    permission: Callable[[Any], Permission]
    outcomes: str
    rejected: Callable[[BatonError], Any]


class AccessRule(NamedTuple):
    """What a method requires of its callers.

    Attributes:
        permissions: Returns all permissions that the caller must have; if there are none, the
            caller needs a grant of any kind.
        services: Services that may call the method without these permissions.
        private: Only `services` may call the method.
        known: If `permissions` returns none, any authenticated caller may call the method.
        traffic: Whether the call writes or reads messages, for the quotas; None if neither.
        per_item: Set if items are rejected one by one; `permissions` then holds for the whole call.
    """

    permissions: FindPermissions
    services: frozenset[str] = frozenset()
    private: bool = False
    known: bool = False
    per_item: PerItemRule | None = None
    traffic: Traffic | None = None


AccessRules = Mapping[str, AccessRule]
SERVICES = frozenset({"storage", "offsets", "lockmgr", "nameserver"})


def permissions_of(rule: AccessRule | None, request: Any) -> tuple[Permission, ...]:
    """Return the permissions that a request requires by a rule; none without a rule.

    Raises:
        LimitExceeded: there are too many.
    """
    found = tuple(islice(rule.permissions(request), PERMISSIONS_MAX + 1)) if rule else ()
    if len(found) > PERMISSIONS_MAX:
        raise LimitExceeded(
            f"the request names topics and groups more than {PERMISSIONS_MAX} times",
            remedy="Use several requests.",
            facts={"field": "request", "limit": PERMISSIONS_MAX},
        )
    return found


def rules_by_path(service: str, rules: Mapping[str, AccessRule]) -> dict[str, AccessRule]:
    """Return the rules of a service's methods by full path, such as `/baton.x.v1.X/Method`."""
    return {f"/{service}/{method}": rule for method, rule in rules.items()}


def requires(*permissions: Permission, services: Iterable[str] = ()) -> AccessRule:
    """Return a rule with the same permissions for every request."""
    return AccessRule(lambda _: permissions, frozenset(services))


def requires_by_request(find: FindPermissions, services: Iterable[str] = ()) -> AccessRule:
    """Return a rule with the permissions that `find` returns for the request."""
    return AccessRule(find, frozenset(services))


def services_only(*services: str) -> AccessRule:
    """Return a rule that lets only these services call the method."""
    return AccessRule(lambda _: (), frozenset(services), private=True)


def queue_permissions(queue: Any) -> tuple[Permission, Permission]:
    """Return the permissions to work on a group's queue."""
    return consume(queue.queue.topic), join_group(queue.group)


def queues_permissions(items: str) -> FindPermissions:
    """Return a function that finds the permissions for all items, each with a group's queue.

    Args:
        items: Name of the request's repeated field.
    """
    return lambda request: (
        permission
        for item in getattr(request, items)
        for permission in queue_permissions(item.queue)
    )


COMMON_RULES: AccessRules = {
    **rules_by_path(
        "grpc.health.v1.Health",
        {name: AccessRule(lambda _: (), known=True) for name in ("Check", "Watch", "List")},
    ),
    **rules_by_path(
        "grpc.reflection.v1alpha.ServerReflection", {"ServerReflectionInfo": requires(ANY_GRANT)}
    ),
    **rules_by_path("baton.metrics.v1.MetricsService", {"Watch": requires(consume(METRICS_TOPIC))}),
    **rules_by_path("baton.settings.v1.SettingsService", {"Describe": requires(OPERATE)}),
    # Each call of the stream is checked by the rule of its method.
    **rules_by_path(
        "baton.calls.v1.CallService", {"Exchange": AccessRule(lambda _: (), known=True)}
    ),
}
"""Rules of the methods that every process serves."""
