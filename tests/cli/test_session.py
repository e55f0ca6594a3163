"""Goal: options after the command win, and each end of a command has the right exit status.

Method: hand-made sessions, run in this process.
"""

from __future__ import annotations

import asyncio
import os
import signal

import click
import pytest
from click.exceptions import Exit

from batonmq.cli.app import baton
from batonmq.cli.global_options import GlobalOptions
from batonmq.cli.output import Output, OutputFormat
from batonmq.cli.session import CommandSession, open_session
from batonmq.errors import TopicNotFound

SESSION = CommandSession("127.0.0.1:1", Output(OutputFormat.TABLE))


def test_options_after_the_command_win() -> None:
    context = click.Context(baton, obj=GlobalOptions("front:1", OutputFormat.TABLE))
    session = open_session(context, None, None)
    assert (session.nameserver, session.output.form) == ("front:1", OutputFormat.TABLE)
    session = open_session(context, "behind:1", "json")
    assert (session.nameserver, session.output.form) == ("behind:1", OutputFormat.JSON)


async def _fail(error: BaseException) -> None:
    raise error


def _status(error: BaseException) -> int:
    with pytest.raises(Exit) as ended:
        SESSION.run(_fail(error))
    return ended.value.exit_code


def test_rejection_exits_with_1_also_inside_exception_groups(
    capsys: pytest.CaptureFixture[str],
) -> None:
    refusal = TopicNotFound("no t")
    for error in (
        refusal,
        ExceptionGroup("g", [refusal]),
        ExceptionGroup("g", [ValueError(), ExceptionGroup("h", [refusal])]),
    ):
        assert _status(error) == 1
        assert capsys.readouterr().err.startswith("error: TOPIC_NOT_FOUND: no t\n")


def test_failed_system_call_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert _status(FileNotFoundError(2, "No such file", "lines")) == 1
    assert "SYSTEM_ERROR: [Errno 2] No such file: 'lines'" in capsys.readouterr().err


def test_unexpected_exception_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        SESSION.run(_fail(ZeroDivisionError()))


@pytest.mark.usefixtures("default_sighup")
@pytest.mark.parametrize(("endless", "status"), [(True, 0), (False, 130)])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_a_command_gracefully(
    endless: bool, status: int, number: signal.Signals
) -> None:
    ended: list[str] = []

    async def command() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("closed")

    with pytest.raises(Exit) as exit_:
        SESSION.run(command(), endless=endless)
    assert exit_.value.exit_code == status
    assert ended == ["closed"]
