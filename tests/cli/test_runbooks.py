"""Goal: the command line accepts each `baton` command of the runbooks.

Method: the commands of the pages, with their placeholders replaced, in this process; calls to the
cluster are left out.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from batonmq.cli.app import baton
from batonmq.cli.session import CommandSession

RUNBOOKS = Path(__file__).parents[2] / "docs" / "how-to" / "runbooks"
VALUES = {
    "BROKER/ID": "broker-0/0",
    "COUNT": "8",
    "FILE.tar.gz": "bundle.tar.gz",
    "N": "0",
    "QUEUE": "0",
    "S": "storage",
    "TIME": "2026-01-31T08:00:00Z",
}
COMMANDS = sorted(
    {
        command
        for page in RUNBOOKS.glob("*.md")
        for command in re.findall(r"`baton ([^`]+)`", page.read_text())
    }
)


def test_runbooks_have_commands() -> None:
    assert len(COMMANDS) > 30


@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_a_runbook_is_accepted(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def leave_out(_: CommandSession, main: Coroutine[Any, Any, Any], **__: Any) -> None:
        main.close()
        raise click.exceptions.Exit(0)

    monkeypatch.setattr(CommandSession, "run", leave_out)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "DIR").mkdir()
    arguments = [VALUES.get(word, word) for word in shlex.split(command)]
    if "delete" in arguments:
        arguments.append("--yes")  # on a terminal the command asks instead
    result = CliRunner().invoke(baton, arguments, env={"BATON_NAMESERVER": "127.0.0.1:1"})
    assert result.exit_code != 2, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
