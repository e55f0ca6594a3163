"""Grants, tokens, access keys and blocks in etcd.

access/grants/<identity>     access/tokens/<digest>
access/keys/<access key>     access/blocks/<subject>
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from hashlib import sha256
from urllib.parse import quote, unquote

from google.protobuf.message import DecodeError

from baton.nameserver.v1 import stored_access_pb2 as pb
from batonmq_server.runtime.access.blocks import BlockList
from batonmq_server.runtime.access.permissions import AccessRole, Authorizer, BearerToken, Grant

log = logging.getLogger(__name__)

PREFIX = "access/"
_GRANTS, _TOKENS, _BLOCKS = "grants/", "tokens/", "blocks/"
KEYS = "keys/"
TOKENS_PREFIX, BLOCKS_PREFIX = f"{PREFIX}{_TOKENS}", f"{PREFIX}{_BLOCKS}"
_ROLES = {
    pb.ROLE_PRODUCE: AccessRole.PRODUCE,
    pb.ROLE_CONSUME: AccessRole.CONSUME,
    pb.ROLE_ADMIN: AccessRole.ADMIN,
}
_TO_PB = {role: number for number, role in _ROLES.items()}


def digest_of(token: str) -> str:
    """Return the digest under which a token is stored."""
    return sha256(token.encode()).hexdigest()


def grants_key(identity: str) -> str:
    """Return the key of an identity's grants, relative to the cluster."""
    return f"{PREFIX}{_GRANTS}{quote(identity, safe='')}"


def token_key(digest: str) -> str:
    """Return the key of a token, relative to the cluster."""
    return f"{TOKENS_PREFIX}{digest}"


def access_key_key(access_key: str) -> str:
    """Return the key of an access key, relative to the cluster."""
    return f"{PREFIX}{KEYS}{access_key}"


def sealing_context(access_key: str, identity: str) -> str:
    """Return what the sealed secrets of an access key are bound to."""
    return f"{access_key} {identity}"


def block_key(subject: str) -> str:
    """Return the key of a blocked subject, relative to the cluster."""
    return f"{BLOCKS_PREFIX}{quote(subject, safe='')}"


def identity_of(key: str) -> str:
    """Return the identity of a grants key, relative to the prefix; empty for other keys."""
    return unquote(key.removeprefix(_GRANTS)) if key.startswith(_GRANTS) else ""


def grants_from_bytes(value: bytes) -> frozenset[Grant]:
    """Return the grants in a stored value; the inverse of `grants_to_bytes`.

    Raises:
        DecodeError, KeyError: the value is malformed, or has an unknown role.
    """
    return frozenset(map(grant_from_pb, pb.StoredGrants.FromString(value).grants))


def grants_to_bytes(grants: Iterable[Grant]) -> bytes:
    """Return the value that etcd stores."""
    return pb.StoredGrants(grants=map(grant_to_pb, sorted(grants))).SerializeToString()


def grant_from_pb(grant: pb.AccessGrant) -> Grant:
    """Return the grant of a message; the inverse of `grant_to_pb`.

    Raises:
        KeyError: its role is unknown.
    """
    return Grant(_ROLES[grant.role], grant.resource)


def grant_to_pb(grant: Grant) -> pb.AccessGrant:
    """Return the message of a grant, for etcd and for the wire."""
    return pb.AccessGrant(role=_TO_PB[grant.role], resource=grant.resource)


def apply(authorizer: Authorizer, blocks: BlockList, key: str, value: bytes) -> None:
    """Update `authorizer` and `blocks` from a key of etcd.

    An unreadable value grants nothing, and blocks its subject: that is in the key.

    Args:
        key: Relative to the prefix.
        value: Empty if the key was deleted.
    """
    try:
        if identity := identity_of(key):
            authorizer.set_grants(identity, ())
            authorizer.set_grants(identity, grants_from_bytes(value))
        elif key.startswith(_BLOCKS):
            blocks.set_blocked(unquote(key.removeprefix(_BLOCKS)), blocked=bool(value))
        elif key.startswith(_TOKENS):
            digest = key.removeprefix(_TOKENS)
            authorizer.set_token(digest, None)
            if value:
                stored = pb.StoredToken.FromString(value)
                token = BearerToken(
                    stored.identity,
                    stored.token_id,
                    stored.expire_unix_ms,
                    frozenset(map(grant_from_pb, stored.scopes)),
                    stored.certificate_sha256,
                )
                authorizer.set_token(digest, token)
    except (DecodeError, KeyError):
        log.error("etcd has an unreadable value key=%s%.30s", PREFIX, key)
