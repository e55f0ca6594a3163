"""`baton access …`: grants, credentials and blocks, for clusters that check permissions."""

from __future__ import annotations

import asyncio
import ssl
import sys
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import click
from click.exceptions import Exit

from batonmq._core.delays import parse_duration_ms
from batonmq.admin.access import AccessCheck, AccessControl, IdentityGrants, Role, RoleGrant
from batonmq.cli.access_key import access_keys
from batonmq.cli.access_warning import warn_if_access_is_off
from batonmq.cli.command_classes import LazyGroup, argument
from batonmq.cli.output import Columns, Item, Minor, OutputFormat, Prose, wall_time
from batonmq.cli.session import CommandSession, cluster_session

commands = LazyGroup(
    "access", help="Grant roles, create credentials, and block callers.", no_args_is_help=True
)
tokens = LazyGroup("token", help="Create and revoke bearer tokens.", no_args_is_help=True)
commands.add_command(tokens)
commands.add_command(access_keys)

identity_argument = partial(
    argument,
    metavar="IDENTITY",
    help="Identity of a client: the first URI of its certificate, else the first DNS name, else "
    "the common name; or the identity of a token.",
)
role_argument = partial(
    argument,
    type=click.Choice([role.value for role in Role]),
    metavar="ROLE",
    help="produce, consume or admin.",
)
resource_argument = partial(
    argument,
    metavar="RESOURCE",
    help="topic:NAME or group:NAME, where NAME may end with *; or cluster.",
)

_GRANTS: Columns = {"IDENTITY": "identity", "ROLE": "role", "RESOURCE": "resource"}
_HELD: Columns = {
    **_GRANTS,
    "TOKEN": Minor("token_id"),
    "ACCESS KEY": Minor("access_key"),
    "CREATED": Minor(lambda item: item["create_unix_ms"] and wall_time(item["create_unix_ms"])),
    "EXPIRES": lambda item: wall_time(item["expire_unix_ms"]) if item["expire_unix_ms"] else None,
    "SCOPES": lambda item: ", ".join(f"{s['role']} {s['resource']}" for s in item["scopes"] or ()),
    "CERTIFICATE": lambda item: (item["certificate_sha256"] or "")[:16],
    "BY": Minor("by"),
}
_BLOCKS: Columns = {
    "SUBJECT": "subject",
    "SINCE": lambda item: wall_time(item["create_unix_ms"]),
    "BY": Minor("by"),
    "REASON": Prose("reason"),
}


@commands.command()
@identity_argument("identity")
@role_argument("role")
@resource_argument("resource")
@cluster_session
def grant(session: CommandSession, identity: str, role: str, resource: str) -> None:
    """Grant a role on a resource to an identity. Granting it again is not an error."""
    session.run(_grant(session, identity, RoleGrant(Role(role), resource)))


async def _grant(session: CommandSession, identity: str, wanted: RoleGrant) -> None:
    async with session.admin() as admin:
        changed = await AccessControl(admin).grant(identity, wanted)
        if not changed:
            session.output.note(f"{identity} has this role already")
        item = {"identity": identity, **asdict(wanted), "changed": changed}
        session.output.detail(item, [item], _GRANTS)
        await warn_if_access_is_off(session, admin, "the grant")


@commands.command()
@identity_argument("identity")
@argument(
    "role",
    required=False,
    type=click.Choice(["produce", "consume", "admin"]),
    metavar="[ROLE]",
    help="Role of the grant.",
)
@argument(
    "resource", required=False, default="", metavar="[RESOURCE]", help="Resource of the grant."
)
@click.option("--all", "all_", is_flag=True, help="Revoke all grants of the identity.")
@cluster_session
def revoke(
    session: CommandSession, identity: str, role: str | None, resource: str, all_: bool
) -> None:
    """Revoke a grant of an identity, or with --all every grant. Its tokens stay valid."""
    if all_ == bool(role) or bool(role) != bool(resource):
        raise click.UsageError("ROLE and RESOURCE are required, or else --all")
    session.run(_revoke(session, identity, RoleGrant(Role(role), resource) if role else None))


async def _revoke(session: CommandSession, identity: str, unwanted: RoleGrant | None) -> None:
    async with session.admin() as admin:
        count = await AccessControl(admin).revoke(identity, unwanted)
    session.output.line(
        {"identity": identity, "revoked_count": count}, f"{count} grants of {identity} revoked"
    )


