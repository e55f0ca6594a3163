"""`baton access`: who may do what, where services ask who calls."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from batonmq.admin.access import AccessControl, Answer, Grant, IdentityAccess, Role
from batonmq.cli.output import Columns, Item, OutputFormat, wall_time
from batonmq.cli.session import CommandSession, FormatOption, NameserverOption, open_session

app = typer.Typer(help="Say who may do what, and make tokens.", no_args_is_help=True)
tokens = typer.Typer(help="Make bearer tokens, and revoke them.", no_args_is_help=True)
app.add_typer(tokens, name="token")

IdentityArgument = Annotated[
    str,
    typer.Argument(
        metavar="IDENTITY",
        help="First URI of a client certificate, else its first DNS name, else its common name; "
        "or what a token stands for.",
    ),
]
RoleArgument = Annotated[Role, typer.Argument(metavar="ROLE", help="produce, consume or admin.")]
ResourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="RESOURCE", help="topic:NAME or group:NAME, also with * at the end; or cluster."
    ),
]

_GRANTS: Columns = {"IDENTITY": "identity", "ROLE": "role", "RESOURCE": "resource"}
_HELD: Columns = {
    **_GRANTS,
    "TOKEN": "token_id",
    "CREATED": lambda item: item["token_id"] and wall_time(item["create_unix_ms"]),
    "BY": "by",
}


@app.command()
def grant(
    context: typer.Context,
    identity: IdentityArgument,
    role: RoleArgument,
    resource: ResourceArgument,
    *,
    nameserver: NameserverOption = None,
    form: FormatOption = None,
) -> None:
    """Give somebody a role on a resource. Granting it again is no error."""
    session = open_session(context, nameserver, form)
    session.run(_grant(session, identity, Grant(role, resource)))


async def _grant(session: CommandSession, identity: str, wanted: Grant) -> None:
    async with session.admin() as admin:
        changed = await AccessControl(admin).grant(identity, wanted)
    if not changed:
        session.output.note(f"{identity} had it already")
    item = {"identity": identity, **asdict(wanted), "changed": changed}
    session.output.detail(item, [item], _GRANTS)


@app.command()
def revoke(
    context: typer.Context,
    identity: IdentityArgument,
    role: Annotated[Role | None, typer.Argument(metavar="[ROLE]", help="As granted.")] = None,
    resource: Annotated[str, typer.Argument(metavar="[RESOURCE]", help="As granted.")] = "",
    *,
    all_: Annotated[bool, typer.Option("--all", help="Everything that is granted.")] = False,
    nameserver: NameserverOption = None,
    form: FormatOption = None,
) -> None:
    """Take a grant from somebody, or with --all every one; its tokens stay."""
    if all_ == bool(role) or bool(role) != bool(resource):
        raise typer.BadParameter("give ROLE and RESOURCE, or --all")
    session = open_session(context, nameserver, form)
    session.run(_revoke(session, identity, Grant(role, resource) if role else None))


async def _revoke(session: CommandSession, identity: str, unwanted: Grant | None) -> None:
    async with session.admin() as admin:
        count = await AccessControl(admin).revoke(identity, unwanted)
    session.output.line(
        {"identity": identity, "revoked_count": count}, f"{count} grants of {identity} revoked"
    )


@app.command("list")
def list_(
    context: typer.Context,
    identity: Annotated[
        str, typer.Argument(metavar="[IDENTITY]", help="Only of this one.", show_default=False)
    ] = "",
    *,
    nameserver: NameserverOption = None,
    form: FormatOption = None,
) -> None:
    """List what is granted to whom, and whose tokens there are."""
    session = open_session(context, nameserver, form)
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
def check(
    context: typer.Context,
    role: RoleArgument,
    resource: ResourceArgument,
    *,
    identity: Annotated[
        str, typer.Option(help="About whom; by default whoever asks.", show_default=False)
    ] = "",
    nameserver: NameserverOption = None,
    form: FormatOption = None,
) -> None:
    """Tell whether somebody may do something, and by which grant; status 1 if not."""
    session = open_session(context, nameserver, form)
    answer = session.run(_check(session, Grant(role, resource), identity))
    if answer.access_on and not answer.allowed:
        raise typer.Exit(1)


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
def create(
    context: typer.Context,
    identity: IdentityArgument,
    *,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", metavar="FILE", help="Write it to a new file that only you can read."
        ),
    ] = None,
    nameserver: NameserverOption = None,
    form: FormatOption = None,
) -> None:
    """Make a bearer token that stands for somebody. It is shown once, and kept nowhere."""
    session = open_session(context, nameserver, form)
    if file is not None and file.exists():
        session.output.failure("FILE_EXISTS", f"{file} is there already", "Give another name.")
        raise typer.Exit(1)
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
    token, item = made.token.reveal(), {"identity": identity, "token_id": made.token_id}
    if file is not None:
        await asyncio.to_thread(file.write_text, f"{token}\n")
        session.output.line({**item, "file": str(file)}, f"token {made.token_id} is in {file}")
    else:
        session.output.line({**item, "token": token}, token)
        if session.output.form is not OutputFormat.JSON:  # beside it: the token may go into a file
            print(f"token {made.token_id} of {identity}: it is not shown again", file=sys.stderr)


@tokens.command("revoke")
def revoke_token(
    context: typer.Context,
    token_id: Annotated[str, typer.Argument(metavar="TOKEN_ID", help="As `baton access list`.")],
    *,
    nameserver: NameserverOption = None,
    form: FormatOption = None,
) -> None:
    """Let a token stand for nobody any more."""
    session = open_session(context, nameserver, form)
    session.run(_revoke_token(session, token_id))


async def _revoke_token(session: CommandSession, token_id: str) -> None:
    async with session.admin() as admin:
        revoked = await AccessControl(admin).revoke_token(token_id)
    text = f"token {token_id} revoked" if revoked else f"there is no token {token_id}"
    session.output.line({"token_id": token_id, "revoked": revoked}, text)
