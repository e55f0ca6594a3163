"""Who may do what in a cluster whose services ask: grants of roles to identities, and tokens."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from enum import StrEnum

from baton.nameserver.v1 import access_service_pb2 as pb
from baton.nameserver.v1 import access_service_pb2_grpc as pb_grpc
from baton.nameserver.v1 import stored_access_pb2
from batonmq._common.rpc import answered
from batonmq._common.secret import Secret
from batonmq._connection.directory import CALL_TIMEOUT_S
from batonmq.admin.admin import Admin
from batonmq.admin.pagination import iter_pages


class Role(StrEnum):
    """What somebody may do with a resource; `admin` is all of it."""

    PRODUCE = "produce"
    CONSUME = "consume"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class RoleGrant:
    """A role on a resource.

    Attributes:
        resource: `topic:NAME`, `group:NAME`, both also with `*` at the end, or `cluster`.
    """

    role: Role
    resource: str


@dataclass(frozen=True, slots=True)
class IssuedToken:
    """What is known of a bearer token.

    Attributes:
        by: Identity of who created it; empty if access was off.
    """

    token_id: str
    create_unix_ms: int
    by: str


@dataclass(frozen=True, slots=True)
class NewToken:
    """A bearer token. This is the only time that it is seen."""

    token_id: str
    token: Secret


@dataclass(frozen=True, slots=True)
class IdentityGrants:
    """Everything that one identity has."""

    identity: str
    grants: tuple[RoleGrant, ...]
    tokens: tuple[IssuedToken, ...]


@dataclass(frozen=True, slots=True)
class AccessCheck:
    """Whether somebody may do something.

    Attributes:
        by: The grant that allows it; None if none does.
        access_on: Whether services ask at all.
    """

    identity: str
    allowed: bool
    by: RoleGrant | None
    access_on: bool


class AccessControl:
    """Asks a nameserver; failures are the classes of `batonmq.errors`.

    Args:
        admin: Of the cluster; stays the caller's.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def grant(self, identity: str, grant: RoleGrant) -> bool:
        """Give somebody a role on a resource; False if that was so already.

        Raises:
            InvalidArgument, InvalidName, LimitExceeded: as they say.
        """
        request = pb.GrantRequest(identity=identity, grant=_to_pb(grant))
        answer = await self._admin.ask(lambda limit_s: self._stub().Grant(request, timeout=limit_s))
        return answer.changed

    async def revoke(self, identity: str, grant: RoleGrant | None = None) -> int:
        """Take a grant away, or all; how many there were.

        Calls are refused from then on, and those that wait end, as soon as etcd has told the
        services: within a second while it is well.
        """
        request = pb.RevokeRequest(
            identity=identity, grant=_to_pb(grant) if grant is not None else None
        )
        answer = await self._admin.ask(
            lambda limit_s: self._stub().Revoke(request, timeout=limit_s)
        )
        return answer.revoked_count

    async def list(self, identity: str = "") -> tuple[IdentityGrants, ...]:
        """Everybody who has a grant or a token, or one of them."""

        def page(page_token: str) -> Awaitable[pb.ListAccessResponse]:
            request = pb.ListAccessRequest(identity=identity, page_token=page_token)
            return self._admin.ask(
                lambda limit_s: self._stub().ListAccess(request, timeout=limit_s)
            )

        return tuple(
            [
                IdentityGrants(
                    found.identity,
                    tuple(map(_from_pb, found.grants)),
                    tuple(IssuedToken(t.token_id, t.create_unix_ms, t.by) for t in found.tokens),
                )
                async for answer in iter_pages(page)
                for found in answer.identities
            ]
        )

    async def check(self, wanted: RoleGrant, identity: str = "") -> AccessCheck:
        """Whether somebody may do something; whoever asks if nobody is named."""
        request = pb.CheckRequest(identity=identity, wanted=_to_pb(wanted))
        answer = await self._admin.ask(lambda limit_s: self._stub().Check(request, timeout=limit_s))
        by = _from_pb(answer.by) if answer.HasField("by") else None
        return AccessCheck(answer.identity, answer.allowed, by, answer.access_on)

    async def create_token(self, identity: str) -> NewToken:
        """A new bearer token that stands for somebody.

        Asked once: if it fails, a token that nobody has seen may be listed; revoke it.
        """
        request = pb.CreateTokenRequest(identity=identity)
        answer = await answered(self._stub().CreateToken(request, timeout=CALL_TIMEOUT_S))
        return NewToken(answer.token_id, Secret(answer.token))

    async def revoke_token(self, token_id: str) -> bool:
        """Let a token stand for nobody any more; False if there was none."""
        request = pb.RevokeTokenRequest(token_id=token_id)
        answer = await self._admin.ask(
            lambda limit_s: self._stub().RevokeToken(request, timeout=limit_s)
        )
        return answer.revoked

    def _stub(self) -> pb_grpc.AccessServiceAsyncStub:
        return self._admin.directory.access()


def _to_pb(grant: RoleGrant) -> stored_access_pb2.AccessGrant:
    role = stored_access_pb2.Role.Value(f"ROLE_{grant.role.name}")
    return stored_access_pb2.AccessGrant(role=role, resource=grant.resource)


def _from_pb(grant: stored_access_pb2.AccessGrant) -> RoleGrant:
    role = stored_access_pb2.Role.Name(grant.role).removeprefix("ROLE_")
    return RoleGrant(Role[role], grant.resource)
