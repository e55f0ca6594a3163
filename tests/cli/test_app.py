"""Goal: help pages are complete and fast: commands are imported when they are called.

Method: the command in this process, and imports of a new interpreter.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from batonmq.cli import app
from batonmq.cli.app import COMMANDS, SERVER_COMMANDS, baton
from batonmq.cli.command_classes import LazyCommand, LazyGroup

_IMPORTED = """
import sys
from click.testing import CliRunner
from batonmq.cli.app import baton
assert CliRunner().invoke(baton, sys.argv[1:]).exit_code == 0
print(*sorted(sys.modules))
"""


def _lazy_commands(group: LazyGroup) -> Iterator[tuple[str, LazyCommand]]:
    """All lazy commands of a group and of the groups below it, by their full names."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if name in group.lazy:
            yield name, group.lazy[name]
        if isinstance(command, LazyGroup):
            for below, lazy in _lazy_commands(command):
                yield f"{name} {below}", lazy


LAZY = dict(_lazy_commands(baton))


@pytest.mark.parametrize("name", LAZY)
def test_summary_in_the_table_is_the_first_line_of_the_help(name: str) -> None:
    lazy = LAZY[name]
    if lazy.hidden:
        return
    text = (lazy.load().help or "").splitlines()[0]
    assert text.startswith(lazy.summary.removesuffix(".")), (lazy.summary, text)


def test_commands_of_the_server_are_listed() -> None:
    assert LAZY.keys() >= COMMANDS.keys() | SERVER_COMMANDS.keys()
    assert "why-stuck" in CliRunner().invoke(baton, ["group", "--help"]).stdout


@pytest.mark.parametrize("arguments", [["--version"], ["--help"]])
def test_help_and_version_import_no_grpc(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTED, *arguments], capture_output=True, text=True, check=True
    )
    imported = set(done.stdout.split())
    assert "batonmq.cli.app" in imported
    assert not imported & {"grpc", "google.protobuf", "batonmq.admin.admin", "batonmq_server"}


def test_command_imports_no_module_of_other_commands() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTED, "topic", "list", "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    imported = set(done.stdout.split())
    assert "batonmq.cli.topic" in imported
    assert not imported & {"batonmq.cli.group", "batonmq.cli.produce", "batonmq.cli.topic_stats"}


def test_command_of_a_missing_distribution_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_plugins", list)
    monkeypatch.setattr(baton, "lazy", dict(COMMANDS))
    result = CliRunner().invoke(baton, ["up", "--data-dir", "x"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "NOT_INSTALLED: baton up is part of batonmq-server" in result.stderr
    assert "pip install 'batonmq-server[local]'" in result.stderr
    assert "\n  up " not in CliRunner().invoke(baton, ["--help"]).stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_is_printed(shell: str) -> None:
    result = CliRunner().invoke(baton, ["--show-completion", shell])
    assert (result.exit_code, result.stderr) == (0, "")
    assert "_BATON_COMPLETE" in result.stdout
