"""Goal: the commands work on a real cluster, and `up` stops, restarts and reports its services.

Method: `baton up` is a process, as a user starts it; the effect of one command is checked by
another one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.baton import BATON, CommandResult, RunningCluster, baton, up
from tests.support.conditions import lives, until_now

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


@pytest.mark.long
def test_messages_and_progress_survive_ctrl_c(tmp_path: Path) -> None:
    with up(tmp_path / "data") as first:
        assert first("topic", "create", "t", "--queues", "3").code == 0
        with first.started("produce", "t") as producing:
            out, _ = producing.communicate(b"1\n2\n3\n4\n5")
            assert out.startswith(b"5 messages stored FSYNCED\n")
        read = first("consume", "t", "--group", "g", "--from", "first", "--count", "2")
        assert len(read.out.splitlines()) == 2
        assert first.interrupt() == 0
        assert [name for name, pid in first.pids.items() if lives(pid)] == []
        assert "killed" not in first.stderr_text()
    with up(tmp_path / "data") as second:
        places = [
            {endpoint["name"]: endpoint["address"] for endpoint in running.announced["endpoints"]}
            for running in (first, second)
        ]
        assert places[0] == places[1]
        rest = second("consume", "t", "--group", "g", "--format", "json").json_lines
        assert len(rest) == 3
        bodies = [line.split()[-1] for line in read.out.splitlines()]
        assert sorted(bodies + [message["body"] for message in rest]) == ["1", "2", "3", "4", "5"]
        assert second.interrupt() == 0


def test_second_cluster_on_one_data_directory_is_rejected_with_the_process_id(
    tmp_path: Path,
) -> None:
    with up(tmp_path / "data") as first:
        ports = (tmp_path / "data" / "ports.json").read_text()
        second = run_baton("up", "--data-dir", str(tmp_path / "data"))
        assert second.returncode == 1
        assert f"DATA_DIR_IN_USE: {tmp_path / 'data'} is used by process {first.process.pid}" in (
            second.stderr
        )
        assert "--data-dir" in second.stderr
        assert (tmp_path / "data" / "ports.json").read_text() == ports
        assert first("topic", "list").code == 0


@pytest.mark.long
def test_port_in_use_is_rejected_with_a_remedy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = str(stranger.getsockname()[1])
        refused = run_baton("up", "--data-dir", str(tmp_path / "a"), "--nameserver-port", port)
        assert refused.returncode == 1
        assert f"PORT_IN_USE: another process uses port {port} on 127.0.0.1" in refused.stderr
        assert "--nameserver-port 0" in refused.stderr
        stored = json.dumps({"nameserver": int(port)})
        (tmp_path / "a" / "ports.json").write_text(stored)
        again = run_baton("up", "--data-dir", str(tmp_path / "a"))
        assert "PORT_IN_USE" in again.stderr, "the port of the last start is not replaced silently"
        assert (tmp_path / "a" / "ports.json").read_text() == stored
        with up(tmp_path / "a", "--nameserver-port", "0") as running:
            assert not running.announced["nameserver"].endswith(f":{port}")
            assert running("topic", "list").code == 0


def run_baton(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BATON, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.long
def test_modules_in_the_users_folder_do_not_break_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Children import from their working directory, which is the data directory."""
    for name in ("queue", "random"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a module of the user')\n")
    monkeypatch.chdir(tmp_path)
    script = Path(sys.executable).with_name("baton")
    with up(Path("data"), command=(str(script),)) as running:
        assert running("topic", "list").code == 0
        assert baton("config", "print", "lockmgr").code == 0
        assert running.interrupt() == 0
    assert (tmp_path / "data" / "logs" / "storage.log").exists()


def test_killed_supervisor_leaves_no_orphans(tmp_path: Path) -> None:
    with up(tmp_path / "data") as running:
        running.process.kill()
        running.process.wait()
        until_now(lambda: not any(map(lives, running.pids.values())))


def test_killed_service_is_reported_and_restarted(cluster: RunningCluster) -> None:
    os.kill(cluster.pids["offsets"], signal.SIGKILL)
    until_now(lambda: "offsets is ready again: pid " in cluster.stderr_text(), timeout_s=60)
    assert "offsets ended: SIGKILL; the end of " in cluster.stderr_text()
    assert "offsets starts again in " in cluster.stderr_text()
    pid = int(cluster.stderr_text().partition("offsets is ready again: pid ")[2].split()[0])
    assert lives(pid)
    assert pid != cluster.pids["offsets"]


def test_second_up_on_a_directory_is_rejected(cluster: RunningCluster) -> None:
    refused = baton("up", "--data-dir", str(cluster.stderr.with_name("data")))
    assert refused.code == 1
    assert "DATA_DIR_IN_USE: " in refused.err
    assert f" is used by process {cluster.process.pid}" in refused.err
    assert lives(cluster.pids["etcd"])


def test_topic_is_created_described_and_deleted(cluster: RunningCluster) -> None:
    created = cluster("topic", "create", "come", "--queues", "2", "--format", "json")
    assert (created.code, created.json["created"], created.json["queue_count"]) == (0, True, 2)
    again = cluster("topic", "create", "come", "--queues", "2", "--format", "json")
    assert (again.code, again.json["created"]) == (0, False)
    other = cluster("topic", "create", "come", "--queues", "3")
    assert (other.code, other.err.split()[1]) == (1, "TOPIC_EXISTS:")
    assert "come" in [row["TOPIC"] for row in cluster("topic", "list").rows]
    assert [row["QUEUE"] for row in cluster("topic", "describe", "come").rows] == ["0", "1"]
    assert cluster("topic", "delete", "come", "--yes").code == 0
    missing = cluster("topic", "describe", "come", "--format", "json")
    assert missing.code == 1
    assert json.loads(missing.err)["error"]["reason"] == "TOPIC_NOT_FOUND"


def test_system_topics_are_listed_with_all_only(cluster: RunningCluster) -> None:
    def listed(*more: str) -> set[str]:
        rows = cluster("topic", "list", *more).rows
        return {row["TOPIC"] for row in rows if row["TOPIC"].startswith("BATON_SYS_")}

    until_now(lambda: listed("--all") == {"BATON_SYS_METRICS", "BATON_SYS_ALERTS"})
    assert listed() == set()


def test_top_without_a_terminal_prints_one_screen(cluster: RunningCluster, lines: Path) -> None:
    cluster("topic", "create", "shown", "--queues", "2")
    cluster("produce", "shown", "--file", str(lines))
    cluster("consume", "shown", "--group", "looked-at", "--from", "first")
    frame = cluster("top", "--once", "--seconds", "1")
    assert (frame.code, "4 nodes" in frame.out) == (0, True)
    assert {"TOPIC", "GROUP", "OWNER", "TIME"} <= set(frame.out.split())
    assert "looked-at" in frame.out
    shown = cluster("top", "--seconds", "1", "--format", "json").json
    assert {row["group"]: row["lag"] for row in shown["groups"]}["looked-at"] == 0


def test_compacted_topic_is_created_changed_and_needs_keys(
    cluster: RunningCluster, lines: Path
) -> None:
    lines.write_bytes(b"a\n")
    assert cluster("topic", "create", "table", "--min-lag", "1s").code == 2, "without --compact"
    table = ("topic", "create", "table", "--queues", "1", "--compact", "--min-lag", "1s")
    assert cluster(*table, "--format", "json").json["compaction"] == {
        "tombstone_retention_ms": 86_400_000,
        "min_lag_ms": 1_000,
        "dirty_percent": 50,
    }
    changed = cluster("topic", "update", "table", "--dirty-ratio", "0.2", "--format", "json")
    assert changed.json["compaction"]["dirty_percent"] == 20
    refused = cluster("topic", "update", "table", "--queues", "2")
    assert (refused.code, "can't be changed" in refused.err) == (1, True)
    assert "tombstones stay 1d" in cluster("topic", "describe", "table").out
    without_key = cluster("produce", "table", "--file", str(lines))
    assert (without_key.code, "ordering key" in without_key.err) == (1, True)
    cluster("topic", "delete", "table", "--yes")


def test_topic_update_changes_queues_and_permission(cluster: RunningCluster, lines: Path) -> None:
    lines.write_bytes(b"a\n")
    cluster("topic", "create", "change", "--queues", "2", "--retention", "7d12h")
    assert "messages are kept for 7d12h" in cluster("topic", "describe", "change").out
    sized = cluster("topic", "update", "change", "--retention-bytes", "1GiB", "--format", "json")
    assert (sized.json["retention_ms"], sized.json["retention_bytes"]) == (648_000_000, 1 << 30)
    assert cluster("topic", "update", "change", "--retention", "0s").code == 1
    both = ("--retention", "default", "--retention-bytes", "default")
    reset = cluster("topic", "update", "change", *both, "--format", "json").json
    assert (reset["retention_ms"], reset["retention_bytes"]) == (0, 0)
    grown = cluster("topic", "update", "change", "--queues", "4", "--format", "json")
    assert (grown.code, grown.json["queue_count"], grown.json["permission"]) == (0, 4, "read_write")
    shrunk = cluster("topic", "update", "change", "--queues", "1", "--permission", "r")
    assert shrunk.code == 0
    assert "deleted after every group has read them" in shrunk.out
    as_json = ("topic", "describe", "change", "--format", "json")
    until_now(lambda: len(cluster(*as_json).json["queues"]) == 1)
    (row,) = [row for row in cluster("topic", "list").rows if row["TOPIC"] == "change"]
    assert (row["QUEUES"], row["PERMISSION"]) == ("1", "read")
    refused = cluster("produce", "change", "--file", str(lines))
    assert (refused.code, refused.err.split()[1]) == (1, "NOT_WRITABLE:")
    assert cluster("topic", "update", "change", "--permission", "rw").code == 0
    assert cluster("topic", "update", "change").code == 2
    missing = cluster("topic", "update", "nobody", "--queues", "3")
    assert (missing.code, missing.err.split()[1]) == (1, "TOPIC_NOT_FOUND:")
    assert cluster("topic", "update", "change", "--permission", "x").code == 2


def test_messages_are_found_by_id_key_offset_and_time(cluster: RunningCluster, lines: Path) -> None:
    cluster("topic", "create", "look-up", "--queues", "1")
    receipts = cluster(
        "produce", "look-up", "--file", str(lines), "--key", "k", "--key", "other",
        "--tag", "t", "--format", "json",
    ).json_lines  # fmt: skip
    by_id = cluster("message", "get", receipts[1]["message_id"], "--format", "json").json
    assert (by_id["body"], by_id["offset"], by_id["keys"]) == ("2", 1, ["k", "other"])
    by_key = cluster("message", "get", "--topic", "look-up", "--key", "other", "--format", "json")
    assert [message["body"] for message in by_key.json_lines] == ["3", "2", "1"]
    place = ["message", "get", "--topic", "look-up", "--queue", "broker-0/0", "--format", "json"]
    assert cluster(*place, "--offset", "2").json["body"] == "3"
    for time in ("0", "2001-01-01T00:00:00Z", str(by_id["store_unix_ms"] - 60_000)):
        assert cluster(*place, "--time", time).json["body"] == "1"
    plain = cluster("message", "get", receipts[0]["message_id"])
    assert plain.out.split()[1:] == [
        receipts[0]["message_id"], "look-up/broker-0/0@0", "tag=t", "keys=k,other", "1",
    ]  # fmt: skip
    for arguments, reason in (
        ((*place, "--offset", "3"), "MESSAGE_NOT_FOUND"),
        ((*place, "--offset", "4"), "OFFSET_OUT_OF_RANGE"),
        ((*place, "--time", "2999-01-01T00:00:00Z"), "MESSAGE_NOT_FOUND"),
        ((*place, "--time", "tomorrow"), "INVALID_ARGUMENT"),
        (("message", "get", "--topic", "look-up", "--key", "nobody"), "MESSAGE_NOT_FOUND"),
        (("message", "get", "rubbish"), "INVALID_ARGUMENT"),
        (("message", "get", "broker-0-1-0"), "MESSAGE_NOT_FOUND"),
    ):
        refused = cluster(*arguments)
        assert (refused.code, refused.out) == (1, "")
        assert reason in refused.err


@pytest.mark.long
def test_fsck_checks_the_files_of_a_stopped_node(tmp_path: Path) -> None:
    with up(tmp_path / "data") as running:
        running("topic", "create", "t")
        with running.started("produce", "t") as producing:
            producing.communicate(b"1\n2\n3")
        folder = str(tmp_path / "data" / "storage")
        in_use = running("fsck", folder, "--format", "json")
        assert running.interrupt() == 0
    command = [*BATON, "fsck", folder, "--format", "json"]
    clean = subprocess.run(command, capture_output=True, check=True)
    report = json.loads(clean.stdout)
    assert (report["clean"], report["indexes_compared"]) == (True, True)
    assert report["messages"] >= 3  # with the system topics of the services
    assert in_use.code == 1


def test_receipts_have_queue_and_offset_of_each_line(cluster: RunningCluster, lines: Path) -> None:
    cluster("topic", "create", "receipts", "--queues", "2")
    lines.write_bytes(b"a\n\xff\n")
    receipts = cluster(
        *("produce", "receipts", "--file", str(lines), "--format", "json"),
        *("--tag", "T", "--key", "k1", "--key", "k2", "--ordering-key", "o"),
    ).json_lines
    assert [r["offset"] for r in receipts] == [0, 1]
    assert {r["durability"] for r in receipts} == {"FSYNCED"}
    (queue_id,) = {r["queue_id"] for r in receipts}
    messages = cluster(
        "consume", "receipts", "--group", "receipts", "--from", "first", "--format", "json"
    ).json_lines
    assert [(m["offset"], m["queue_id"], m["tag"], m["keys"]) for m in messages] == [
        (0, queue_id, "T", ["k1", "k2"]),
        (1, queue_id, "T", ["k1", "k2"]),
    ]
    assert [m.get("body") for m in messages] == ["a", None]
    assert messages[1]["body_base64"] == "/w=="
    assert [m["store_unix_ms"] for m in messages] == [r["store_unix_ms"] for r in receipts]


def test_produce_to_a_missing_topic_is_rejected(cluster: RunningCluster, lines: Path) -> None:
    refused = cluster("produce", "nowhere", "--file", str(lines))
    assert (refused.code, refused.out) == (1, "0 messages stored\n")
    assert refused.err.startswith("error: TOPIC_NOT_FOUND: ")


def test_too_long_line_is_rejected_and_earlier_lines_are_stored(
    cluster: RunningCluster, lines: Path
) -> None:
    cluster("topic", "create", "long", "--queues", "1")
    lines.write_bytes(b"a\n" + b"x" * (5 * 1024 * 1024) + b"\nb\n")
    refused = cluster("produce", "long", "--file", str(lines))
    assert refused.code == 1
    assert refused.out.splitlines()[0] == "1 message stored FSYNCED"
    assert refused.err.startswith("error: LIMIT_EXCEEDED: ")


def test_request_is_replied_to_by_a_consumer_and_its_reply_printed(cluster: RunningCluster) -> None:
    cluster("topic", "create", "prices", "--queues", "2")
    with cluster.started("request", "prices", "IBM", "--timeout", "60s") as requesting:
        consumed = cluster(
            *("consume", "prices", "--group", "quotes", "--follow", "--count", "1", "--reply", "42")
        )
        assert (consumed.code, consumed.out.split()[-1]) == (0, "IBM")
        assert requesting.communicate()[0] == b"42\n"
        assert requesting.returncode == 0
    late = cluster("request", "prices", "MSFT", "--timeout", "200ms")
    assert late.code != 0
    assert "no reply to a request to topic prices within 200 ms" in late.err


def test_closed_standard_output_ends_the_command_quietly(
    cluster: RunningCluster, lines: Path
) -> None:
    cluster("topic", "create", "pipe", "--queues", "1")
    cluster("produce", "pipe", "--file", str(lines))
    with cluster.started("consume", "pipe", "--group", "pipe", "--follow") as reading:
        assert reading.stdout is not None
        assert reading.stdout.readline().split()[-1] == b"1"
        reading.stdout.close()

        def ended() -> bool:
            cluster("produce", "pipe", "--file", str(lines))
            return reading.poll() is not None

        until_now(ended, timeout_s=60)
        assert reading.returncode == 128 + signal.SIGPIPE
        assert reading.stderr is not None
        assert b"error" not in reading.stderr.read()


def test_consume_with_a_tag_filter_prints_matching_messages_and_ends(
    cluster: RunningCluster, lines: Path
) -> None:
    cluster("topic", "create", "tags", "--queues", "2")
    for tag in ("A", "B", "C"):
        lines.write_text(f"{tag}1\n{tag}2\n")
        cluster("produce", "tags", "--tag", tag, "--file", str(lines))
    read = cluster("consume", "tags", "--group", "tags", "--from", "first", "--filter", "A||C")
    assert sorted(line.split()[-1] for line in read.out.splitlines()) == ["A1", "A2", "C1", "C2"]
    rows = cluster("group", "describe", "tags").rows
    assert [row["LAG"] for row in rows] == ["0", "0"]
    assert sum(int(row["CURRENT-OFFSET"]) for row in rows) == 6


def test_consume_with_a_condition_prints_matching_messages(
    cluster: RunningCluster, lines: Path
) -> None:
    cluster("topic", "create", "priced", "--queues", "2")
    for price in ("5", "20", "x"):
        lines.write_text(f"{price}\n")
        cluster("produce", "priced", "--property", f"price={price}", "--file", str(lines))
    reading = ("consume", "priced", "--group", "priced", "--from", "first", "--filter")
    assert cluster(*reading, "sql: price > 10").out.split()[-1] == "20"
    refused = cluster(*reading, "sql: price != 10")
    assert refused.code == 1
    assert "column 12: '!' is not part of the grammar" in refused.err


def test_new_group_starts_first_and_an_existing_one_as_its_members(
    cluster: RunningCluster, lines: Path
) -> None:
    cluster("topic", "create", "start", "--queues", "1")
    cluster("produce", "start", "--file", str(lines))
    late = ("consume", "start", "--group", "late")
    assert cluster(*late, "--from", "last").out == ""
    assert len(cluster("consume", "start", "--group", "early").out.splitlines()) == 3
    with cluster.started(*late, "--from", "last", "--follow"):
        until_now(lambda: _group_state(cluster, "late") == "Stable", timeout_s=60)
        assert cluster(*late).code == 0
        assert cluster(*late, "--from", "first").code == 1


def test_bad_expression_is_rejected(cluster: RunningCluster) -> None:
    cluster("topic", "create", "expression", "--queues", "1")
    refused = cluster("consume", "expression", "--group", "expression", "--filter", "A||")
    assert refused.code == 1
    assert "BAD_EXPRESSION" in refused.err


def test_other_subscription_is_rejected_with_both_clients(cluster: RunningCluster) -> None:
    cluster("topic", "create", "conflict", "--queues", "1")
    arguments = ("consume", "conflict", "--group", "conflict")
    with cluster.started(*arguments, "--filter", "A", "--follow"):
        until_now(lambda: _group_state(cluster, "conflict") == "Stable", timeout_s=60)
        refused = cluster(*arguments, "--filter", "B", "--format", "json")
    assert refused.code == 1
    error = json.loads(refused.err)["error"]
    assert error["reason"] == "SUBSCRIPTION_CONFLICT"
    (difference,) = error["differences"]
    assert (difference["newcomer_value"], difference["member_value"]) == ("B", "A")


def test_members_of_a_group_have_one_order_and_messages_show_their_ordering_keys(
    cluster: RunningCluster,
) -> None:
    cluster("topic", "create", "keyed", "--queues", "1")
    _produce_keyed(cluster, b"a")
    arguments = ("consume", "keyed", "--group", "keyed", "--from", "first")
    with cluster.started(*arguments, "--order", "key", "--follow") as reading:
        assert reading.stdout is not None
        assert "ordering_key=account 7 a" in reading.stdout.readline().decode()
        refused = cluster(*arguments, "--order", "queue", "--format", "json")
        described = cluster("group", "describe", "keyed").out
        reading.terminate()
        reading.wait(30)
    assert "clustering, ordered by key, from first" in described
    assert refused.code == 1
    (difference,) = json.loads(refused.err)["error"]["differences"]
    assert (difference["setting"], difference["newcomer_value"]) == ("order", "QUEUE")
    _produce_keyed(cluster, b"b")
    as_its_members = cluster(*arguments, "--count", "1", "--format", "json").json_lines
    assert [one["ordering_key"] for one in as_its_members] == ["account 7"]


def _produce_keyed(cluster: RunningCluster, body: bytes) -> None:
    with cluster.started("produce", "keyed", "--ordering-key", "account 7") as producing:
        producing.communicate(body)


def _group_state(cluster: RunningCluster, group: str) -> str:
    return next((r["STATE"] for r in cluster("group", "list").rows if r["GROUP"] == group), "")


def _locks(cluster: RunningCluster, group: str) -> list[tuple[str, str | None]]:
    locks = cluster("lock", "list", "--group", group, "--format", "json").json
    return [(lock["state"], lock["client_id"]) for lock in locks]


def test_group_and_locks_show_a_running_member(cluster: RunningCluster, lines: Path) -> None:
    cluster("topic", "create", "truth", "--queues", "2")
    arguments = ("consume", "truth", "--group", "truth", "--from", "first", "--follow")
    with cluster.started(*arguments) as reading:
        until_now(lambda: [s for s, _ in _locks(cluster, "truth")] == ["held"] * 2, timeout_s=60)
        cluster("produce", "truth", "--ordering-key", "x", "--file", str(lines))
        assert reading.stdout is not None
        assert [reading.stdout.readline().split()[-1] for _ in "123"] == [b"1", b"2", b"3"]
        described = _settled(cluster, "truth", 3)
        (member,) = described["members"]
        assert {q["client_id"] for q in described["queues"]} == {member["client_id"]}
        assert {q["host"] for q in described["queues"]} == {member["host"]}
        assert sum(q["log_end_offset"] for q in described["queues"]) == 3
        assert [q["lag"] for q in described["queues"]] == [0, 0]
        assert _locks(cluster, "truth") == [("held", member["client_id"])] * 2
        reading.send_signal(signal.SIGINT)
        assert reading.wait(60) == 0
    assert _locks(cluster, "truth") == [("free", None)] * 2
    assert _group_state(cluster, "truth") == "Empty"


def _settled(cluster: RunningCluster, group: str, total: int) -> dict[str, list[dict[str, Any]]]:
    """Return the group when its committed offsets add up to `total`."""
    results: list[CommandResult] = []

    def committed() -> bool:
        results.append(cluster("group", "describe", group, "--format", "json"))
        return sum(q["committed_offset"] or 0 for q in results[-1].json["queues"]) == total

    until_now(committed, timeout_s=60)
    described: dict[str, list[dict[str, Any]]] = results[-1].json
    return described


def test_status_lists_every_service(cluster: RunningCluster) -> None:
    results: list[CommandResult] = []

    def all_answer() -> bool:
        results.append(cluster("cluster", "status", "--format", "json"))
        return results[-1].code == 0

    until_now(all_answer, timeout_s=60)
    status = results[-1].json
    nodes = {node["service"]: node for node in status["nodes"]}
    announced = {e["name"]: e for e in cluster.announced["endpoints"] if e["name"] != "etcd"}
    assert nodes.keys() == announced.keys()
    assert status["missing"] == []
    for name, node in nodes.items():
        assert (node["health"], node["role"]) == ("SERVING", "leader")
        assert node["address"] == announced[name]["address"]
        assert node["metrics_address"] == announced[name]["metrics_address"]


def test_status_exits_with_1_while_a_service_does_not_answer(cluster: RunningCluster) -> None:
    pid = cluster.running("lockmgr")
    os.kill(pid, signal.SIGSTOP)
    try:
        status = cluster("cluster", "status")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert status.code == 1
    assert "lockmgr lockmgr-0 is UNREACHABLE" in status.err
    assert [row["HEALTH"] for row in status.rows if row["SERVICE"] == "lockmgr"] == ["UNREACHABLE"]
