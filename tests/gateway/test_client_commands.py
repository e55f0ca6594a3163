"""Commands to remote clients: answers are matched by nonce, client and kind; waits are bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from apache.rocketmq.v2 import definition_pb2 as pb
from apache.rocketmq.v2 import service_pb2
from batonmq.errors import Overloaded, RemoteClientNotFound, RemoteClientSilent
from batonmq_server.gateway.client_commands import (
    ASKED_MAX,
    ASKED_OF_CLIENT_MAX,
    ClientCommands,
)
from batonmq_server.gateway.operator_commands import TRACE_BYTES_MAX, cut

Command = service_pb2.TelemetryCommand
WAIT_S = 30.0


def threads() -> Command:
    return Command(print_thread_stack_trace_command=service_pb2.PrintThreadStackTraceCommand())


def trace(nonce: str, text: str = "main") -> Command:
    answer = service_pb2.ThreadStackTrace(nonce=nonce, thread_stack_trace=text)
    return Command(thread_stack_trace=answer)


class Stream:
    """The stream of a client, which may be full."""

    def __init__(self, on_command: Callable[[Command], None] = lambda _: None) -> None:
        self.sent: list[Command] = []
        self.full, self._on_command = False, on_command

    def command(self, command: Command) -> bool:
        if self.full:
            return False
        self.sent.append(command)
        self._on_command(command)
        return True

    def name_of(self, topic: str) -> pb.Resource:
        return pb.Resource(name=topic)

    @property
    def nonce(self) -> str:
        return self.sent[-1].print_thread_stack_trace_command.nonce


async def test_answer_counts_only_from_its_client_with_its_nonce_and_of_its_kind() -> None:
    commands = ClientCommands()

    def answer(command: Command) -> None:
        nonce = command.print_thread_stack_trace_command.nonce
        commands.answered("b", trace(nonce, "of another client"))
        commands.answered("a", trace("guessed", "with another nonce"))
        other = service_pb2.VerifyMessageResult(nonce=nonce)
        commands.answered("a", Command(verify_message_result=other))
        commands.answered("a", Command(settings=pb.Settings()))
        commands.answered("a", trace(nonce, "right"))
        commands.answered("a", trace(nonce, "repeated"))

    stream = Stream(answer)
    commands.open("a", stream)
    got = [(await commands.ask("a", threads(), WAIT_S)) for _ in range(2)]
    assert [one.thread_stack_trace.thread_stack_trace for one in got] == ["right", "right"]
    nonces = [one.print_thread_stack_trace_command.nonce for one in stream.sent]
    assert len({*nonces}) == 2
    assert min(map(len, nonces)) >= 32, "it can't be guessed"


async def test_answer_in_the_field_of_the_command_counts() -> None:
    commands = ClientCommands()

    def answer(command: Command) -> None:
        back = service_pb2.VerifyMessageCommand(nonce=command.verify_message_command.nonce)
        status = pb.Status(code=pb.NOT_IMPLEMENTED)
        commands.answered("a", Command(status=status, verify_message_command=back))

    commands.open("a", Stream(answer))
    command = Command(verify_message_command=service_pb2.VerifyMessageCommand())
    assert (await commands.ask("a", command, WAIT_S)).status.code == pb.NOT_IMPLEMENTED


async def test_client_that_does_not_answer_is_silent_and_a_late_answer_is_ignored() -> None:
    commands, stream = ClientCommands(), Stream()
    commands.open("a", stream)
    with pytest.raises(RemoteClientSilent, match="did not answer within 10 ms"):
        await commands.ask("a", threads(), 0.01)
    commands.answered("a", trace(stream.nonce))
    assert len(stream.sent) == 1


async def test_stream_that_ends_ends_what_was_asked_by_it() -> None:
    commands, first, second = ClientCommands(), Stream(), Stream()
    commands.open("a", first)

    async def leave() -> None:
        commands.open("a", second)
        commands.close("a", first)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(leave())
        with pytest.raises(RemoteClientSilent, match="ended before its answer"):
            await commands.ask("a", threads(), WAIT_S)
    assert len(first.sent) == 1
    assert commands.stream("a") is second
    commands.close("a", second)
    with pytest.raises(RemoteClientNotFound, match="client a has no telemetry stream"):
        await commands.ask("a", threads(), WAIT_S)


async def test_commands_that_wait_are_bounded_and_a_refused_one_is_not_sent() -> None:
    commands = ClientCommands()
    streams = {name: Stream() for name in map(str, range(ASKED_MAX // ASKED_OF_CLIENT_MAX + 1))}
    for name, stream in streams.items():
        commands.open(name, stream)
    async with asyncio.TaskGroup() as tasks:
        waiting = list[asyncio.Task[Command]]()
        for name in list(streams)[:-1]:
            waiting += [
                tasks.create_task(commands.ask(name, threads(), WAIT_S))
                for _ in range(ASKED_OF_CLIENT_MAX)
            ]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match=f"{ASKED_OF_CLIENT_MAX} commands wait for client"):
                await commands.ask(name, threads(), WAIT_S)
            assert len(streams[name].sent) == ASKED_OF_CLIENT_MAX
        last = list(streams)[-1]
        with pytest.raises(Overloaded, match=f"{ASKED_MAX} for all clients"):
            await commands.ask(last, threads(), WAIT_S)
        assert not streams[last].sent
        for one in waiting:
            one.cancel()
    streams[last].full = True
    with pytest.raises(Overloaded, match="reads its telemetry stream too slowly"):
        await commands.ask(last, threads(), WAIT_S)
    streams[last].full = False
    with pytest.raises(RemoteClientSilent):
        await commands.ask(last, threads(), 0)


def test_long_stack_traces_are_cut_between_characters() -> None:
    assert cut("straße".encode()) == ("straße", 0)
    text, behind = cut(b"x" * (TRACE_BYTES_MAX - 1) + "ß!".encode())
    assert (len(text), behind) == (TRACE_BYTES_MAX - 1, 3)
