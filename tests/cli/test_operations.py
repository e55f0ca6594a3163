"""Goal: an operator can diagnose, reset and pause a group, and release its queues by force.

Method: `baton up` is a process; the effect of one command is checked by another one, and by the
output of members.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.baton import RunningCluster
from tests.support.conditions import until_now

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
JSON = ("--format", "json")


@pytest.fixture
def read(cluster: RunningCluster, lines: Path, request: pytest.FixtureRequest) -> str:
    """A topic and a group of the same name, which has read its 3 messages from the one queue."""
    name = request.node.name.removeprefix("test_")[:60].rstrip("_")
    assert cluster("topic", "create", name, "--queues", "1").code == 0
    assert cluster("produce", name, "--file", str(lines)).code == 0
    assert len(cluster("consume", name, "--group", name).out.splitlines()) == 3
    return str(name)


@contextmanager
def member(
    cluster: RunningCluster, name: str, *arguments: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A member that owns the queue, and leaves gracefully."""
    with cluster.started("consume", name, "--group", name, "--follow", *arguments) as process:

        def owns() -> bool:
            assert process.poll() is None, process.communicate()
            return bool(_lock(cluster, name)["state"] == "held")

        until_now(owns, timeout_s=30)
        yield process
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def _lock(cluster: RunningCluster, name: str) -> dict[str, Any]:
    locks = cluster("lock", "list", "--group", name, *JSON).json
    lock: dict[str, Any] = locks[0] if locks else {"state": "none"}
    return lock


def _queue(cluster: RunningCluster, name: str) -> dict[str, Any]:
    (queue,) = cluster("group", "describe", name, *JSON).json["queues"]
    status: dict[str, Any] = queue
    return status


def _reason(err: str) -> str:
    return err.split()[1].rstrip(":")


def test_reset_is_planned_executed_recorded_and_undone(cluster: RunningCluster, read: str) -> None:
    why = ("--reason", "a bug", "--by", "tester")
    planned = cluster("group", "reset-offsets", read, "--to-earliest")
    assert planned.code == 0
    (row,) = planned.rows
    assert (row["FROM"], row["TO"], row["REPLAYED"], row["SKIPPED"]) == ("3", "0", "3", "0")
    assert "nothing was changed" in planned.out
    assert _queue(cluster, read)["committed_offset"] == 3
    moved = cluster(
        "group", "reset-offsets", read, "--shift-by", "-2", *why, "--execute", *JSON
    ).json
    assert [(s["from_offset"], s["to_offset"]) for s in moved["steps"]] == [(3, 1)]
    again = cluster("consume", read, "--group", read, *JSON).json_lines
    assert [(m["body"], m["redelivered"]) for m in again] == [("2", True), ("3", True)]
    (recorded,) = cluster("group", "resets", read, *JSON).json
    assert (recorded["op_id"], recorded["by"]) == (moved["op_id"], "tester")
    assert recorded["reason"] == "a bug"
    undone = cluster("group", "reset-offsets", read, "--undo", moved["op_id"], "--execute")
    assert (undone.code, undone.rows[0]["TO"]) == (0, "3")
    rows = cluster("group", "resets", read, *JSON).json
    assert [row["undone_op_id"] for row in rows] == [moved["op_id"], None]
    assert rows[0]["reason"] == f"undo of {moved['op_id']}"


def test_exported_plan_can_be_executed_from_a_file(
    cluster: RunningCluster, read: str, tmp_path: Path
) -> None:
    exported = cluster("group", "reset-offsets", read, "--to-current", "--export")
    assert exported.out == f"{read},broker-0,0,3\n"
    plan = tmp_path / "kept.csv"
    plan.write_text(exported.out.replace(",3", ",1"))
    arguments = ("group", "reset-offsets", read, "--from-file", str(plan), *JSON)
    assert cluster(*arguments).json["steps"][0]["to_offset"] == 1
    assert _queue(cluster, read)["committed_offset"] == 3
    assert cluster(*arguments, "--execute", "--reason", "r").code == 0
    assert _queue(cluster, read)["committed_offset"] == 1
    plan.write_text(f"{read},broker-0,7,1\n")
    assert _reason(cluster(*arguments[:-2]).err) == "QUEUE_NOT_FOUND"


def test_reset_beyond_the_queue_stops_at_its_end_with_a_note(
    cluster: RunningCluster, read: str
) -> None:
    moved = cluster(
        "group", "reset-offsets", read, "--to-offset", "9", "--reason", "r", "--execute"
    )
    assert moved.code == 0
    assert moved.rows[0]["TO"] == "3"
    assert f"{read}/broker-0/0: offset 9 is beyond the end; 3 is the end" in moved.out


