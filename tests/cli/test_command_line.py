"""Goal: a wrong command line exits with 2, a failure with 1, and standard error explains it.

Method: the command in this process through click's runner; no cluster is up.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from batonmq import Producer, RequestFailed
from batonmq.admin import Admin
from batonmq.admin.placement import GroupMove, OffsetsPlacement
from batonmq.cli import debug, group_placement
from batonmq.cli.app import baton
from batonmq.errors import Unreachable
from batonmq_server.local.ports import lock_data_dir

NOWHERE = "127.0.0.1:1"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["--format", "xml", "topic", "list"],
        ["topic", "list", "--format", "xml"],
        ["up"],
        ["topic", "create"],
        ["topic", "create", "a", "--queues", "0"],
        ["topic", "create", "a", "--queues", "1025"],
        ["produce"],
        ["produce", "t", "--file", "/does/not/exist"],
        ["consume", "t"],
        ["consume", "t", "--group", "g", "--from", "middle"],
        ["consume", "t", "--group", "g", "--count", "0"],
        ["group", "describe"],
        ["lock", "steal"],
        ["topic", "delete", "t"],
        ["group", "reset-offsets", "g", "--reason", "r", "--execute"],
        ["group", "reset-offsets", "g", "--to-latest", "--to-earliest"],
        ["group", "reset-offsets", "g", "--to-offset", "0", "--shift-by", "0"],
        ["group", "reset-offsets", "g", "--to-latest", "--undo", "x"],
        ["group", "reset-offsets", "g", "--to-offset", "-1"],
        ["group", "reset-offsets", "g", "--execute", "--to-latest"],
        ["group", "reset-offsets", "g", "--execute", "--dry-run", "--reason", "r", "--to-latest"],
        ["group", "reset-offsets", "g", "--to-latest", "--queue", "a/0"],
        ["group", "reset-offsets", "g", "--to-latest", "--topic", "t", "--queue", "a"],
        ["group", "reset-offsets", "g", "--to-latest", "--topic", "t", "--queue", "a/x"],
        ["group", "reset-offsets", "g", "--undo", "x", "--topic", "t"],
        ["group", "reset-offsets", "g", "--from-file", "/does/not/exist"],
        ["group", "reset-offsets", "g", "--undo", "x", "--export"],
        ["group", "reset-offsets", "g", "--to-latest", "--export", "--execute", "--reason", "r"],
        ["group", "clone", "g", "--reason", "r"],
        ["group", "clone", "g", "h", "--execute"],
        ["group", "delete", "g"],
        ["group", "update", "g"],
        ["group", "update", "g", "--policy", "maybe"],
        ["group", "pause", "g"],
        ["group", "why-stuck", "g", "--queue", "a/0"],
        ["lock", "show", "g", "t", "b"],
        ["lock", "show", "g", "t", "b", "-1"],
        ["lock", "release", "g", "t", "b", "0", "--force"],
        ["message", "get"],
        ["message", "get", "--topic", "t", "--offset", "0", "--queue", "a/b"],
        ["message", "get", "--topic", "t", "--offset", "0", "--queue", "/0"],
        ["message", "get", "--topic", "t", "--offset", "0", "--queue", "a/0", "--broker", "b"],
        ["message", "get", "b-0-0", "--topic", "t", "--key", "k"],
        ["message", "get", "--key", "k"],
        ["message", "get", "--topic", "t", "--offset", "0"],
        ["message", "get", "--topic", "t", "--queue", "-1", "--offset", "0"],
        ["fsck"],
        ["fsck", "/does/not/exist"],
        ["produce", "t", "--rate", "fast"],
        ["produce", "t", "--property", "colour"],
        ["produce", "t", "--queue", "3"],
        ["consume", "t", "--group", "g", "--from", "2x"],
        ["bench", "produce", "--rate", "0"],
        ["bench", "produce", "--size", "15"],
        ["bench", "consume", "--count", "0"],
        ["config", "check", "etcd"],
        ["config", "check", "--file", __file__],
        ["debug", "bundle"],
        ["topic", "create", "t", "--compact", "--min-lag", "soon"],
        ["topic", "update", "t", "--tombstone-retention", "soon"],
        ["topic", "create", "t", "--compact", "--dirty-ratio", "nan"],
        ["topic", "stats", "t", "--watch", "--interval", "nan"],
        ["dlq", "redrive", "g", "--rate", "inf"],
        ["access", "token", "create", "a", "--ttl", "soon"],
        ["access", "key", "create", "a", "--ttl", "soon"],
        ["access", "key", "rotate", "a", "--overlap", "soon"],
        ["cluster", "remove-broker", "b", "--wait", "soon"],
        ["cluster", "remove-broker", "b", "--wait", "999999999999d"],
        ["lock", "show", "g", "t", "b", str(2**32)],
        ["message", "get", "--topic", "t", "--queue", "b/0", "--offset", str(2**63)],
        ["message", "get", "--topic", "t", "--queue", f"b/{2**32}", "--offset", "0"],
        ["message", "trace", "--topic", "t", "--queue", "9" * 5_000, "--offset", "0"],
        ["produce", "t", "--queue", f"b/{2**32}"],
        ["group", "lag", "g", "--topic", "t", "--queue", "b/" + "9" * 5_000],
        ["quota", "set", "a", "--topics", str(2**64)],
        ["mqadmin", "updateTopic", "-t", "t", "-r", "2", "-w", "3"],
        ["mqadmin", "sendMessage", "-t", "t", "-p", "x", "-i", "0"],
        ["mqadmin", "resetOffsetByTime", "-g", "g", "-t", "t"],
    ],
)
def test_wrong_command_line_exits_with_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(baton, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage:" in result.stderr


def test_bytes_that_are_not_utf8_are_a_wrong_command_line() -> None:
    by_argument = CliRunner().invoke(baton, ["topic", "describe", "\udcff"])
    assert (by_argument.exit_code, by_argument.stdout) == (2, "")
    assert "argument 3 is not valid UTF-8: '\\xff'" in by_argument.stderr
    by_variable = CliRunner().invoke(baton, ["topic", "list"], env={"BATON_TOKEN": "a\udcff"})
    assert (by_variable.exit_code, by_variable.stdout) == (2, "")
    assert "variable BATON_TOKEN is not valid UTF-8\n" in by_variable.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["topic"],
        ["group"],
        ["lock"],
        ["cluster"],
        ["up"],
        ["produce"],
        ["consume"],
        ["message"],
        ["fsck"],
        ["context"],
        ["config"],
        ["bench"],
        ["debug"],
        ["mqadmin"],
    ],
)
def test_every_command_has_help(arguments: list[str]) -> None:
    result = CliRunner().invoke(baton, [*arguments, "--help"])
    assert result.exit_code == 0
    assert "Usage: baton" in result.stdout


def test_unreachable_nameserver_exits_with_1_and_an_error_in_the_chosen_format() -> None:
    arguments = ["topic", "list", "--format", "json"]
    result = CliRunner().invoke(baton, arguments, env={"BATON_NAMESERVER": NOWHERE})
    assert (result.exit_code, result.stdout) == (1, "")
    error = json.loads(result.stderr)["error"]
    assert error["reason"] == "UNREACHABLE"
    assert NOWHERE in error["message"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["topic", "list"],
        ["group", "reset-offsets", "g", "--to-latest"],
        ["group", "why-stuck", "g"],
        ["lock", "list"],
        ["consume", "t", "--group", "g"],
        ["produce", "t", "--file", __file__],
        ["cluster", "status"],
        ["message", "cancel", "x"],
    ],
)
def test_nameserver_without_an_address_exits_with_1(arguments: list[str]) -> None:
    result = CliRunner().invoke(baton, ["--nameserver", " , ", *arguments])
    assert result.exit_code == 1
    assert "INVALID_ARGUMENT: ' , ' is not an address of a nameserver" in result.stderr


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1:1,other"])
def test_nameserver_without_a_port_is_a_wrong_command_line(address: str) -> None:
    for arguments in (["--nameserver", address, "topic", "list"], ["topic", "list"]):
        result = CliRunner().invoke(baton, arguments, env={"BATON_NAMESERVER": address})
        assert result.exit_code == 2
        assert "must be HOST:PORT" in result.stderr


def test_invalid_message_id_is_rejected_with_an_example() -> None:
    result = CliRunner().invoke(baton, ["--nameserver", NOWHERE, "message", "get", "order-7"])
    assert result.exit_code == 1
    assert "'order-7' is not a message id" in result.stderr
    assert "broker-position-index" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [["--to-datetime", "tomorrow"], ["--by-duration", "2 hours"], ["--by-duration", "h"]],
)
def test_reset_to_an_invalid_time_exits_with_1(arguments: list[str]) -> None:
    result = CliRunner().invoke(baton, ["group", "reset-offsets", "g", *arguments])
    assert result.exit_code == 1
    assert "INVALID_ARGUMENT" in result.stderr


def test_reset_of_one_topic_and_of_all_is_a_wrong_command_line() -> None:
    arguments = ["group", "reset-offsets", "g", "--to-latest", "--topic", "t", "--all-topics"]
    assert CliRunner().invoke(baton, arguments).exit_code == 2


def test_up_on_a_directory_in_use_exits_with_1(tmp_path: Path) -> None:
    with lock_data_dir(tmp_path):
        result = CliRunner().invoke(baton, ["up", "--data-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "DATA_DIR_IN_USE" in result.stderr


def test_up_with_a_silent_etcd_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batonmq_server.local.cluster._ETCD_WAIT_S", 0.1)
    result = CliRunner().invoke(baton, ["up", "--data-dir", str(tmp_path), "--etcd", NOWHERE])
    assert result.exit_code == 1
    assert f"CLUSTER_FAILED: etcd at {NOWHERE} does not answer" in result.stderr


def test_up_on_a_file_exits_with_2(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(baton, ["up", "--data-dir", str(tmp_path / "file")])
    assert result.exit_code == 2


def test_bundle_that_can_not_be_written_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(debug, "_pack", fail)
    monkeypatch.setattr(debug, "settings_of_services", dict)
    out = tmp_path / "bundle.tar.gz"
    arguments = ["--nameserver", NOWHERE, "debug", "bundle", "--out", str(out)]
    result = CliRunner().invoke(baton, arguments)
    assert result.exit_code == 1
    assert "SYSTEM_ERROR: [Errno 28] No space left on device" in result.stderr
    assert not out.exists()


def test_group_whose_move_is_not_seen_for_a_moment_does_not_end_the_spread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, after = OffsetsPlacement("a", 1, ""), OffsetsPlacement("b", 2, "a")
    answers: Iterator[OffsetsPlacement | Unreachable] = iter(
        [Unreachable("no nameserver answers"), OffsetsPlacement("b", 2, "")]
    )

    async def groups(_: object) -> list[SimpleNamespace]:
        return [SimpleNamespace(name="g")]

    async def move(*_: object, **__: object) -> GroupMove:
        return GroupMove("g", before, after)

    async def locate(*_: object) -> OffsetsPlacement:
        answer = next(answers)
        if isinstance(answer, Unreachable):
            raise answer
        return answer

    monkeypatch.setattr(Admin, "list_groups", groups)
    monkeypatch.setattr(group_placement, "move_group", move)
    monkeypatch.setattr(group_placement, "locate_group", locate)
    result = CliRunner().invoke(baton, ["cluster", "spread-groups", "--format", "json"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert [one["state"] for one in json.loads(result.stdout)] == ["moved"]


def test_error_of_a_responder_is_in_the_chosen_format(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise RequestFailed("no such price")

    monkeypatch.setattr(Producer, "request", fail)
    arguments = ["--nameserver", NOWHERE, "request", "t", "IBM", "--format", "json"]
    result = CliRunner().invoke(baton, arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    error = json.loads(result.stderr)["error"]
    assert error["reason"] == "REQUEST_FAILED"
    assert error["message"] == "the responder replied with an error: no such price"
