"""Who may do what: grants of roles, and what calls need. Pure: knows no call, no etcd, no clock.

An identity is whoever a certificate or a token stands for. It has grants, each a role on a
resource: `topic:orders`, `group:audit`, `cluster`; a name that ends in `*` stands for all that
begin so. What is not granted is refused.

- `admin` on a resource is every role on it; `admin` on the cluster is every role on everything.
- The retry and dead letter topics of a group belong to the group: no topic's grant opens them.
- `*` leaves out the topics of the system; a pattern means them if it begins as they do.
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
"""Of the identities of the services, such as `service:storage`."""
IDENTITY_CHARACTERS_MAX = 255
CLUSTER = "cluster"
_DECISIONS_MAX = 65_536
_NAME_CHARACTERS_MAX = 127
"""Of topics and groups. Requests may name what is longer: it is neither remembered nor repeated."""
_TOLD_MAX = 5


class AccessRole(StrEnum):
    """What somebody may do with a resource."""

    PRODUCE = "produce"
    CONSUME = "consume"
    ADMIN = "admin"


class Permission(NamedTuple):
    """What a call needs: one of the roles on one resource.

    Attributes:
        roles: `admin` is always one of them.
        kind: `topic`, `group` or `cluster`; empty: any grant at all will do.
    """

    roles: tuple[AccessRole, ...]
    kind: str
    name: str = ""

    def __str__(self) -> str:
        """Such as `produce on topic:orders`."""
        roles = " or ".join(self.roles)
        return f"{roles} on {self.resource}" if self.kind else "any grant"

    @property
    def resource(self) -> str:
        """As a grant names it."""
        return f"{self.kind}:{self.name[:_NAME_CHARACTERS_MAX]}" if self.name else self.kind


ANY_GRANT = Permission((), "")
"""Whoever has any grant."""
OPERATE = Permission((AccessRole.ADMIN,), CLUSTER)


def produce(topic: str) -> Permission:
    """To write messages to a topic."""
    return _on_topic(topic, AccessRole.PRODUCE)


def consume(topic: str) -> Permission:
    """To read messages of a topic."""
    return _on_topic(topic, AccessRole.CONSUME)


def use_topic(topic: str) -> Permission:
    """To know of a topic, for whoever writes or reads it."""
    return _on_topic(topic, AccessRole.PRODUCE, AccessRole.CONSUME)


def create_topic(topic: str) -> Permission:
    """To create a topic; those of a group its members create."""
    return _on_topic(topic, AccessRole.CONSUME if group_of(topic) else AccessRole.ADMIN)


def change_topic(topic: str) -> Permission:
    """To change or delete a topic."""
    group = group_of(topic)
    return administer_group(group) if group else Permission((AccessRole.ADMIN,), "topic", topic)


def join_group(group: str) -> Permission:
    """To be a member of a group, and to see how it fares."""
    return Permission((AccessRole.CONSUME,), "group", group)


def administer_group(group: str) -> Permission:
    """To change a group or its progress."""
    return Permission((AccessRole.ADMIN,), "group", group)


def _on_topic(topic: str, *roles: AccessRole) -> Permission:
    group = group_of(topic)
    return join_group(group) if group else Permission(roles, "topic", topic)


class Grant(NamedTuple):
    """A role on a resource."""

    role: AccessRole
    resource: str

    def covers(self, need: Permission) -> bool:
        """Whether it is enough for `need`."""
        if self.resource == CLUSTER or not need.kind:
            return True
        if self.role is not AccessRole.ADMIN and self.role not in need.roles:
            return False
        kind, _, pattern = self.resource.partition(":")
        if kind != need.kind or not need.name:
            return False
        if not pattern.endswith("*"):
            return pattern == need.name
        if kind == "topic" and is_system_topic(need.name) and not is_system_topic(pattern):
            return False
        return need.name.startswith(pattern[:-1])


_SERVICE_GRANTS = frozenset({Grant(AccessRole.PRODUCE, f"topic:{METRICS_TOPIC}")})
_ADMIN_GRANTS = frozenset({Grant(AccessRole.ADMIN, CLUSTER)})


@dataclass(frozen=True, slots=True)
class BearerToken:
    """What is kept of a bearer token: never the token.

    Attributes:
        token_id: By which people name it.
    """

    identity: str
    token_id: str


class Authorizer:
    """Decides. Decisions are remembered until a grant changes.

    Args:
        admins: Identities that are admin on the cluster whatever is granted.
    """

    def __init__(self, admins: Iterable[str] = ()) -> None:
        self._admins = frozenset(filter(None, admins))
        self._grants: dict[str, frozenset[Grant]] = {}
        self._tokens: dict[str, BearerToken] = {}
        self._decisions: dict[tuple[str, Permission], bool] = {}

    def set_grants(self, identity: str, grants: Iterable[Grant]) -> None:
        """All that is granted to an identity from now on; none takes everything away."""
        self._decisions.clear()
        self._grants[identity] = frozenset(grants)
        if not self._grants[identity]:
            del self._grants[identity]

    def set_token(self, digest: str, token: BearerToken | None) -> None:
        """What the token with this digest stands for from now on."""
        if token is None:
            self._tokens.pop(digest, None)
        else:
            self._tokens[digest] = token

    def identity_of(self, digest: str) -> str:
        """What the token with this digest stands for.

        Raises:
            Unauthenticated: it was revoked, or never was one.
        """
        token = self._tokens.get(digest)
        if token is None:
            raise Unauthenticated("the bearer token is not known, or was revoked")
        return token.identity

    def grants_of(self, identity: str) -> frozenset[Grant]:
        """What an identity has, with what the settings or its being a service give it."""
        granted = self._grants.get(identity, frozenset())
        if identity in self._admins:
            return granted | _ADMIN_GRANTS
        return granted | _SERVICE_GRANTS if identity.startswith(SERVICE_PREFIX) else granted

    def allows(self, identity: str, need: Permission) -> bool:
        """Whether something that is granted covers `need`."""
        key = identity, need
        allowed = self._decisions.get(key)
        if allowed is None:
            allowed = grant_covering(self.grants_of(identity), need) is not None
            if len(need.name) <= _NAME_CHARACTERS_MAX:
                self._remember(key, allowed)
        return allowed

    def missing(self, identity: str, needs: Iterable[Permission]) -> list[Permission]:
        """What the identity would need and does not have, each once."""
        return list(dict.fromkeys(need for need in needs if not self.allows(identity, need)))

    def check(self, identity: str, needs: Iterable[Permission]) -> None:
        """Refuse whoever lacks one of `needs`.

        Raises:
            PermissionDenied: it names what is missing.
        """
        if lacking := self.missing(identity, needs):
            raise permission_denied(identity, lacking)

    def _remember(self, key: tuple[str, Permission], allowed: bool) -> None:
        if len(self._decisions) >= _DECISIONS_MAX:
            self._decisions.clear()
        self._decisions[key] = allowed


def grant_covering(grants: Iterable[Grant], need: Permission) -> Grant | None:
    """The first of `grants` that covers `need`, in their order as text."""
    return next((grant for grant in sorted(grants) if grant.covers(need)), None)


def permission_denied(identity: str, lacking: list[Permission]) -> PermissionDenied:
    """The refusal of an identity that lacks something, and the commands that would help."""
    told = lacking[:_TOLD_MAX]
    text = ", ".join(map(str, told)) + (", ..." if len(lacking) > len(told) else "")
    return PermissionDenied(
        f"{identity} lacks {text}",
        remedy="; ".join(_command(identity, need) for need in told),
        facts={
            "identity": identity,
            "role": lacking[0].roles[0] if lacking[0].roles else "",
            "resource": lacking[0].resource,
        },
    )


def _command(identity: str, need: Permission) -> str:
    if not need.kind:
        return f"Grant it something: baton access grant {shlex.quote(identity)} ..."
    return f"baton access grant {shlex.join((identity, need.roles[0], need.resource))}"


def check_identity(identity: str) -> str:
    """`identity`, if it may be one.

    Raises:
        InvalidArgument: it is empty, too long, or has white space or control characters.
    """
    good = identity.isprintable() and not any(one.isspace() for one in identity)
    if not good or not 0 < len(identity) <= IDENTITY_CHARACTERS_MAX:
        raise InvalidArgument(
            f"{identity[:IDENTITY_CHARACTERS_MAX]!r} is no identity",
            remedy=f"Use 1 to {IDENTITY_CHARACTERS_MAX} visible characters.",
            facts={"field": "identity"},
        )
    return identity


def check_grant(role: AccessRole, resource: str) -> Grant:
    """The grant of a role on a resource, if there can be one.

    Raises:
        InvalidArgument, InvalidName: there is no such resource, or the role means nothing on it.
    """
    kind, _, pattern = resource.partition(":")
    allowed = _ROLES.get(kind)
    if allowed is None or (kind == CLUSTER) != (resource == CLUSTER):
        raise InvalidArgument(
            f"{resource[:200]!r} is no resource",
            remedy="Use topic:NAME, group:NAME, both also with * at the end, or cluster.",
            facts={"field": "resource"},
        )
    if role not in allowed:
        raise InvalidArgument(
            f"{role} means nothing on {resource[:200]}",
            remedy=f"On a {kind}: {', '.join(allowed)}.",
            facts={"field": "role"},
        )
    name = pattern.removesuffix("*")
    if kind != CLUSTER and (name or not pattern):
        (check_topic if kind == "topic" else check_group)(name)
    if kind == "topic" and group_of(name):
        raise InvalidArgument(
            f"topic {name} belongs to group {group_of(name)}",
            remedy=f"Grant on the group: group:{group_of(name)}.",
            facts={"field": "resource"},
        )
    return Grant(role, resource)


def permission_to_ask_about(wanted: Grant) -> Permission:
    """What somebody would need who wants this, which passed `check_grant`.

    Raises:
        InvalidArgument: it stands for many.
    """
    kind, _, name = wanted.resource.partition(":")
    if name.endswith("*"):
        raise InvalidArgument(
            f"{wanted.resource} stands for many",
            remedy="Ask about one of them.",
            facts={"field": "resource"},
        )
    return Permission((wanted.role,), kind, name)


_ROLES: Mapping[str, tuple[AccessRole, ...]] = {
    "topic": tuple(AccessRole),
    "group": (AccessRole.CONSUME, AccessRole.ADMIN),
    CLUSTER: (AccessRole.ADMIN,),
}
