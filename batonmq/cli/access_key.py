"""`baton access key …`: access keys and secrets for clients of RocketMQ 5."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import click
from click.exceptions import Exit

from batonmq._common.secret import Secret
from batonmq._core.delays import parse_duration_ms
from batonmq.admin.access import Role, RoleGrant
from batonmq.admin.access_keys import AccessKeys, NewAccessKey
from batonmq.cli.command_classes import LazyGroup, argument
from batonmq.cli.output import OutputFormat
from batonmq.cli.session import CommandSession, cluster_session

access_keys = LazyGroup(
    "key",
    help="Create, rotate and revoke access keys for clients of RocketMQ 5.",
    no_args_is_help=True,
)

_file_option = click.option(
    "--file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write both as JSON to a new file that only its owner can read.",
)
_secret_option = click.option(
    "--secret-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="File with the secret, for clients that have one; by default a random one is made.",
)


@access_keys.command()
@argument("identity", metavar="IDENTITY", help="Identity of the calls that are signed with it.")
@click.option(
    "--access-key",
    default="",
    metavar="NAME",
    help="The access key, for clients that have one; by default a random one.",
)
@_secret_option
@_file_option
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
    help="Limit the key to this role on this resource; may be repeated to allow more. The identity "
    "must have the permission too.",
)
@cluster_session
def create(
    session: CommandSession,
    identity: str,
    access_key: str,
    secret_file: Path | None,
    file: Path | None,
    ttl: str,
    scopes: tuple[tuple[str, str], ...],
) -> None:
    """Create an access key of an identity, and its secret, which is shown once."""
    ttl_ms = parse_duration_ms(ttl) if ttl else 0
    wanted = tuple(RoleGrant(Role(role), resource) for role, resource in scopes)

    async def make() -> NewAccessKey:
        async with session.admin() as admin:
            return await AccessKeys(admin).create(
                identity,
                access_key=access_key,
                secret=_secret(secret_file),
                ttl_ms=ttl_ms,
                scopes=wanted,
            )

    _run(session, file, make)


@access_keys.command()
@argument("access_key", metavar="ACCESS_KEY", help="The access key, as baton access list shows it.")
@click.option(
    "--overlap",
    default="24h",
    show_default=True,
    metavar="SPAN",
    help="How long the old secret stays valid, up to 30d; 0s ends it at once.",
)
@_secret_option
@_file_option
@cluster_session
def rotate(
    session: CommandSession,
    access_key: str,
    overlap: str,
    secret_file: Path | None,
    file: Path | None,
) -> None:
    """Give an access key a new secret. The old secret stays valid for --overlap."""
    overlap_ms = parse_duration_ms(overlap)

    async def make() -> NewAccessKey:
        async with session.admin() as admin:
            return await AccessKeys(admin).rotate(
                access_key, overlap_ms=overlap_ms, secret=_secret(secret_file)
            )

    _run(session, file, make)


@access_keys.command()
@argument("access_key", metavar="ACCESS_KEY", help="The access key, as baton access list shows it.")
@cluster_session
def revoke(session: CommandSession, access_key: str) -> None:
    """Revoke an access key with its secrets."""
    session.run(_revoke(session, access_key))


async def _revoke(session: CommandSession, access_key: str) -> None:
    async with session.admin() as admin:
        revoked = await AccessKeys(admin).revoke(access_key)
    text = f"access key {access_key} " + ("revoked" if revoked else "does not exist")
    session.output.line({"access_key": access_key, "revoked": revoked}, text)


def _secret(file: Path | None) -> Secret | None:
    return Secret(file.read_text().strip()) if file is not None else None


def _run(
    session: CommandSession, file: Path | None, make: Callable[[], Awaitable[NewAccessKey]]
) -> None:
    """Make a key pair, and show it or write it into a new file."""
    if file is not None and file.exists():
        session.output.failure("FILE_EXISTS", f"{file} exists already", "Give another name.")
        raise Exit(1)
    session.run(_make(session, file, make))


async def _make(
    session: CommandSession, file: Path | None, make: Callable[[], Awaitable[NewAccessKey]]
) -> None:
    if file is not None:  # checked first: a secret that can't be written would be lost
        await asyncio.to_thread(file.touch, 0o600, exist_ok=False)
    try:
        made = await make()
    except BaseException:
        if file is not None:
            await asyncio.to_thread(file.unlink)
        raise
    secret = made.secret.reveal()
    item = {
        "identity": made.identity,
        "access_key": made.access_key,
        "expire_unix_ms": made.expire_unix_ms or None,
    }
    if file is not None:
        pair = json.dumps({"access_key": made.access_key, "secret": secret})
        await asyncio.to_thread(file.write_text, f"{pair}\n")
        text = f"access key {made.access_key} and its secret are in {file}"
        session.output.line({**item, "file": str(file)}, text)
        return
    session.output.line({**item, "secret": secret}, f"{made.access_key} {secret}")
    if session.output.form is not OutputFormat.JSON:  # standard output may go into a file
        text = f"access key and secret of {made.identity}: the secret is not shown again"
        print(text, file=sys.stderr)
