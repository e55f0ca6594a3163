"""Goal: a change that can't be undone needs a confirmation, or an option.

Method: the question in a child process with a terminal of its own; the summaries as functions.
"""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from batonmq._core.queues import QueueRef
from batonmq._core.reset_targets import ResetTarget, ShiftBy, ToEarliest, ToLatest, ToOffset, ToTime
from batonmq.admin.resets import ResetResult, ResetStep
from batonmq.cli.change_options import operation
from batonmq.cli.group_resets import TargetOptions, parse_offsets, plan_summary
from batonmq.errors import InvalidArgument

NOW = 1_000_000_000
COMMAND = [sys.executable, "-m", "batonmq.cli", "--nameserver", "127.0.0.1:1", "topic", "delete"]


@contextmanager
def _asking() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A command that has printed its question, and its terminal."""
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            [*COMMAND, "t"],
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            assert process.stderr is not None
            prompt = b""
            while not prompt.endswith(b"[y/N] "):
                prompt += os.read(process.stderr.fileno(), 1_000)
            assert prompt == b"Delete topic t? Its messages can't be read any more. [y/N] "
            yield process, ours
    finally:
        os.close(ours)
        os.close(theirs)


def _answered(keys: bytes) -> tuple[int, str]:
    """Answer the question of a command; return its exit status and standard error."""
    with _asking() as (process, terminal):
        os.write(terminal, keys)
        out, err = process.communicate(timeout=25)
    assert out == b""
    return process.returncode, err.decode()


def test_answer_no_changes_nothing() -> None:
    status, output = _answered(b"n\n")
    assert status == 1
    assert "NOT_CONFIRMED: nothing was changed" in output


def test_end_of_input_counts_as_no() -> None:
    status, output = _answered(b"\x04")
    assert status == 1
    assert "NOT_CONFIRMED" in output


def test_ctrl_c_at_the_question_exits_with_130() -> None:
    with _asking() as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=25) == (b"", b"")
    assert process.returncode == 130


def test_answer_yes_continues() -> None:
    status, output = _answered(b"y\n")
    assert status == 1
    assert "UNREACHABLE" in output


def test_plan_summary_counts_replayed_and_skipped_messages() -> None:
    step = ResetStep("g", "t", "b", 0, 10, 4, 6, 0, 1, 2)
    other = replace(step, queue_id=1, replayed_count=0, skipped_count=3)
    assert plan_summary(ResetResult((step, other))).startswith(
        "plan for 2 queues, nothing was changed: 6 messages would be delivered again, 3 skipped"
    )


def test_exported_offsets_are_parsed_and_a_bad_line_is_named() -> None:
    lines = ["t,b,0,5\n", "\n", "t,b,1,0\n"]
    assert parse_offsets(lines) == {QueueRef("t", "b", 0): 5, QueueRef("t", "b", 1): 0}
    for bad in ("t,b,0", "t,b,x,1", "t,b,0,-1", "t,b,0,6", f"t,b,2,{2**63}", f"t,b,{2**32},0"):
        with pytest.raises(InvalidArgument, match="line 4"):
            parse_offsets([*lines, bad])


def test_file_that_is_no_text_has_no_offsets(tmp_path: Path) -> None:
    file = tmp_path / "offsets"
    file.write_bytes(b"t,b,0,\xff\n")
    with file.open(encoding="utf-8") as lines, pytest.raises(InvalidArgument, match="no file of"):
        parse_offsets(lines)


def test_operation_has_an_id_of_its_own_unless_one_is_given() -> None:
    first, second = operation("me", "r", ""), operation("me", "r", "")
    assert first.op_id != second.op_id
    assert (first.by, first.reason) == ("me", "r")
    assert operation("me", "r", "id") == operation("me", "r", "id")


@pytest.mark.parametrize(
    ("options", "target"),
    [
        (TargetOptions(to_offset=0), ToOffset(0)),
        (TargetOptions(shift_by=0), ShiftBy(0)),
        (TargetOptions(shift_by=-3), ShiftBy(-3)),
        (TargetOptions(to_current=True), ShiftBy(0)),
        (TargetOptions(to_datetime="5"), ToTime(5)),
        (TargetOptions(by_duration="10s"), ToTime(NOW - 10_000)),
        (TargetOptions(to_earliest=True), ToEarliest()),
        (TargetOptions(to_latest=True), ToLatest()),
    ],
)
def test_target_options_become_one_target(options: TargetOptions, target: ResetTarget) -> None:
    assert options.count == 1
    assert options.target(NOW) == target


def test_target_options_are_counted() -> None:
    assert TargetOptions().count == 0
    assert TargetOptions(to_offset=0, to_latest=True).count == 2
