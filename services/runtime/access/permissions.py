"""Grants of roles, and the permissions that calls require. Pure: without calls, etcd or clock.

An identity comes from a certificate or a token. It has grants, each a role on a resource:
`topic:orders`, `group:audit` or `cluster`. A name that ends in `*` covers all names with that
prefix. A call without a grant for its permissions is rejected.

- `admin` on a resource includes every role on it; `admin` on the cluster includes everything.
- The retry and dead letter topics of a group belong to the group: grants on topics don't cover
  them.
- `*` alone does not cover system topics; a pattern with their prefix does.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from batonmq._core.names import METRICS_TOPIC, check_group, check_topic, is_system_topic
from batonmq._core.retries import group_of
from batonmq.errors import InvalidArgument, PermissionDenied, Unauthenticated

SERVICE_PREFIX = "service:"
"""Prefix of the identities of services, such as `service:storage`."""
IDENTITY_CHARACTERS_MAX = 255
CLUSTER = "cluster"
_DECISIONS_MAX = 65_536
_NAME_CHARACTERS_MAX = 127
"""Longest valid name of a topic or group. Requests may contain longer names: these are not cached,
and errors show only their beginning."""
_SHOWN_MAX = 5
"""Missing permissions that an error names."""


class AccessRole(StrEnum):
    """What an identity may do with a resource."""

    PRODUCE = "produce"
    CONSUME = "consume"
    ADMIN = "admin"


class Permission(NamedTuple):
    """The permission that a call requires: one of some roles on one resource.

    Attributes:
        roles: Any of them is enough, and so is `admin`.
        kind: `topic`, `group` or `cluster`; empty if any grant is enough.
    """

    roles: tuple[AccessRole, ...]
    kind: str
    name: str = ""

    def __str__(self) -> str:
        """Return the text for errors, such as `produce on topic:orders`."""
        roles = " or ".join(self.roles)
        return f"{roles} on {self.resource}" if self.kind else "any grant"

    @property
    def resource(self) -> str:
        """The resource as grants name it."""
        return f"{self.kind}:{self.name[:_NAME_CHARACTERS_MAX]}" if self.name else self.kind


ANY_GRANT = Permission((), "")
"""Any grant is enough."""
OPERATE = Permission((AccessRole.ADMIN,), CLUSTER)


def produce(topic: str) -> Permission:
    """Return the permission to write messages to a topic."""
    return _on_topic(topic, AccessRole.PRODUCE)


def consume(topic: str) -> Permission:
    """Return the permission to read messages of a topic."""
    return _on_topic(topic, AccessRole.CONSUME)


def use_topic(topic: str) -> Permission:
    """Return the permission to see a topic, for producers and consumers of it."""
    return _on_topic(topic, AccessRole.PRODUCE, AccessRole.CONSUME)


def create_topic(topic: str) -> Permission:
    """Return the permission to create a topic; the topics of a group are created by its members."""
    return _on_topic(topic, AccessRole.CONSUME if group_of(topic) else AccessRole.ADMIN)


def change_topic(topic: str) -> Permission:
    """Return the permission to change or delete a topic."""
    group = group_of(topic)
    return administer_group(group) if group else Permission((AccessRole.ADMIN,), "topic", topic)


def join_group(group: str) -> Permission:
    """Return the permission to be a member of a group and to see its state."""
    return Permission((AccessRole.CONSUME,), "group", group)


def administer_group(group: str) -> Permission:
    """Return the permission to change a group or its progress."""
    return Permission((AccessRole.ADMIN,), "group", group)


def _on_topic(topic: str, *roles: AccessRole) -> Permission:
    group = group_of(topic)
    return join_group(group) if group else Permission(roles, "topic", topic)


class Grant(NamedTuple):
    """A role on a resource."""

    role: AccessRole
    resource: str

    def covers(self, permission: Permission) -> bool:
        """Return whether this grant includes `permission`."""
        if self.resource == CLUSTER or not permission.kind:
            return True
        if self.role is not AccessRole.ADMIN and self.role not in permission.roles:
            return False
        kind, _, pattern = self.resource.partition(":")
        if kind != permission.kind or not permission.name:
            return False
        if not pattern.endswith("*"):
            return pattern == permission.name
        if kind == "topic" and is_system_topic(permission.name) and not is_system_topic(pattern):
            return False
        return permission.name.startswith(pattern[:-1])


Scopes = frozenset[Grant]
"""The scopes of a token; empty for all permissions of its identity."""
NO_SCOPES: Scopes = frozenset()
_SERVICE_GRANTS = frozenset({Grant(AccessRole.PRODUCE, f"topic:{METRICS_TOPIC}")})
GATEWAY = f"{SERVICE_PREFIX}gateway"
_GATEWAY_GRANTS = _SERVICE_GRANTS | {
    Grant(AccessRole.PRODUCE, "topic:*"),
    Grant(AccessRole.CONSUME, "topic:*"),
    Grant(AccessRole.CONSUME, "group:*"),
}
"""Gateways act for their clients, and check the permissions of these clients themselves."""
_ADMIN_GRANTS = frozenset({Grant(AccessRole.ADMIN, CLUSTER)})


@dataclass(frozen=True, slots=True)
class BearerToken:
    """What is stored of a bearer token, which itself is never stored.

    Attributes:
        token_id: Name by which operators refer to it.
        expire_unix_ms: Wall clock from which on it is invalid; 0 for never.
        scopes: It gives only permissions that one of these covers, too; none: all of its identity.
        certificate_sha256: Certificate that it is bound to; empty for none.
    """

    identity: str
    token_id: str
    expire_unix_ms: int = 0
    scopes: frozenset[Grant] = frozenset()
    certificate_sha256: str = ""


class Authorizer:
    """Decides whether identities have permissions; caches decisions until a grant changes.

    Args:
        admins: Identities with the role admin on the cluster, without a grant.
    """

    def __init__(self, admins: Iterable[str] = ()) -> None:
        self._admins = frozenset(filter(None, admins))
        self._grants: dict[str, frozenset[Grant]] = {}
        self._tokens: dict[str, BearerToken] = {}
        self._decisions: dict[tuple[str, Permission], bool] = {}

    def set_grants(self, identity: str, grants: Iterable[Grant]) -> None:
        """Replace the grants of an identity; without grants all of them are revoked."""
        self._decisions.clear()
        self._grants[identity] = frozenset(grants)
        if not self._grants[identity]:
            del self._grants[identity]

    def set_token(self, digest: str, token: BearerToken | None) -> None:
        """Set the token with this digest; None revokes it."""
        if token is None:
            self._tokens.pop(digest, None)
        else:
            self._tokens[digest] = token

    def token_of(self, digest: str, now_unix_ms: int) -> BearerToken:
        """Return the token with this digest.

        Raises:
            Unauthenticated: there is no such token, or it was revoked or has expired.
        """
        token = self._tokens.get(digest)
        if token is None:
            raise Unauthenticated("the bearer token is unknown, was revoked or has expired")
        if 0 < token.expire_unix_ms <= now_unix_ms:
            raise Unauthenticated(
                f"the bearer token {token.token_id} of {token.identity} has expired",
                remedy="Create a new token: baton access token create.",
                facts={"identity": token.identity},
            )
        return token

    def grants_of(self, identity: str) -> frozenset[Grant]:
        """Return the grants of an identity, with those by settings and those of services."""
        granted = self._grants.get(identity, frozenset())
        if identity in self._admins:
            return granted | _ADMIN_GRANTS
        if identity == GATEWAY:
            return granted | _GATEWAY_GRANTS
        return granted | _SERVICE_GRANTS if identity.startswith(SERVICE_PREFIX) else granted

    def allows(self, identity: str, permission: Permission, scopes: Scopes = NO_SCOPES) -> bool:
        """Return whether a grant of the identity, and one of `scopes` if any, cover it."""
        if scopes and not any(scope.covers(permission) for scope in scopes):
            return False
        key = identity, permission
        allowed = self._decisions.get(key)
        if allowed is None:
            allowed = any(grant.covers(permission) for grant in self.grants_of(identity))
            if len(permission.name) <= _NAME_CHARACTERS_MAX:
                self._remember(key, allowed)
        return allowed

    def missing(
        self, identity: str, permissions: Iterable[Permission], scopes: Scopes = NO_SCOPES
    ) -> list[Permission]:
        """Return those of `permissions` that the identity does not have, each once."""
        lacking = (one for one in permissions if not self.allows(identity, one, scopes))
        return list(dict.fromkeys(lacking))

    def check(
        self, identity: str, permissions: Iterable[Permission], scopes: Scopes = NO_SCOPES
    ) -> None:
        """Return if the identity has all of `permissions`.

        Raises:
            PermissionDenied: some are missing; the error names them.
        """
        if lacking := self.missing(identity, permissions, scopes):
            raise permission_denied(identity, lacking, scoped=bool(scopes))

    def _remember(self, key: tuple[str, Permission], allowed: bool) -> None:
        if len(self._decisions) >= _DECISIONS_MAX:
            self._decisions.clear()
        self._decisions[key] = allowed


def grant_covering(grants: Iterable[Grant], permission: Permission) -> Grant | None:
    """Return the first of `grants`, in sorted order, that covers `permission`; else None."""
    return next((grant for grant in sorted(grants) if grant.covers(permission)), None)


def permission_denied(
    identity: str, lacking: list[Permission], *, scoped: bool = False
) -> PermissionDenied:
    """Return the error for an identity that lacks permissions, with the commands to grant them.

    Args:
        scoped: Whether the caller has a token with scopes.
    """
    shown = lacking[:_SHOWN_MAX]
    text = ", ".join(map(str, shown)) + (", ..." if len(lacking) > len(shown) else "")
    return PermissionDenied(
        f"{identity} lacks {text}" + (", or its token does not cover it" if scoped else ""),
        remedy="; ".join(_command(identity, permission) for permission in shown)
        + ("; or use a token whose scopes cover it" if scoped else ""),
        facts={
            "identity": identity,
            "role": lacking[0].roles[0] if lacking[0].roles else "",
            "resource": lacking[0].resource,
        },
    )


def _command(identity: str, permission: Permission) -> str:
    if not permission.kind:
        return f"Grant it a role: baton access grant {shlex.quote(identity)} ..."
    return f"baton access grant {shlex.join((identity, permission.roles[0], permission.resource))}"


def check_identity(identity: str) -> str:
    """Return `identity` if it is valid.

    Raises:
        InvalidArgument: it is empty, too long, or has white space or control characters.
    """
    good = identity.isprintable() and not any(one.isspace() for one in identity)
    if not good or not 0 < len(identity) <= IDENTITY_CHARACTERS_MAX:
        raise InvalidArgument(
            f"{identity[:IDENTITY_CHARACTERS_MAX]!r} is not a valid identity",
            remedy=f"Use 1 to {IDENTITY_CHARACTERS_MAX} visible characters.",
            facts={"field": "identity"},
        )
    return identity


def check_grant(role: AccessRole, resource: str) -> Grant:
    """Return the grant of a role on a resource.

    Raises:
        InvalidArgument, InvalidName: the resource is malformed, or can't have this role.
    """
    kind, _, pattern = resource.partition(":")
    allowed = _ROLES.get(kind)
    if allowed is None or (kind == CLUSTER) != (resource == CLUSTER):
        raise InvalidArgument(
            f"{resource[:200]!r} is not a resource",
            remedy="Use topic:NAME, group:NAME, both also with * at the end, or cluster.",
            facts={"field": "resource"},
        )
    if role not in allowed:
        raise InvalidArgument(
            f"the role {role} can't be granted on {resource[:200]}",
            remedy=f"Roles on a {kind}: {', '.join(allowed)}.",
            facts={"field": "role"},
        )
    name = pattern.removesuffix("*")
    if kind != CLUSTER and (name or not pattern):
        (check_topic if kind == "topic" else check_group)(name)
    if kind == "topic" and group_of(name):
        raise InvalidArgument(
            f"topic {name} belongs to group {group_of(name)}",
            remedy=f"Grant the role on group:{group_of(name)}.",
            facts={"field": "resource"},
        )
    return Grant(role, resource)


def permission_to_ask_about(wanted: Grant) -> Permission:
    """Return the permission that a grant, which passed `check_grant`, stands for.

    Raises:
        InvalidArgument: the grant covers many names.
    """
    kind, _, name = wanted.resource.partition(":")
    if name.endswith("*"):
        raise InvalidArgument(
            f"{wanted.resource} covers many names",
            remedy="Ask about one of these names.",
            facts={"field": "resource"},
        )
    return Permission((wanted.role,), kind, name)


_ROLES: Mapping[str, tuple[AccessRole, ...]] = {
    "topic": tuple(AccessRole),
    "group": (AccessRole.CONSUME, AccessRole.ADMIN),
    CLUSTER: (AccessRole.ADMIN,),
}
