"""Commands of operators to one remote client, by its telemetry stream, and the client's answers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from apache.rocketmq.v2 import definition_pb2 as pb
from apache.rocketmq.v2 import service_pb2
from batonmq.errors import Overloaded, RemoteClientNotFound, RemoteClientSilent

ASKED_MAX = 100
"""Commands of one gateway that wait for an answer, at most."""
ASKED_OF_CLIENT_MAX = 4
"""Commands to one client that wait for an answer, at most."""
_NONCE_BYTES = 16
_ANSWERS = {
    "verify_message_result": "verify_message_command",
    "thread_stack_trace": "print_thread_stack_trace_command",
    # The Node.js client answers in the field of the command.
    "verify_message_command": "verify_message_command",
    "print_thread_stack_trace_command": "print_thread_stack_trace_command",
}
"""Fields of answers, and the commands that they answer."""


class CommandStream(Protocol):
    """The telemetry stream of a client."""

    def command(self, command: service_pb2.TelemetryCommand) -> bool:
        """Send a command; return False if the client reads too slowly."""
        ...

    def name_of(self, topic: str) -> pb.Resource:
        """Return a stored topic as the client names it."""
        ...


@dataclass(slots=True, eq=False)
class _Asked:
    """A command that waits for its answer."""

    client_id: str
    stream: CommandStream
    field: str
    answer: asyncio.Future[service_pb2.TelemetryCommand]


class ClientCommands:
    """Sends commands to clients, and matches the answers to them by nonce and client."""

    def __init__(self) -> None:
        self._streams: dict[str, CommandStream] = {}
        self._asked: dict[str, _Asked] = {}

    def open(self, client_id: str, stream: CommandStream) -> None:
        """Note the stream of a client; it replaces an earlier one."""
        self._streams[client_id] = stream

    def close(self, client_id: str, stream: CommandStream) -> None:
        """Note that a stream has ended; what was asked by it gets no answer any more."""
        if self._streams.get(client_id) is stream:
            del self._streams[client_id]
        for asked in self._asked.values():
            if asked.stream is stream and not asked.answer.done():
                asked.answer.set_exception(
                    RemoteClientSilent(
                        f"the telemetry stream of client {client_id} ended before its answer",
                        facts={"client_id": client_id},
                    )
                )

    def stream(self, client_id: str) -> CommandStream:
        """Return the stream of a client.

        Raises:
            RemoteClientNotFound: It has none.
        """
        stream = self._streams.get(client_id)
        if stream is None:
            raise RemoteClientNotFound(
                f"client {client_id} has no telemetry stream to this gateway",
                facts={"client_id": client_id},
            )
        return stream

    async def ask(
        self, client_id: str, command: service_pb2.TelemetryCommand, timeout_s: float
    ) -> service_pb2.TelemetryCommand:
        """Send a command, with a nonce, to a client; return its answer.

        Raises:
            RemoteClientNotFound: The client has no stream. Nothing was sent.
            Overloaded: Too many commands wait for answers. Nothing was sent.
            RemoteClientSilent: The client has not answered in time; it may have got the command.
        """
        stream, nonce = self.stream(client_id), secrets.token_hex(_NONCE_BYTES)
        self._check_limits(client_id)
        field = command.WhichOneof("command") or ""
        assert field in _ANSWERS.values()
        getattr(command, field).nonce = nonce
        asked = _Asked(client_id, stream, field, asyncio.get_running_loop().create_future())
        with self._waiting(nonce, asked):
            if not stream.command(command):
                raise Overloaded(f"client {client_id} reads its telemetry stream too slowly")
            try:
                return await asyncio.wait_for(asked.answer, timeout_s)
            except TimeoutError:
                waited_ms = round(timeout_s * 1_000)
                raise RemoteClientSilent(
                    f"client {client_id} did not answer within {waited_ms:,} ms",
                    facts={"client_id": client_id, "waited_ms": waited_ms},
                ) from None

    def answered(self, client_id: str, command: service_pb2.TelemetryCommand) -> None:
        """Note what a client has sent; anything but the answer to a command is ignored."""
        field = command.WhichOneof("command")
        if field not in _ANSWERS:
            return
        asked = self._asked.get(getattr(command, field).nonce)
        if asked is None or asked.client_id != client_id or asked.field != _ANSWERS[field]:
            return
        if not asked.answer.done():
            asked.answer.set_result(command)

    def _check_limits(self, client_id: str) -> None:
        of_client = sum(asked.client_id == client_id for asked in self._asked.values())
        if of_client >= ASKED_OF_CLIENT_MAX or len(self._asked) >= ASKED_MAX:
            raise Overloaded(
                f"{of_client} commands wait for client {client_id} and {len(self._asked)} for all "
                f"clients of this gateway; the limits are {ASKED_OF_CLIENT_MAX} and {ASKED_MAX}",
                remedy="Repeat it when these have ended.",
                facts={"limit": ASKED_OF_CLIENT_MAX},
            )

    @contextmanager
    def _waiting(self, nonce: str, asked: _Asked) -> Iterator[None]:
        self._asked[nonce] = asked
        try:
            yield
        finally:
            del self._asked[nonce]
            asked.answer.cancel()
