"""`baton quota …`: limits of traffic, connections and topics per identity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

import click

from batonmq.admin.quotas import DEFAULT_IDENTITY, IdentityQuota, QuotaLimits, Quotas
from batonmq.cli.access_warning import warn_if_access_is_off
from batonmq.cli.command_classes import LazyGroup, argument
from batonmq.cli.output import Columns, Item
from batonmq.cli.session import CommandSession, cluster_session

F = TypeVar("F", bound=Callable[..., Any])

commands = LazyGroup("quota", help="Limit what an identity may use.", no_args_is_help=True)

identity_argument = partial(
    argument,
    metavar="IDENTITY",
    help="Identity as in baton access; '*' sets the default of each limit, for identities that do "
    "not have this limit.",
)
_LIMITS = {
    "produce_bytes_per_s": "Bytes per second that the identity writes, at each storage node.",
    "produce_calls_per_s": "Write calls per second, at each storage node.",
    "consume_bytes_per_s": "Bytes per second that the identity reads, at each storage node.",
    "consume_calls_per_s": "Read calls per second, at each storage node.",
    "in_flight": "Write and read calls in progress at each storage node, with long polls.",
    "connections": "Connections with write or read calls, to each storage node.",
    "topics": "Topics that the identity has created.",
    "groups": "Groups that the identity has created.",
}
LIMIT_MAX = 2**63 - 1
_COLUMNS: Columns = {
    "IDENTITY": "identity",
    "PRODUCE B/S": "produce_bytes_per_s",
    "CALLS/S": "produce_calls_per_s",
    "CONSUME B/S": "consume_bytes_per_s",
    "CONSUME CALLS/S": "consume_calls_per_s",
    "IN FLIGHT": "in_flight",
    "CONNECTIONS": "connections",
    "TOPICS": "topics",
    "GROUPS": "groups",
}


def _limit_options(command: F) -> F:
    """Add an option for each limit."""
    for name, text in reversed(_LIMITS.items()):
        least = 1 if name.endswith("_per_s") else 0
        option = f"--{name.replace('_', '-')}"
        command = click.option(option, type=click.IntRange(least, LIMIT_MAX), help=text)(command)
    return command


@commands.command("set")
@identity_argument("identity")
@_limit_options
@cluster_session
def set_(session: CommandSession, /, identity: str, **limits: int | None) -> None:
    """Set limits of an identity; its other limits stay.

    A client of BatonMQ that exceeds a limit waits as long as the server says, and gets no error.
    """
    given = {name: value for name, value in limits.items() if value is not None}
    if not given:
        raise click.UsageError("give at least one limit, for example --produce-bytes-per-s")
    session.run(_set(session, identity, given))


async def _set(session: CommandSession, identity: str, given: dict[str, int]) -> None:
    async with session.admin() as admin:
        quotas = Quotas(admin)
        known = {one.identity: one.limits for one in await quotas.list()}
        limits = replace(known.get(identity, QuotaLimits()), **given)
        await quotas.set(identity, limits)
        item = _item(IdentityQuota(identity, limits))
        session.output.detail(item, [item], _COLUMNS)
        await warn_if_access_is_off(session, admin, "the quota")


@commands.command()
@identity_argument("identity")
@cluster_session
def delete(session: CommandSession, identity: str) -> None:
    """Delete all limits of an identity. The limits of '*' then apply to it."""
    session.run(_delete(session, identity))


async def _delete(session: CommandSession, identity: str) -> None:
    async with session.admin() as admin:
        deleted = await Quotas(admin).delete(identity)
    text = f"quota of {identity} deleted" if deleted else f"{identity} has no quota"
    session.output.line({"identity": identity, "deleted": deleted}, text)


@commands.command("list")
@cluster_session
def list_(session: CommandSession) -> None:
    """List the limits of all identities."""
    session.run(_list(session))


async def _list(session: CommandSession) -> None:
    async with session.admin() as admin:
        quotas = await Quotas(admin).list()
    if DEFAULT_IDENTITY not in {one.identity for one in quotas}:
        session.output.note("identities that are not listed have no limit")
    session.output.items([_item(one) for one in quotas], _COLUMNS)


def _item(one: IdentityQuota) -> Item:
    return {"identity": one.identity, **asdict(one.limits)}
