"""Authorization: grants of roles to identities, bearer tokens, and blocks."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from baton.nameserver.v1 import access_service_pb2 as pb
from baton.nameserver.v1 import access_service_pb2_grpc as pb_grpc
from baton.nameserver.v1 import stored_access_pb2
from batonmq._common.rpc import answered
from batonmq._common.secret import Secret
from batonmq._connection.directory import CALL_TIMEOUT_S
from batonmq.admin._pagination import iter_pages
from batonmq.admin.admin import Admin


class Role(StrEnum):
    """A set of permissions on a resource; `admin` includes all permissions."""

    PRODUCE = "produce"
    CONSUME = "consume"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class RoleGrant:
    """A role on a resource.

    Attributes:
        resource: `topic:NAME` or `group:NAME`, where NAME may end with `*`, or `cluster`.
    """

    role: Role
    resource: str


@dataclass(frozen=True, slots=True)
class IssuedToken:
    """A bearer token without its secret.

    Attributes:
        by: Identity that created the token; empty if authorization was off.
        expire_unix_ms: Wall clock from which on it is invalid; 0 for never.
        scopes: It gives only permissions that one of these covers, too; none: all of its identity.
        certificate_sha256: Only client certificate with which it is valid; empty: any, or none.
    """

    token_id: str
    create_unix_ms: int
    by: str
    expire_unix_ms: int = 0
    scopes: tuple[RoleGrant, ...] = ()
    certificate_sha256: str = ""


@dataclass(frozen=True, slots=True)
class NewToken:
    """A new bearer token. The secret can't be read again later.

    Attributes:
        expire_unix_ms: Wall clock from which on it is invalid; 0 for never.
    """

    token_id: str
    token: Secret
    expire_unix_ms: int = 0


@dataclass(frozen=True, slots=True)
class IssuedAccessKey:
    """An access key without its secret.

    Attributes:
        by: Identity that created it; empty if authorization was off.
        expire_unix_ms: Wall clock from which on it is invalid; 0 for never.
        scopes: As those of a token.
        rotate_unix_ms: When its secret was last replaced; 0 if it is the first one.
        previous_expire_unix_ms: Until when the old secret is valid; 0 if there is none.
        sealed_by: Id of the key with which the secret is stored: first digits of its SHA-256.
    """

    access_key: str
    create_unix_ms: int
    by: str
    expire_unix_ms: int = 0
    scopes: tuple[RoleGrant, ...] = ()
    rotate_unix_ms: int = 0
    previous_expire_unix_ms: int = 0
    sealed_by: str = ""


@dataclass(frozen=True, slots=True)
class IdentityGrants:
    """The grants, tokens and access keys of one identity."""

    identity: str
    grants: tuple[RoleGrant, ...]
    tokens: tuple[IssuedToken, ...]
    access_keys: tuple[IssuedAccessKey, ...] = ()


@dataclass(frozen=True, slots=True)
class AccessCheck:
    """The result of a permission check.

    Attributes:
        by: The grant that allows the request; None if no grant does.
        access_on: Whether the services check permissions.
    """

    identity: str
    allowed: bool
    by: RoleGrant | None
    access_on: bool


@dataclass(frozen=True, slots=True)
class AccessBlock:
    """A blocked identity or certificate.

    Attributes:
        subject: `identity:NAME`, `certificate:SHA256` or `serial:NUMBER`.
        by: Identity that blocked it; empty if authorization was off.
    """

    subject: str
    create_unix_ms: int
    by: str
    reason: str


class AccessControl:
    """Reads and changes grants, tokens and blocks. Failures raise classes of `batonmq.errors`.

    Args:
        admin: Client of the cluster; the caller closes it.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def grant(self, identity: str, grant: RoleGrant) -> bool:
        """Grant a role on a resource to an identity; return False if it has the grant already.

        Raises:
            InvalidArgument, InvalidName, LimitExceeded: The identity or the grant is not valid.
        """
        request = pb.GrantRequest(identity=identity, grant=grant_to_pb(grant))
        answer = await self._admin.ask(lambda limit_s: self._stub().Grant(request, timeout=limit_s))
        return answer.changed

    async def revoke(self, identity: str, grant: RoleGrant | None = None) -> int:
        """Revoke one grant, or all grants of the identity; return how many were revoked.

        The services reject new calls and end long polls when they receive the change from etcd,
        normally within a second.
        """
        request = pb.RevokeRequest(
            identity=identity, grant=grant_to_pb(grant) if grant is not None else None
        )
        answer = await self._admin.ask(
            lambda limit_s: self._stub().Revoke(request, timeout=limit_s)
        )
        return answer.revoked_count

    async def list(self, identity: str = "") -> tuple[IdentityGrants, ...]:
        """Return the identities that have grants or credentials; with `identity`, only this one."""

        def page(page_token: str) -> Awaitable[pb.ListAccessResponse]:
            request = pb.ListAccessRequest(identity=identity, page_token=page_token)
            return self._admin.ask(
                lambda limit_s: self._stub().ListAccess(request, timeout=limit_s)
            )

        return tuple(
            [
                IdentityGrants(
                    entry.identity,
                    tuple(map(_from_pb, entry.grants)),
                    tuple(map(_token_from_pb, entry.tokens)),
                    tuple(map(_access_key_from_pb, entry.access_keys)),
                )
                async for answer in iter_pages(page)
                for entry in answer.identities
            ]
        )

    async def check(self, wanted: RoleGrant, identity: str = "") -> AccessCheck:
        """Return whether an identity has the role `wanted`; empty means the caller's identity."""
        request = pb.CheckRequest(identity=identity, wanted=grant_to_pb(wanted))
        answer = await self._admin.ask(lambda limit_s: self._stub().Check(request, timeout=limit_s))
        by = _from_pb(answer.by) if answer.HasField("by") else None
        return AccessCheck(answer.identity, answer.allowed, by, answer.access_on)

    async def create_token(
        self,
        identity: str,
        *,
        ttl_ms: int = 0,
        scopes: Iterable[RoleGrant] = (),
        certificate_sha256: str = "",
    ) -> NewToken:
        """Create a bearer token for an identity.

        Args:
            ttl_ms: Time until it expires, in milliseconds, up to ten years; 0 for never.
            scopes: The token gives only permissions that one of these covers, too; none: all of the
                identity.
            certificate_sha256: SHA-256, in hex, of the only client certificate with which it is
                valid; empty: any, or none.

        The call is not retried. If it fails, the token may exist although its secret is lost; find
        it with `list` and revoke it.
        """
        request = pb.CreateTokenRequest(
            identity=identity,
            ttl_ms=ttl_ms,
            scopes=map(grant_to_pb, scopes),
            certificate_sha256=certificate_sha256,
        )
        answer = await answered(self._stub().CreateToken(request, timeout=CALL_TIMEOUT_S))
        return NewToken(answer.token_id, Secret(answer.token), answer.expire_unix_ms)

    async def revoke_token(self, token_id: str) -> bool:
        """Revoke a token; return False if it does not exist."""
        request = pb.RevokeTokenRequest(token_id=token_id)
        answer = await self._admin.ask(
            lambda limit_s: self._stub().RevokeToken(request, timeout=limit_s)
        )
        return answer.revoked

    async def block(self, subject: str, reason: str = "") -> bool:
        """Block an identity or a certificate; return False if it is blocked already.

        The services refuse its calls and end its streams when they receive the change from etcd,
        normally within a second.

        Args:
            subject: `identity:NAME`; or `certificate:SHA256` or `serial:NUMBER` of a client
                certificate, in hex.

        Raises:
            InvalidArgument: The subject is not valid, the caller itself, or a service.
        """
        request = pb.BlockRequest(subject=subject, reason=reason)
        answer = await self._admin.ask(lambda limit_s: self._stub().Block(request, timeout=limit_s))
        return answer.changed

    async def unblock(self, subject: str) -> bool:
        """End a block; return False if the subject is not blocked."""
        request = pb.UnblockRequest(subject=subject)
        answer = await self._admin.ask(
            lambda limit_s: self._stub().Unblock(request, timeout=limit_s)
        )
        return answer.changed

    async def blocks(self) -> tuple[AccessBlock, ...]:
        """Return all blocks, ascending by subject."""

        def page(page_token: str) -> Awaitable[pb.ListBlocksResponse]:
            request = pb.ListBlocksRequest(page_token=page_token)
            return self._admin.ask(
                lambda limit_s: self._stub().ListBlocks(request, timeout=limit_s)
            )

        return tuple(
            [
                AccessBlock(block.subject, block.create_unix_ms, block.by, block.reason)
                async for answer in iter_pages(page)
                for block in answer.blocks
            ]
        )

    def _stub(self) -> pb_grpc.AccessServiceAsyncStub:
        return self._admin.directory.access()


def grant_to_pb(grant: RoleGrant) -> stored_access_pb2.AccessGrant:
    """Return the message of a grant."""
    role = stored_access_pb2.Role.Value(f"ROLE_{grant.role.name}")
    return stored_access_pb2.AccessGrant(role=role, resource=grant.resource)


def _from_pb(grant: stored_access_pb2.AccessGrant) -> RoleGrant:
    role = stored_access_pb2.Role.Name(grant.role).removeprefix("ROLE_")
    return RoleGrant(Role[role], grant.resource)


def _token_from_pb(token: stored_access_pb2.StoredToken) -> IssuedToken:
    return IssuedToken(
        token.token_id,
        token.create_unix_ms,
        token.by,
        token.expire_unix_ms,
        tuple(map(_from_pb, token.scopes)),
        token.certificate_sha256,
    )


def _access_key_from_pb(one: stored_access_pb2.StoredAccessKey) -> IssuedAccessKey:
    return IssuedAccessKey(
        one.access_key,
        one.create_unix_ms,
        one.by,
        one.expire_unix_ms,
        tuple(map(_from_pb, one.scopes)),
        one.rotate_unix_ms,
        one.previous_expire_unix_ms,
        one.sealed_by,
    )
