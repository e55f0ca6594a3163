"""`baton gateway verify` and `threads`: ask one remote client, through its gateway."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import click
from click.exceptions import Exit

from batonmq._core.queues import QueueRef
from batonmq.admin.admin import Admin
from batonmq.admin.message_queries import MessageQueries
from batonmq.admin.remote_commands import (
    COMMAND_TIMEOUT_S,
    TIMEOUT_S_MAX,
    MessageVerification,
    RemoteCommands,
    StackTraces,
)
from batonmq.cli.arguments import OFFSET, group_argument, parse_message_queue
from batonmq.cli.command_classes import FloatRange, argument, command
from batonmq.cli.message import find_queue
from batonmq.cli.output import counted, printable
from batonmq.cli.session import CommandSession, cluster_session

_client_argument = argument(
    "client_id", metavar="CLIENT-ID", help="The client, as in: baton gateway clients."
)


def _timeout_option(function: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--timeout",
        "timeout_s",
        default=COMMAND_TIMEOUT_S,
        show_default=True,
        type=FloatRange(min=0, max=TIMEOUT_S_MAX, min_open=True),
        help="How long to wait for the client, in seconds.",
    )(function)


@command()
@group_argument("name")
@_client_argument
@argument("message_id", required=False, metavar="[ID]", help="Message id, as in the receipt.")
@click.option("--topic", default="", help="Topic of the message.")
@click.option("--queue", default="", metavar="[BROKER/]ID", help="Its queue; needs --topic.")
@click.option("--offset", type=OFFSET, help="Its offset; needs --queue.")
@_timeout_option
@cluster_session
def verify(
    session: CommandSession,
    name: str,
    client_id: str,
    message_id: str | None,
    topic: str,
    queue: str,
    offset: int | None,
    timeout_s: float,
) -> None:
    """Let one push consumer consume a message once more, and show the result.

    The listener of the client runs with it. Nothing is acknowledged and no attempt is counted. The
    message may be a dead letter or a retry of the group. Exit status 1 unless the listener consumes
    it. Needs the role admin of the group.
    """
    named = (bool(topic), bool(queue), offset is not None)
    if message_id is not None and any(named):
        raise click.UsageError("give either ID, or --topic, --queue and --offset")
    if message_id is None and not all(named):
        raise click.UsageError("ID is required, or --topic, --queue and --offset")
    wanted = None if message_id is not None else parse_message_queue(topic, queue, "")

    async def ask() -> MessageVerification:
        async with session.admin() as admin:
            at, position = await _position(admin, message_id, wanted, offset)
            commands = RemoteCommands(admin, timeout_s=timeout_s)
            return await commands.verify_message(name, client_id, at, position)

    found = session.run(ask())
    text = f": {printable(found.text)}" if found.text else ""
    session.output.line(
        asdict(found),
        f"{found.outcome} by client {client_id} in {found.took_ms:,} ms, offset {found.offset} of "
        f"{found.queue}, asked by {found.gateway}{text}",
    )
    if found.outcome != "consumed":
        raise Exit(1)


async def _position(
    admin: Admin, message_id: str | None, wanted: QueueRef | None, offset: int | None
) -> tuple[QueueRef, int]:
    """Return the queue and the offset of the message that a command names."""
    if message_id is not None:
        message = await MessageQueries(admin).message(message_id)
        return message.queue, message.offset
    assert wanted is not None
    assert offset is not None
    return (wanted if wanted.broker else await find_queue(admin, wanted)), offset


@command()
@_client_argument
@click.option(
    "--group",
    default="",
    help="A group of the client; required if you are admin of this group only.",
)
@_timeout_option
@cluster_session
def threads(session: CommandSession, client_id: str, group: str, timeout_s: float) -> None:
    """Show the stack traces of a client, as its library writes them.

    Without --group, it needs the role admin of the cluster.
    """

    async def ask() -> StackTraces:
        async with session.admin() as admin:
            return await RemoteCommands(admin, timeout_s=timeout_s).stack_traces(client_id, group)

    found = session.run(ask())
    lines = [printable(line) for line in found.text.splitlines()]
    session.output.line(asdict(found), "\n".join(lines))
    if found.cut_bytes:
        session.output.note(f"{counted(found.cut_bytes, 'byte')} more were cut off")
