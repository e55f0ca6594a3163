"""Goal: `baton produce` schedules messages, and `baton message cancel` cancels them.

Method: wrong command lines without a cluster; the rest against a real `baton up`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from batonmq._common.clock import Clock
from tests.cli.baton import baton, up


@pytest.mark.parametrize(
    "options",
    [
        ["--delay", "soon"],
        ["--delay", "10"],
        ["--deliver-at", "tomorrow"],
        ["--delay-level", "0"],
        ["--delay-level", "19"],
        ["--delay", "10s", "--delay-level", "3"],
    ],
)
def test_invalid_since_exits_with_2(options: list[str]) -> None:
    result = baton("produce", "t", "--file", "/dev/null", *options)
    assert result.code == 2
    assert "Usage:" in result.err


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_scheduled_messages_are_sent_cancelled_and_delivered(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_bytes(b"one\ntwo\n")
    with up(tmp_path / "data") as cluster:
        assert cluster("topic", "create", "orders", "--queues", "1").code == 0
        now = Clock().unix_ms()
        options = ("produce", "orders", "--file", str(lines), "--format", "json")
        for delay in (("--delay", "10m"), ("--delay-level", "14")):
            first, second = cluster(*options, *delay).json_lines
            assert 600_000 <= first["deliver_unix_ms"] - now < 660_000
            assert first["schedule_id"] != second["schedule_id"]
        remaining, cancelled = cluster(*options, "--delay", "8s").json_lines
        done = cluster("message", "cancel", cancelled["schedule_id"])
        assert (done.code, done.out) == (0, f"{cancelled['schedule_id']} cancelled\n")
        again = cluster("message", "cancel", cancelled["schedule_id"])
        assert again.code == 1
        assert "NOT_SCHEDULED" in again.err
        far = cluster("produce", "orders", "--file", str(lines), "--delay", "41d")
        assert far.code == 1
        assert "LIMIT_EXCEEDED" in far.err
        rejected = cluster(
            "produce", "orders", "--file", str(lines), "--deliver-at", f"{now + 9**12}"
        )
        assert rejected.code == 1
        (message,) = cluster(
            "consume", "orders", "--group", "g", "--follow", "--count", "1",
            "--format", "json",
        ).json_lines  # fmt: skip
        assert message["body"] == "one"
        assert message["store_unix_ms"] >= remaining["deliver_unix_ms"]
