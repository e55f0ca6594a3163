"""Changes of grants, tokens and blocks, for the administrators of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlencode

from batonmq.admin.access import AccessControl, Role, RoleGrant
from batonmq.admin.operation import Operation
from batonmq.errors import InvalidArgument
from batonmq_server.console.core.change_plan import ChangePlan, ChangeResult
from batonmq_server.console.viewers import Viewer

Fields = Mapping[str, str]
SOON = "The services know it within about a second."
ROLES = tuple(role.value for role in Role)


def path_of(kind: str, **fields: str) -> str:
    """Return the path of the page that plans a change of access."""
    return f"/change/{kind}?{urlencode(fields)}"


def _wanted(fields: Fields) -> tuple[str, RoleGrant]:
    role = fields.get("role", "")
    if role not in ROLES:
        raise InvalidArgument(f"there is no role {role[:40]!r}", facts={"field": "role"})
    identity, resource = fields.get("identity", "").strip(), fields.get("resource", "").strip()
    return identity, RoleGrant(Role(role), resource)


def _grant_fields(identity: str, grant: RoleGrant) -> tuple[tuple[str, str], ...]:
    return (("identity", identity), ("role", grant.role.value), ("resource", grant.resource))


async def _has(viewer: Viewer, identity: str, grant: RoleGrant) -> bool:
    found = await AccessControl(viewer.admin).list(identity) if identity else ()
    return any(grant in one.grants for one in found)


async def plan_grant(viewer: Viewer, fields: Fields) -> ChangePlan:
    """Return the plan to grant a role on a resource to an identity."""
    identity, grant = _wanted(fields)
    known = await _has(viewer, identity, grant)
    return ChangePlan(
        f"Grant {grant.role} on {grant.resource} to {identity}",
        ("The identity has this grant already.",) if known else (SOON,),
        "Grant it",
        _grant_fields(identity, grant),
        warning="This role includes every permission on every topic and group, and the right to "
        "change access."
        if grant == RoleGrant(Role.ADMIN, "cluster")
        else "",
        possible=not known,
    )


async def grant_role(viewer: Viewer, fields: Fields, _: Operation) -> ChangeResult:
    """Grant the role of a form."""
    identity, grant = _wanted(fields)
    await AccessControl(viewer.admin).grant(identity, grant)
    return ChangeResult(
        (f"{identity} has the role {grant.role} on {grant.resource}.", SOON),
        undo=path_of("revoke", **dict(_grant_fields(identity, grant))),
    )


async def plan_revoke(viewer: Viewer, fields: Fields) -> ChangePlan:
    """Return the plan to revoke one grant of an identity."""
    identity, grant = _wanted(fields)
    own = identity == viewer.identity
    return ChangePlan(
        f"Revoke {grant.role} on {grant.resource} from {identity}",
        (f"Calls that need the grant are refused, and open streams end. {SOON}",),
        "Revoke it",
        _grant_fields(identity, grant),
        warning="This is your own grant: you may lose the right to grant it again." if own else "",
        possible=await _has(viewer, identity, grant),
    )


async def revoke_role(viewer: Viewer, fields: Fields, _: Operation) -> ChangeResult:
    """Revoke the grant of a form."""
    identity, grant = _wanted(fields)
    await AccessControl(viewer.admin).revoke(identity, grant)
    return ChangeResult(
        (f"{identity} has no longer the role {grant.role} on {grant.resource}.", SOON),
        undo=path_of("grant", **dict(_grant_fields(identity, grant))),
    )


async def plan_revoke_token(viewer: Viewer, fields: Fields) -> ChangePlan:
    """Return the plan to revoke a token."""
    token_id = fields.get("token", "")
    owners = [
        one.identity
        for one in await AccessControl(viewer.admin).list()
        if any(token.token_id == token_id for token in one.tokens)
    ]
    return ChangePlan(
        f"Revoke token {token_id}" + (f" of {owners[0]}" if owners else ""),
        (
            f"Clients with this token can call nothing any more. {SOON}"
            if owners
            else "There is no such token.",
        ),
        "Revoke the token",
        (("token", token_id),),
        warning="A revoked token can't be used again: its owner needs a new one.",
        possible=bool(owners),
    )


async def revoke_token(viewer: Viewer, fields: Fields, _: Operation) -> ChangeResult:
    """Revoke the token of a form."""
    token_id = fields.get("token", "")
    await AccessControl(viewer.admin).revoke_token(token_id)
    return ChangeResult((f"Token {token_id} is revoked.", SOON))


async def _is_blocked(viewer: Viewer, subject: str) -> bool:
    return any(one.subject == subject for one in await AccessControl(viewer.admin).blocks())


async def plan_block(viewer: Viewer, fields: Fields) -> ChangePlan:
    """Return the plan to block an identity or a certificate."""
    subject = fields.get("subject", "").strip()
    known = await _is_blocked(viewer, subject)
    return ChangePlan(
        f"Block {subject}",
        (
            "It is blocked already."
            if known
            else f"Its calls are refused and its streams end, whatever its grants are. {SOON}",
        ),
        "Block it",
        (("subject", subject),),
        possible=not known,
    )


async def block(viewer: Viewer, fields: Fields, operation: Operation) -> ChangeResult:
    """Block the subject of a form, with the reason of the change."""
    subject = fields.get("subject", "").strip()
    await AccessControl(viewer.admin).block(subject, operation.reason)
    return ChangeResult((f"{subject} is blocked.", SOON), undo=path_of("unblock", subject=subject))


async def plan_unblock(viewer: Viewer, fields: Fields) -> ChangePlan:
    """Return the plan to end a block."""
    subject = fields.get("subject", "").strip()
    return ChangePlan(
        f"End the block of {subject}",
        (f"It may do again what its grants allow. {SOON}",),
        "End the block",
        (("subject", subject),),
        possible=await _is_blocked(viewer, subject),
    )


async def unblock(viewer: Viewer, fields: Fields, _: Operation) -> ChangeResult:
    """End the block of the subject of a form."""
    subject = fields.get("subject", "").strip()
    await AccessControl(viewer.admin).unblock(subject)
    return ChangeResult(
        (f"{subject} is not blocked any more.", SOON), undo=path_of("block", subject=subject)
    )
