"""`baton request`: send a request and print its reply."""

from __future__ import annotations

import click
from click.exceptions import Exit

from batonmq._core.delays import parse_duration_ms
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq._producer.requester import RequestFailed
from batonmq.cli.arguments import topic_argument
from batonmq.cli.command_classes import argument, command
from batonmq.cli.outgoing_message import parse_properties
from batonmq.cli.output import printable
from batonmq.cli.session import CommandSession, cluster_session
from batonmq.errors import InvalidArgument


@command("request")
@topic_argument("topic")
@argument("body", help="Body of the request, as text.")
@click.option("--tag", default="", help="Tag of the request, for filters.")
@click.option("--key", multiple=True, help="Key of the request, for look-ups; may be repeated.")
@click.option(
    "--property",
    "properties",
    multiple=True,
    metavar="NAME=VALUE",
    help="Property of the request; may be repeated.",
)
@click.option("--ordering-key", help="Send the request to the queue of this key.")
@click.option(
    "--timeout", default="3s", show_default=True, help="How long to wait for the reply, up to 24h."
)
@cluster_session
def request(
    session: CommandSession,
    topic: str,
    body: str,
    tag: str,
    key: tuple[str, ...],
    properties: tuple[str, ...],
    ordering_key: str | None,
    timeout: str,
) -> None:
    """Send a request and print its reply.

    BODY is sent as a message; a consumer that handles it replies. Exit status 1 if there is no
    reply in time; the request may be handled or not.
    """
    try:
        timeout_ms = parse_duration_ms(timeout)
        named = parse_properties(properties)
    except InvalidArgument as error:
        raise click.UsageError(f"{error.message}. {error.remedy}".rstrip(" .")) from error

    async def ask() -> None:
        settings = ProducerSettings(security=session.security)
        async with Producer(session.nameserver, settings) as producer:
            try:
                reply = await producer.request(
                    topic,
                    body.encode(),
                    timeout_ms=timeout_ms,
                    tag=tag,
                    keys=key,
                    properties=named,
                    ordering_key=ordering_key,
                )
            except RequestFailed as error:
                message = f"the responder replied with an error: {error}"
                session.output.failure("REQUEST_FAILED", message, "")
                raise Exit(1) from error
        text = reply.body.decode(errors="backslashreplace")
        session.output.line({"body": text}, printable(text))

    session.run(ask())
