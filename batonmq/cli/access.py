"""`baton access`: who may do what, where services ask who calls."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from functools import partial

import click
from click.exceptions import Exit

from batonmq.admin.access import AccessControl, Answer, Grant, IdentityAccess, Role
from batonmq.cli.output import Columns, Item, OutputFormat, wall_time
from batonmq.cli.session import CommandSession, local_session, cluster_session, open_session

app = click.Group(help="Say who may do what, and make tokens.", no_args_is_help=True)
tokens = click.Group(help="Make bearer tokens, and revoke them.", no_args_is_help=True)
app.add_typer(tokens, name="token")

identity_argument = partial(
    argument,
    metavar="IDENTITY",
    help="First URI of a client certificate, else its first DNS name, else its common name; "
    "or what a token stands for.",
)
role_argument = partial(
    argument,
    type=click.Choice(["produce", "consume", "admin"]),
    metavar="ROLE",
    help="produce, consume or admin.",
)
resource_argument = partial(
    argument,
    metavar="RESOURCE",
    help="topic:NAME or group:NAME, also with * at the end; or cluster.",
)

_GRANTS: Columns = {"IDENTITY": "identity", "ROLE": "role", "RESOURCE": "resource"}
_HELD: Columns = {
    **_GRANTS,
    "TOKEN": "token_id",
    "CREATED": lambda item: item["token_id"] and wall_time(item["create_unix_ms"]),
    "BY": "by",
}


@app.command()
@identity_argument("identity")
@role_argument("role")
@resource_argument("resource")
@cluster_session
def grant(session: CommandSession, identity: str, role: str, resource: str) -> None:
    """Give somebody a role on a resource. Granting it again is no error."""
    session.run(_grant(session, identity, Grant(role, resource)))


async def _grant(session: CommandSession, identity: str, wanted: Grant) -> None:
    async with session.admin() as admin:
        changed = await AccessControl(admin).grant(identity, wanted)
    if not changed:
        session.output.note(f"{identity} had it already")
    item = {"identity": identity, **asdict(wanted), "changed": changed}
    session.output.detail(item, [item], _GRANTS)


@app.command()
@identity_argument("identity")
@argument(
    "role",
    required=False,
    type=click.Choice(["produce", "consume", "admin"]),
    metavar="[ROLE]",
    help="As granted.",
)
@argument("resource", required=False, default="", metavar="[RESOURCE]", help="As granted.")
@click.option("--all", "all_", is_flag=True, help="Everything that is granted.")
@cluster_session
def revoke(
    session: CommandSession, identity: str, role: str | None, resource: str, all_: bool
) -> None:
    """Take a grant from somebody, or with --all every one; its tokens stay."""
    if all_ == bool(role) or bool(role) != bool(resource):
        raise click.UsageError("give ROLE and RESOURCE, or --all")
    session.run(_revoke(session, identity, Grant(role, resource) if role else None))


async def _revoke(session: CommandSession, identity: str, unwanted: Grant | None) -> None:
    async with session.admin() as admin:
        count = await AccessControl(admin).revoke(identity, unwanted)
    session.output.line(
        {"identity": identity, "revoked_count": count}, f"{count} grants of {identity} revoked"
    )


@app.command("list")
@argument("identity", required=False, default="", metavar="[IDENTITY]", help="Only of this one.")
@cluster_session
def list_(session: CommandSession, identity: str) -> None:
    """List what is granted to whom, and whose tokens there are."""
    session.run(_list(session, identity))


async def _list(session: CommandSession, identity: str) -> None:
    async with session.admin() as admin:
        found = await AccessControl(admin).list(identity)
    session.output.items([item for one in found for item in _items(one)], _HELD)


def _items(one: IdentityAccess) -> list[Item]:
    """A line for each grant and for each token."""
    nothing = {"role": None, "resource": None, "token_id": None, "create_unix_ms": None, "by": None}
    held = [*map(asdict, one.grants), *map(asdict, one.tokens)]
    return [{"identity": one.identity, **nothing, **item} for item in held]


@app.command()
@role_argument("role")
@resource_argument("resource")
@click.option("--identity", default="", help="About whom; by default whoever asks.")
@cluster_session
def check(session: CommandSession, role: str, resource: str, identity: str) -> None:
    """Tell whether somebody may do something, and by which grant; status 1 if not."""
    answer = session.run(_check(session, Grant(role, resource), identity))
    if answer.access_on and not answer.allowed:
        raise Exit(1)


async def _check(session: CommandSession, wanted: Grant, identity: str) -> Answer:
    async with session.admin() as admin:
        answer = await AccessControl(admin).check(wanted, identity)
    what = f"{answer.identity} {wanted.role} {wanted.resource}"
    by = f": {answer.by.role} on {answer.by.resource}" if answer.by else ""
    session.output.line(asdict(answer), f"{what}: {'yes' if answer.allowed else 'no'}{by}")
    if not answer.access_on:
        session.output.note("access is off: everybody may do everything")
    return answer


@tokens.command()
@identity_argument("identity")
@click.option(
    "--file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write it to a new file that only you can read.",
)
@cluster_session
def create(session: CommandSession, identity: str, file: Path | None) -> None:
    """Make a bearer token that stands for somebody. It is shown once, and kept nowhere."""
    if file is not None and file.exists():
        session.output.failure("FILE_EXISTS", f"{file} is there already", "Give another name.")
        raise Exit(1)
    session.run(_create(session, identity, file))


async def _create(session: CommandSession, identity: str, file: Path | None) -> None:
    if file is not None:  # before there is a token that would be lost
        await asyncio.to_thread(file.touch, 0o600, exist_ok=False)
    try:
        async with session.admin() as admin:
            made = await AccessControl(admin).create_token(identity)
    except BaseException:
        if file is not None:
            await asyncio.to_thread(file.unlink)
        raise
    token, item = made.token.get_secret_value(), {"identity": identity, "token_id": made.token_id}
    if file is not None:
        await asyncio.to_thread(file.write_text, f"{token}\n")
        session.output.line({**item, "file": str(file)}, f"token {made.token_id} is in {file}")
    else:
        session.output.line({**item, "token": token}, token)
        if session.output.form is not OutputFormat.JSON:  # beside it: the token may go into a file
            print(f"token {made.token_id} of {identity}: it is not shown again", file=sys.stderr)


@tokens.command("revoke")
@argument("token_id", metavar="TOKEN_ID", help="As `baton access list`.")
@cluster_session
def revoke_token(session: CommandSession, token_id: str) -> None:
    """Let a token stand for nobody any more."""
    session.run(_revoke_token(session, token_id))


async def _revoke_token(session: CommandSession, token_id: str) -> None:
    async with session.admin() as admin:
        revoked = await AccessControl(admin).revoke_token(token_id)
    text = f"token {token_id} revoked" if revoked else f"there is no token {token_id}"
    session.output.line({"token_id": token_id, "revoked": revoked}, text)