@commands.command("list")
@argument("identity", required=False, default="", metavar="[IDENTITY]", help="Only this identity.")
@cluster_session
def list_(session: CommandSession, identity: str) -> None:
    """List the grants and the credentials of all identities, or of one."""
    session.run(_list(session, identity))


async def _list(session: CommandSession, identity: str) -> None:
    async with session.admin() as admin:
        identities = await AccessControl(admin).list(identity)
    session.output.items([item for one in identities for item in _items(one)], _HELD)


def _items(one: IdentityGrants) -> list[Item]:
    """Return an item for each grant, for each token and for each access key."""
    names = ("role", "resource", "token_id", "create_unix_ms", "by", "expire_unix_ms", "scopes")
    keys = ("access_key", "rotate_unix_ms", "previous_expire_unix_ms", "sealed_by")
    nothing = dict.fromkeys((*names, "certificate_sha256", *keys))
    held = [*map(asdict, one.grants), *map(asdict, one.tokens), *map(asdict, one.access_keys)]
    return [{"identity": one.identity, **nothing, **item} for item in held]


@commands.command()
@role_argument("role")
@resource_argument("resource")
@click.option("--identity", default="", help="Identity to check; by default that of the caller.")
@cluster_session
def check(session: CommandSession, role: str, resource: str, identity: str) -> None:
    """Check whether an identity has a role on a resource, and by which grant.

    Exit status 1 if it has not.
    """
    answer = session.run(_check(session, RoleGrant(Role(role), resource), identity))
    if answer.access_on and not answer.allowed:
        raise Exit(1)


async def _check(session: CommandSession, wanted: RoleGrant, identity: str) -> AccessCheck:
    async with session.admin() as admin:
        answer = await AccessControl(admin).check(wanted, identity)
    by = f": {answer.by.role} on {answer.by.resource}" if answer.by else ""
    held = f"{answer.identity} {wanted.role} {wanted.resource}: {_yes(answer.allowed)}{by}"
    off = "access control is off: every client may do everything"
    session.output.line(asdict(answer), held if answer.identity else off)
    if answer.identity and not answer.access_on:
        session.output.note(off)
    return answer


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


@tokens.command()
@identity_argument("identity")
@click.option(
    "--file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the token to a new file that only its owner can read.",
)
@click.option(
    "--ttl",
    default="",
    metavar="SPAN",
    help="Time until it expires, such as 30d; by default never.",
)
@click.option(
    "--scope",
    "scopes",
    type=(click.Choice([role.value for role in Role]), str),
    multiple=True,
    metavar="ROLE RESOURCE",
    help="Limit the token to this role on this resource; may be repeated to allow more. The "
    "identity must have the permission too.",
)
@click.option(
    "--bind-to",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="CERT_FILE",
    help="The token is valid only with this client certificate, a PEM file.",
)
@cluster_session
def create(
    session: CommandSession,
    identity: str,
    file: Path | None,
    ttl: str,
    scopes: tuple[tuple[str, str], ...],
    bind_to: Path | None,
) -> None:
    """Create a bearer token of an identity. It is shown once and not stored."""
    limits = _TokenLimits(
        parse_duration_ms(ttl) if ttl else 0,
        tuple(RoleGrant(Role(role), resource) for role, resource in scopes),
        _fingerprint(bind_to) if bind_to is not None else "",
    )
    if file is not None and file.exists():
        session.output.failure("FILE_EXISTS", f"{file} exists already", "Give another name.")
        raise Exit(1)
    session.run(_create(session, identity, file, limits))


@dataclass(frozen=True, slots=True)
class _TokenLimits:
    ttl_ms: int
    scopes: tuple[RoleGrant, ...]
    certificate_sha256: str


def _fingerprint(file: Path) -> str:
    """Return the SHA-256 of the first certificate in a PEM file.

    Raises:
        BadParameter: there is none.
    """
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    try:
        inside = file.read_text("ascii").partition(begin)[2].partition(end)[0]
        der = ssl.PEM_cert_to_DER_cert(f"{begin}{inside}{end}") if inside else b""
    except (OSError, ValueError):
        der = b""
    if not der:
        raise click.BadParameter(f"{file} has no certificate in PEM form")
    return sha256(der).hexdigest()