def test_reset_goes_to_times(cluster: RunningCluster, read: str) -> None:
    far = cluster("group", "reset-offsets", read, "--by-duration", "1h", *JSON).json
    near = cluster("group", "reset-offsets", read, "--to-datetime", "2999-01-01", *JSON).json
    assert [done["steps"][0]["to_offset"] for done in (far, near)] == [0, 3]


def test_reset_of_a_missing_group_or_topic_exits_with_1(cluster: RunningCluster, read: str) -> None:
    for arguments, reason in (
        (("nobody", "--to-latest"), "GROUP_NOT_FOUND"),
        ((read, "--to-latest", "--topic", "nothing"), "TOPIC_NOT_FOUND"),
        ((read, "--to-latest", "--topic", read, "--queue", "broker-0/7"), "QUEUE_NOT_FOUND"),
        ((read, "--undo", "nothing"), "OPERATION_NOT_FOUND"),
    ):
        refused = cluster("group", "reset-offsets", *arguments, "--reason", "r", "--execute")
        assert (refused.code, refused.out, _reason(refused.err)) == (1, "", reason)


def test_clone_copies_the_progress_of_a_group(cluster: RunningCluster, read: str) -> None:
    other = f"{read}-2"
    done = cluster("group", "clone", read, other, "--reason", "r", "--execute", *JSON).json
    assert [(s["group"], s["to_offset"]) for s in done["steps"]] == [(other, 3)]
    assert cluster("consume", read, "--group", other).out == ""
    assert cluster("group", "resets", other, *JSON).json[0]["kind"] == "clone"


def test_paused_group_shows_name_and_reason_until_it_is_resumed(
    cluster: RunningCluster, lines: Path, read: str
) -> None:
    paused = cluster("group", "pause", read, "--reason", "flood", "--by", "me", *JSON).json
    assert (paused["pause"]["by"], paused["pause"]["reason"]) == ("me", "flood")
    with member(cluster, read) as reading:
        cluster("produce", read, "--file", str(lines))
        (diagnosis,) = cluster("group", "why-stuck", read, *JSON).json
        assert (diagnosis["reason"], diagnosis["lag"], diagnosis["stuck"]) == ("PAUSED", 3, True)
        assert (diagnosis["evidence"]["by"], diagnosis["evidence"]["reason"]) == ("me", "flood")
        assert diagnosis["remedy"]
        assert cluster("group", "why-stuck", read, "--check").code == 1
        described = cluster("group", "describe", read)
        assert "paused by me since " in described.out
        assert [r["STATE"] for r in cluster("group", "list").rows if r["GROUP"] == read] == [
            "Paused"
        ]
        assert cluster("group", "resume", read, *JSON).json["pause"] is None
        assert reading.stdout is not None
        assert [reading.stdout.readline().split()[-1] for _ in "123"] == [b"1", b"2", b"3"]
    for verb in ("pause", "resume"):
        refused = cluster("group", verb, "nobody", "--reason", "r")
        assert (refused.code, _reason(refused.err)) == (1, "GROUP_NOT_FOUND")


def test_group_without_members_has_a_lag_in_messages_and_seconds(
    cluster: RunningCluster, lines: Path, read: str
) -> None:
    (idle,) = cluster("group", "why-stuck", read, *JSON).json
    assert (idle["reason"], idle["lag"], idle["lag_ms"]) == ("IDLE", 0, 0)
    assert cluster("group", "why-stuck", read, "--check").code == 0
    cluster("produce", read, "--file", str(lines))
    behind = cluster("group", "lag", read, *JSON).json
    assert (behind["group"], behind["lag"], behind["unknown_count"]) == (read, 3, 0)
    assert behind["lag_ms"] == behind["queues"][0]["lag_ms"] > 0
    (row,) = cluster("group", "lag", read).rows
    assert (row["CURRENT-OFFSET"], row["LOG-END-OFFSET"], row["LAG"]) == ("3", "6", "3")
    assert float(row["LAG-SECONDS"]) > 0
    until_now(
        lambda: cluster("group", "why-stuck", read, *JSON).json[0]["reason"] == "NO_MEMBER",
        timeout_s=30,
    )


def test_ownership_can_be_changed_without_members_only(cluster: RunningCluster, read: str) -> None:
    changed = cluster(
        "group", "update", read, "--policy", "staged-latest", "--strategy", "average-by-circle",
        *JSON,
    ).json  # fmt: skip
    assert (changed["policy"], changed["strategy"]) == ("staged_latest", "average_by_circle")
    assert changed["ownership"] == "on"
    with member(cluster, read):
        refused = cluster("group", "update", read, "--ownership", "off")
        assert (refused.code, _reason(refused.err)) == (1, "GROUP_IN_USE")
    assert cluster("group", "update", read, "--ownership", "off", *JSON).json["ownership"] == "off"
    new = cluster("group", "update", f"{read}-new", "--policy", "warn")
    assert new.code == 0
    assert f"group {read}-new is created" in new.out


