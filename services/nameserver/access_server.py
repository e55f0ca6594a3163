"""The servicer of AccessService: grants of roles, tokens, access keys and blocks."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from typing import Any

import grpc.aio

from baton.nameserver.v1 import access_service_pb2 as pb
from baton.nameserver.v1 import access_service_pb2_grpc as pb_grpc
from baton.nameserver.v1 import stored_access_pb2
from batonmq.errors import InvalidArgument
from batonmq_server.nameserver.access_key_store import (
    AccessKeyStore,
    check_access_key,
    check_secret,
)
from batonmq_server.nameserver.access_store import AccessStore, IdentityAccess
from batonmq_server.runtime.access.blocks import IDENTITY, check_fingerprint, check_subject
from batonmq_server.runtime.access.guard import Guard
from batonmq_server.runtime.access.permissions import (
    SERVICE_PREFIX,
    Authorizer,
    Grant,
    check_grant,
    check_identity,
    grant_covering,
    permission_to_ask_about,
)
from batonmq_server.runtime.access.stored_access import digest_of, grant_from_pb, grant_to_pb
from batonmq_server.runtime.paging import key_of_token, page_of

log = logging.getLogger(__name__)

TOKEN_BYTES = 32
TTL_MS_MAX = 10 * 365 * 24 * 3_600_000
OVERLAP_MS_MAX = 30 * 24 * 3_600_000
SCOPES_MAX = 100
REASON_CHARACTERS_MAX = 200
_TOKEN_PREFIX = "baton_"
"""Lets secret scanners recognize a token."""

Context = grpc.aio.ServicerContext[Any, Any]


class AccessServicer(pb_grpc.AccessServiceServicer):
    """See the proto."""

    def __init__(self, store: AccessStore, access_keys: AccessKeyStore, guard: Guard) -> None:
        self._store, self._access_keys, self._guard = store, access_keys, guard

    async def Grant(self, request: pb.GrantRequest, context: Context) -> pb.GrantResponse:
        """See the proto."""
        identity, grant = _grantee(request.identity), _grant(request.grant)
        changed = await self._store.grant(identity, grant)
        if changed:
            by = self._guard.caller_identity(context)
            log.info("access granted identity=%s role=%s resource=%s by=%s", identity, *grant, by)
        return pb.GrantResponse(changed=changed)

    async def Revoke(self, request: pb.RevokeRequest, context: Context) -> pb.RevokeResponse:
        """See the proto."""
        identity = _grantee(request.identity)
        grant = _grant(request.grant) if request.HasField("grant") else None
        count = await self._store.revoke(identity, grant)
        if count:
            role, resource = grant or ("every", "everything")
            by = self._guard.caller_identity(context)
            log.info(
                "access revoked identity=%s role=%s resource=%s by=%s", identity, role, resource, by
            )
        return pb.RevokeResponse(revoked_count=count)

    async def ListAccess(
        self, request: pb.ListAccessRequest, context: Context
    ) -> pb.ListAccessResponse:
        """See the proto."""
        after = key_of_token(request.page_token)
        identities, keys = await self._store.all(), await self._access_keys.by_identity()
        page = page_of(
            (
                (identity, _listed(identity, identities.get(identity), keys.get(identity, ())))
                for identity in sorted(identities.keys() | keys.keys())
                if identity > after and request.identity in ("", identity)
            ),
            request.page_size,
        )
        return pb.ListAccessResponse(identities=page.entries, next_page_token=page.next_page_token)

    async def Check(self, request: pb.CheckRequest, context: Context) -> pb.CheckResponse:
        """See the proto. Decided as the services decide, from the present grants in etcd."""
        need = permission_to_ask_about(_grant(request.wanted))
        asked = request.identity or self._guard.caller_identity(context)
        if not asked and not self._guard.on:
            return pb.CheckResponse()  # without access control a caller has no identity
        identity = check_identity(asked)
        access = Authorizer(self._guard.admins)
        access.set_grants(identity, await self._store.grants_of(identity))
        by = grant_covering(access.grants_of(identity), need)
        return pb.CheckResponse(
            identity=identity,
            allowed=by is not None,
            by=grant_to_pb(by) if by is not None else None,
            access_on=self._guard.on,
        )

    async def CreateToken(
        self, request: pb.CreateTokenRequest, context: Context
    ) -> pb.CreateTokenResponse:
        """See the proto."""
        identity, by = check_identity(request.identity), self._guard.caller_identity(context)
        scopes = _limits(identity, request.ttl_ms, request.scopes)
        bound_to = request.certificate_sha256 and check_fingerprint(request.certificate_sha256)
        token = f"{_TOKEN_PREFIX}{secrets.token_urlsafe(TOKEN_BYTES)}"
        stored = await self._store.add_token(
            digest_of(token),
            identity,
            by,
            ttl_ms=request.ttl_ms,
            scopes=scopes,
            certificate_sha256=bound_to,
        )
        log.info(
            "token created identity=%s token_id=%s expire_unix_ms=%d scopes=%d certificate=%s "
            "by=%s",
            identity,
            stored.token_id,
            stored.expire_unix_ms,
            len(scopes),
            bound_to,
            by,
        )
        return pb.CreateTokenResponse(
            token=token, token_id=stored.token_id, expire_unix_ms=stored.expire_unix_ms
        )

    async def RevokeToken(
        self, request: pb.RevokeTokenRequest, context: Context
    ) -> pb.RevokeTokenResponse:
        """See the proto."""
        if not request.token_id or "/" in request.token_id:
            raise InvalidArgument("token_id is required", facts={"field": "token_id"})
        identity = await self._store.revoke_token(request.token_id)
        if identity is not None:
            log.info(
                "token revoked identity=%s token_id=%s by=%s",
                identity,
                request.token_id,
                self._guard.caller_identity(context),
            )
        return pb.RevokeTokenResponse(revoked=identity is not None)

    async def CreateAccessKey(
        self, request: pb.CreateAccessKeyRequest, context: Context
    ) -> pb.CreateAccessKeyResponse:
        """See the proto."""
        identity, by = _grantee(request.identity), self._guard.caller_identity(context)
        scopes = _limits(identity, request.ttl_ms, request.scopes)
        name = request.access_key and check_access_key(request.access_key)
        secret = check_secret(request.secret)
        stored = await self._access_keys.create(
            identity, by, secret, access_key=name, ttl_ms=request.ttl_ms, scopes=scopes
        )
        log.info(
            "access key created identity=%s access_key=%s expire_unix_ms=%d scopes=%d by=%s",
            identity,
            stored.access_key,
            stored.expire_unix_ms,
            len(scopes),
            by,
        )
        return pb.CreateAccessKeyResponse(
            access_key=stored.access_key,
            secret=secret.reveal(),
            expire_unix_ms=stored.expire_unix_ms,
        )

    async def RotateAccessKey(
        self, request: pb.RotateAccessKeyRequest, context: Context
    ) -> pb.RotateAccessKeyResponse:
        """See the proto."""
        name, secret = check_access_key(request.access_key), check_secret(request.secret)
        if not 0 <= request.overlap_ms <= OVERLAP_MS_MAX:
            raise InvalidArgument(
                f"overlap_ms must be 0 to {OVERLAP_MS_MAX}, got {request.overlap_ms}",
                facts={"field": "overlap_ms"},
            )
        stored = await self._access_keys.rotate(name, secret, request.overlap_ms)
        log.info(
            "access key rotated identity=%s access_key=%s overlap_ms=%d by=%s",
            stored.identity,
            name,
            request.overlap_ms,
            self._guard.caller_identity(context),
        )
        return pb.RotateAccessKeyResponse(secret=secret.reveal(), identity=stored.identity)

    async def RevokeAccessKey(
        self, request: pb.RevokeAccessKeyRequest, context: Context
    ) -> pb.RevokeAccessKeyResponse:
        """See the proto."""
        name = check_access_key(request.access_key)
        identity = await self._access_keys.revoke(name)
        if identity is not None:
            by = self._guard.caller_identity(context)
            log.info("access key revoked identity=%s access_key=%s by=%s", identity, name, by)
        return pb.RevokeAccessKeyResponse(revoked=identity is not None)

    async def Block(self, request: pb.BlockRequest, context: Context) -> pb.BlockResponse:
        """See the proto."""
        subject, by = check_subject(request.subject), self._guard.caller_identity(context)
        if subject == f"{IDENTITY}:{by}":
            raise InvalidArgument(
                f"{by} would block itself",
                remedy="Let another administrator do it.",
                facts={"field": "subject"},
            )
        if len(request.reason) > REASON_CHARACTERS_MAX:
            raise InvalidArgument(
                f"reason has {len(request.reason)} characters; the limit is "
                f"{REASON_CHARACTERS_MAX}",
                facts={"field": "reason"},
            )
        changed = await self._store.block(subject, by, request.reason)
        if changed:
            log.info("blocked subject=%s by=%s reason=%r", subject, by, request.reason)
        return pb.BlockResponse(changed=changed)

    async def Unblock(self, request: pb.UnblockRequest, context: Context) -> pb.UnblockResponse:
        """See the proto."""
        subject = check_subject(request.subject)
        changed = await self._store.unblock(subject)
        if changed:
            by = self._guard.caller_identity(context)
            log.info("block ended subject=%s by=%s", subject, by)
        return pb.UnblockResponse(changed=changed)

    async def ListBlocks(
        self, request: pb.ListBlocksRequest, context: Context
    ) -> pb.ListBlocksResponse:
        """See the proto."""
        after = key_of_token(request.page_token)
        blocks = await self._store.blocks()
        page = page_of(
            ((block.subject, block) for block in blocks if block.subject > after),
            request.page_size,
        )
        return pb.ListBlocksResponse(blocks=page.entries, next_page_token=page.next_page_token)


def _listed(
    identity: str,
    held: IdentityAccess | None,
    access_keys: Iterable[stored_access_pb2.StoredAccessKey],
) -> pb.IdentityAccess:
    held = held or IdentityAccess()
    return pb.IdentityAccess(
        identity=identity,
        grants=map(grant_to_pb, sorted(held.grants, key=lambda g: (g.resource, g.role))),
        tokens=held.tokens,
        access_keys=access_keys,
    )


def _limits(
    identity: str, ttl_ms: int, scopes: Iterable[stored_access_pb2.AccessGrant]
) -> frozenset[Grant]:
    """Return the scopes of new credentials.

    Raises:
        InvalidArgument: the time to live or the scopes are not valid.
    """
    if not 0 <= ttl_ms <= TTL_MS_MAX:
        raise InvalidArgument(
            f"ttl_ms must be 0 to {TTL_MS_MAX}, got {ttl_ms}", facts={"field": "ttl_ms"}
        )
    wanted = frozenset(map(_grant, scopes))
    if len(wanted) > SCOPES_MAX or (wanted and identity.startswith(SERVICE_PREFIX)):
        raise InvalidArgument(
            f"a token has at most {SCOPES_MAX} scopes, and the token of a service has none",
            facts={"field": "scopes"},
        )
    return wanted


def _grantee(identity: str) -> str:
    """Return `identity` if roles can be granted to it.

    Raises:
        InvalidArgument: it is malformed, or a service.
    """
    if identity.startswith(SERVICE_PREFIX):
        raise InvalidArgument(
            f"{identity} is a service: the permissions of services are fixed",
            remedy="Use another identity for your own programs.",
            facts={"field": "identity"},
        )
    return check_identity(identity)


def _grant(grant: stored_access_pb2.AccessGrant) -> Grant:
    try:
        role, resource = grant_from_pb(grant)
    except KeyError as error:
        raise InvalidArgument("role is required", facts={"field": "role"}) from error
    return check_grant(role, resource)
