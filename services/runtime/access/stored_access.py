"""How grants and tokens stand in etcd: `access/grants/<identity>`, `access/tokens/<digest>`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from hashlib import sha256
from urllib.parse import quote, unquote

from google.protobuf.message import DecodeError

from baton.nameserver.v1 import stored_access_pb2 as pb
from batonmq_server.runtime.access.permissions import (
    AccessRole,
    Authorizer,
    BearerToken,
    Grant,
)

log = logging.getLogger(__name__)

PREFIX = "access/"
_GRANTS, _TOKENS = "grants/", "tokens/"
_ROLES = {
    pb.ROLE_PRODUCE: AccessRole.PRODUCE,
    pb.ROLE_CONSUME: AccessRole.CONSUME,
    pb.ROLE_ADMIN: AccessRole.ADMIN,
}
_TO_PB = {role: number for number, role in _ROLES.items()}


def digest_of(token: str) -> str:
    """What is kept of a token."""
    return sha256(token.encode()).hexdigest()


def grants_key(identity: str) -> str:
    """Where the grants of an identity are, relative to the cluster."""
    return f"{PREFIX}{_GRANTS}{quote(identity, safe='')}"


def token_key(digest: str) -> str:
    """Where a token is, relative to the cluster."""
    return f"{PREFIX}{_TOKENS}{digest}"


def identity_of(key: str) -> str:
    """Whose grants stand under a key below the prefix; empty if it is none of grants."""
    return unquote(key.removeprefix(_GRANTS)) if key.startswith(_GRANTS) else ""


def grants_from_bytes(value: bytes) -> frozenset[Grant]:
    """Inverse of `grants_to_bytes`.

    Raises:
        DecodeError, KeyError: nobody has written this.
    """
    return frozenset(map(grant_from_pb, pb.StoredGrants.FromString(value).grants))


def grants_to_bytes(grants: Iterable[Grant]) -> bytes:
    """As they stand in etcd."""
    return pb.StoredGrants(grants=map(grant_to_pb, sorted(grants))).SerializeToString()


def grant_from_pb(grant: pb.AccessGrant) -> Grant:
    """Inverse of `grant_to_pb`.

    Raises:
        KeyError: it has no role that is known.
    """
    return Grant(_ROLES[grant.role], grant.resource)


def grant_to_pb(grant: Grant) -> pb.AccessGrant:
    """As it goes over the wire, too."""
    return pb.AccessGrant(role=_TO_PB[grant.role], resource=grant.resource)


def apply(access: Authorizer, key: str, value: bytes) -> None:
    """Let `access` know what stands under a key; what can't be read gives nobody anything.

    Args:
        key: Below the prefix.
        value: Empty if it is gone.
    """
    try:
        if identity := identity_of(key):
            access.set_grants(identity, ())
            access.set_grants(identity, grants_from_bytes(value))
        elif key.startswith(_TOKENS):
            digest = key.removeprefix(_TOKENS)
            access.set_token(digest, None)
            if value:
                stored = pb.StoredToken.FromString(value)
                access.set_token(digest, BearerToken(stored.identity, stored.token_id))
    except (DecodeError, KeyError):
        log.error("etcd has an unreadable value key=%s%.30s", PREFIX, key)