def test_rejected_client_is_shown_with_its_subscription(cluster: RunningCluster, read: str) -> None:
    with member(cluster, read):
        assert cluster("consume", read, "--group", read, "--filter", "A").code == 1
        until_now(lambda: cluster("group", "describe", read, *JSON).json["refused"])
        (refused,) = cluster("group", "describe", read, *JSON).json["refused"]
        (difference,) = refused["error"]["differences"]
        assert (difference["newcomer_value"], difference["member_value"]) == ("A", "*")
        described = cluster("group", "describe", read).out
        assert f"{read} expression: {refused['client_id']} has 'A'" in described


def test_assignments_name_the_member(cluster: RunningCluster, read: str) -> None:
    with member(cluster, read):
        described = cluster("group", "describe", read, *JSON).json
        (joined,) = described["members"]
        (dealt,) = described["assignments"]
        assert dealt["client_id"] == joined["client_id"]
        assert described["queues"][0]["assigned"] == joined["client_id"]


def test_group_is_deleted_without_members_only(cluster: RunningCluster, read: str) -> None:
    with member(cluster, read):
        refused = cluster("group", "delete", read, "--yes")
        assert (refused.code, _reason(refused.err)) == (1, "GROUP_IN_USE")
    deleted = cluster("group", "delete", read, "--yes", *JSON).json
    assert deleted == {"name": read, "deleted": True, "queue_count": 1}
    missing = cluster("group", "describe", read)
    assert (missing.code, _reason(missing.err)) == (1, "GROUP_NOT_FOUND")
    assert len(cluster("consume", read, "--group", read).out.splitlines()) == 3


def test_queue_released_by_force_is_acquired_again(
    cluster: RunningCluster, lines: Path, read: str
) -> None:
    queue = (read, read, "broker-0", "0")
    with member(cluster, read) as reading:
        before = _lock(cluster, read)
        described = cluster("lock", "show", *queue, *JSON).json
        assert described["client_id"] == before["client_id"]
        assert 0 < described["lease_left_ms"] <= 30_000
        assert described["subscription_generation"] > 0
        looked = cluster("lock", "release", *queue)
        assert (looked.code, looked.rows[0]["OWNER"]) == (0, before["client_id"])
        assert "nothing was changed" in looked.out
        assert _lock(cluster, read)["token"] == before["token"]
        force = ("lock", "release", *queue, "--force", "--reason", "r", *JSON)
        forced = cluster(*force).json
        assert forced["client_id"] == before["client_id"]
        assert forced["token"] > before["token"]
        until_now(lambda: _lock(cluster, read)["state"] == "held", timeout_s=60)
        cluster("produce", read, "--file", str(lines))
        assert reading.stdout is not None
        assert [reading.stdout.readline().split()[-1] for _ in "123"] == [b"1", b"2", b"3"]
        release = cluster("lock", "release-all", before["client_id"], *JSON).json
        assert (release["released_count"], len(release["kept"])) == (0, 1)
        released = cluster("lock", "release-all", before["client_id"])
        assert "released: 0 queues; kept: 1" in released.out
    nobody = cluster("lock", "release-all", "nobody")
    assert (nobody.code, nobody.out.splitlines()[-1]) == (0, "nobody owns no queue")
    never = cluster("lock", "release", "g", read, "broker-0", "0", "--force", "--reason", "r")
    assert (never.code, _reason(never.err)) == (1, "UNKNOWN_QUEUE")


@pytest.mark.long
def test_group_is_diagnosed_while_a_service_is_down(cluster: RunningCluster, read: str) -> None:
    pid = cluster.running("offsets")
    os.kill(pid, signal.SIGSTOP)
    try:
        stuck = cluster("group", "why-stuck", read, "--check", *JSON)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert stuck.code == 1
    (diagnosis,) = json.loads(stuck.out)
    assert (diagnosis["reason"], diagnosis["lag"]) == ("OFFSETS_UNREACHABLE", None)


@pytest.mark.parametrize(
    "words",
    [
        ("access", "grant", "billing", "consume", "group:billing"),
        ("access", "block", "identity:mallory", "--reason", "left"),
        ("quota", "set", "billing", "--topics", "9"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_change_of_access_warns_that_access_control_is_off(
    cluster: RunningCluster, words: tuple[str, ...]
) -> None:
    done = cluster(*words)
    assert done.code == 0, done.err
    assert "has no effect, because access control is off" in done.out
    json.loads(cluster(*JSON, *words).out)


def test_check_of_the_caller_says_that_access_control_is_off(cluster: RunningCluster) -> None:
    done = cluster("access", "check", "consume", "group:billing")
    assert done.code == 0, done.err
    assert done.out == "access control is off: every client may do everything\n"