async def _create(
    session: CommandSession, identity: str, file: Path | None, limits: _TokenLimits
) -> None:
    if file is not None:  # checked first: a token that can't be written would be lost
        await asyncio.to_thread(file.touch, 0o600, exist_ok=False)
    try:
        async with session.admin() as admin:
            made = await AccessControl(admin).create_token(
                identity,
                ttl_ms=limits.ttl_ms,
                scopes=limits.scopes,
                certificate_sha256=limits.certificate_sha256,
            )
    except BaseException:
        if file is not None:
            await asyncio.to_thread(file.unlink)
        raise
    token = made.token.reveal()
    item = {
        "identity": identity,
        "token_id": made.token_id,
        "expire_unix_ms": made.expire_unix_ms or None,
    }
    if file is not None:
        await asyncio.to_thread(file.write_text, f"{token}\n")
        session.output.line({**item, "file": str(file)}, f"token {made.token_id} is in {file}")
    else:
        session.output.line({**item, "token": token}, token)
        if session.output.form is not OutputFormat.JSON:  # standard output may go into a file
            print(f"token {made.token_id} of {identity}: it is not shown again", file=sys.stderr)


@tokens.command("revoke")
@argument("token_id", metavar="TOKEN_ID", help="Id of the token, as baton access list shows it.")
@cluster_session
def revoke_token(session: CommandSession, token_id: str) -> None:
    """Revoke a token."""
    session.run(_revoke_token(session, token_id))


async def _revoke_token(session: CommandSession, token_id: str) -> None:
    async with session.admin() as admin:
        revoked = await AccessControl(admin).revoke_token(token_id)
    text = f"token {token_id} revoked" if revoked else f"token {token_id} does not exist"
    session.output.line({"token_id": token_id, "revoked": revoked}, text)


subject_argument = partial(
    argument,
    "subject",
    required=False,
    default="",
    metavar="[SUBJECT]",
    help="identity:NAME; or certificate:SHA256 or serial:NUMBER of a client certificate, in hex.",
)
cert_file_option = partial(
    click.option,
    "--certificate",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="CERT_FILE",
    help="The client certificate in a PEM file, instead of SUBJECT.",
)


@commands.command()
@subject_argument()
@cert_file_option()
@click.option("--reason", default="", help="Why; shown by baton access blocks.")
@cluster_session
def block(session: CommandSession, subject: str, certificate: Path | None, reason: str) -> None:
    """Block an identity or a client certificate.

    Services refuse its calls and end its streams, within about a second.
    """
    session.run(_block(session, _subject(subject, certificate), reason))


async def _block(session: CommandSession, subject: str, reason: str) -> None:
    async with session.admin() as admin:
        changed = await AccessControl(admin).block(subject, reason)
        text = f"{subject} is blocked" + ("" if changed else " already")
        session.output.line({"subject": subject, "changed": changed}, text)
        await warn_if_access_is_off(session, admin, "the block")


@commands.command()
@subject_argument()
@cert_file_option()
@cluster_session
def unblock(session: CommandSession, subject: str, certificate: Path | None) -> None:
    """End the block of an identity or a client certificate."""
    session.run(_unblock(session, _subject(subject, certificate)))


async def _unblock(session: CommandSession, subject: str) -> None:
    async with session.admin() as admin:
        changed = await AccessControl(admin).unblock(subject)
    text = f"the block of {subject} has ended" if changed else f"{subject} is not blocked"
    session.output.line({"subject": subject, "changed": changed}, text)


@commands.command("blocks")
@cluster_session
def list_blocks(session: CommandSession) -> None:
    """List the blocked identities and certificates."""
    session.run(_list_blocks(session))


async def _list_blocks(session: CommandSession) -> None:
    async with session.admin() as admin:
        blocks = await AccessControl(admin).blocks()
    session.output.items(list(map(asdict, blocks)), _BLOCKS)


def _subject(subject: str, certificate: Path | None) -> str:
    if bool(subject) == (certificate is not None):
        raise click.UsageError("SUBJECT is required, or else --certificate")
    return subject if certificate is None else f"certificate:{_fingerprint(certificate)}"
