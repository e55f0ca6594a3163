"""Goal: one command shows the lag of all groups, the messages of a topic, or a node's settings.

Method: `baton up` is a process; groups that are idle, without a member and paused are in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.baton import CommandResult, RunningCluster
from tests.support.conditions import until_now

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
JSON = ("--format", "json")
TOPIC = "orders"


@pytest.fixture(scope="module")
def groups(
    cluster: RunningCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningCluster]:
    """A topic with 5 messages on 2 queues; of three groups one has handled all of them."""
    path = tmp_path_factory.mktemp("sent") / "lines"
    path.write_text("1\n2\n3\n")
    assert cluster("topic", "create", TOPIC, "--queues", "2").code == 0
    produced = cluster("produce", TOPIC, "--file", str(path), "--queue", "broker-0/0")
    assert produced.code == 0, produced.err
    for group in ("behind", "paused"):
        assert len(cluster("consume", TOPIC, "--group", group).out.splitlines()) == 3
    path.write_text("4\n5\n")
    assert cluster("produce", TOPIC, "--file", str(path), "--queue", "broker-0/1").code == 0
    assert len(cluster("consume", TOPIC, "--group", "done").out.splitlines()) == 5
    assert cluster("group", "pause", "paused", "--reason", "flood").code == 0
    yield cluster


def _stuck(cluster: RunningCluster) -> CommandResult:
    """Return the lag of all groups, after the messages are old enough to be missed."""
    lag = cluster("group", "lag")

    def settled() -> bool:
        nonlocal lag
        lag = cluster("group", "lag")
        return {row["GROUP"]: row["VERDICT"] for row in lag.rows}["behind"] == "NO_MEMBER"

    until_now(settled, timeout_s=60)
    return lag


@pytest.mark.long
def test_lag_of_all_groups_has_the_verdict_of_why_stuck(groups: RunningCluster) -> None:
    lag = _stuck(groups)
    rows = {row["GROUP"]: row for row in lag.rows}
    assert {name: (row["LAG"], row["STUCK"]) for name, row in rows.items()} == {
        "behind": ("2", "1"),
        "done": ("0", "0"),
        "paused": ("2", "1"),
    }
    assert rows["done"]["VERDICT"] == "IDLE"
    assert rows["paused"]["VERDICT"] == "PAUSED"
    assert "stuck: 2 of 3 groups\nsee: baton group why-stuck behind\n" in lag.out
    for item in groups("group", "lag", *JSON).json:
        reasons = {d["reason"] for d in groups("group", "why-stuck", item["group"], *JSON).json}
        assert item["verdict"] in reasons


def test_topic_of_the_lag_needs_a_group(groups: RunningCluster) -> None:
    assert groups("group", "lag", "--topic", TOPIC).code == 2


@pytest.mark.parametrize("command", [("group", "list"), ("mqadmin", "consumerProgress")])
def test_list_of_groups_has_their_lag(groups: RunningCluster, command: tuple[str, ...]) -> None:
    rows = {row["GROUP"]: row for row in groups(*command).rows}
    assert {name: row["LAG"] for name, row in rows.items()} == {
        "behind": "2",
        "done": "0",
        "paused": "2",
    }
    assert float(rows["behind"]["LAG-SECONDS"]) > 0


def test_list_of_groups_without_lag_diagnoses_none(groups: RunningCluster) -> None:
    assert {row["LAG"] for row in groups("group", "list", "--no-lag").rows} == {"-"}


def _bodies(read: CommandResult) -> list[str]:
    assert read.code == 0, read.err
    return [item["body"] for item in read.json_lines]


def test_peek_shows_messages_and_changes_no_progress(groups: RunningCluster) -> None:
    before = groups("group", "describe", "behind", *JSON).json["queues"]
    assert _bodies(groups("topic", "peek", TOPIC, *JSON)) == ["1", "2", "3", "4", "5"]
    assert _bodies(groups("topic", "peek", TOPIC, "--count", "2", *JSON)) == ["4", "5"]
    first = ("topic", "peek", TOPIC, "--from", "first")
    assert _bodies(groups(*first, "--count", "2", *JSON)) == ["1", "2"]
    assert _bodies(groups("topic", "peek", TOPIC, "--queue", "broker-0/0", *JSON)) == list("123")
    assert _bodies(groups("topic", "peek", TOPIC, "--from", "1h", "--queue", "1", *JSON)) == [
        "4",
        "5",
    ]
    assert _bodies(groups("topic", "peek", TOPIC, "--from", "2999-01-01", *JSON)) == []
    assert groups("group", "describe", "behind", *JSON).json["queues"] == before
    assert {group["name"] for group in groups("group", "list", *JSON).json} == {
        "behind",
        "done",
        "paused",
    }
    assert groups("topic", "peek", TOPIC).out.splitlines()[0].endswith(f"{TOPIC}/broker-0/0@0 1")


def test_peek_at_a_missing_queue_or_invalid_start_is_rejected(groups: RunningCluster) -> None:
    for arguments, code, reason in (
        (("nothing",), 1, "TOPIC_NOT_FOUND"),
        ((TOPIC, "--queue", "broker-0/7"), 1, "QUEUE_NOT_FOUND"),
        ((TOPIC, "--from", "last"), 2, "--from last"),
        ((TOPIC, "--from", "soon"), 2, "soon"),
    ):
        refused = groups("topic", "peek", *arguments)
        assert (refused.code, reason in refused.err) == (code, True), refused


def test_settings_of_a_node_are_those_of_its_process(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_STORAGE_FLUSH_INTERVAL_MS", "77")
    rows = {
        item["variable"]: item
        for item in cluster("config", "print", "--remote", "broker-0", *JSON).json
    }
    assert (rows["BATON_STORAGE_NODE_ID"]["value"]) == "broker-0"
    assert rows["BATON_STORAGE_NODE_ID"]["source"] == "environment"
    assert "77" not in {row["value"] for row in rows.values()}
    assert rows["BATON_STORAGE_SEGMENT_BYTES"]["source"] == "default"
    named = cluster("config", "print", "offsets", "--remote", "offsets-0", *JSON)
    assert {item["variable"].split("_")[1] for item in named.json} == {"OFFSETS"}


def test_settings_of_a_node_that_is_not_registered_are_rejected(cluster: RunningCluster) -> None:
    refused = cluster("config", "print", "--remote", "storage/nothing")
    assert refused.code == 1
    assert "no node storage/nothing is registered" in refused.err
    assert cluster("config", "print", "offsets", "--remote", "storage/broker-0").code == 1


def test_check_of_the_cluster_finds_the_stuck_and_the_paused_group(groups: RunningCluster) -> None:
    _stuck(groups)
    checked = groups("cluster", "check", *JSON)
    found = {one["name"]: one for one in checked.json["checks"]}
    assert len(found) >= 20
    assert checked.code == 1
    assert found["groups-stuck"]["level"] == "failed"
    assert found["groups-stuck"]["findings"][0].startswith("group behind is stuck (NO_MEMBER)")
    assert found["groups-paused"]["level"] == "warning"
    assert "baton group resume" in found["groups-paused"]["remedy"]
    assert found["access"]["findings"] == ["access control is off on all nodes"]
    for name in ("services", "health", "answers", "versions", "clocks", "config-drift", "damage"):
        assert found[name]["level"] == "ok", found[name]
    passed = groups("cluster", "check", "--only", "clocks,groups-paused")
    assert passed.code == 0, passed
    assert passed.out.splitlines()[-1] == "2 checks: 1 ok, 1 with warnings, 0 not passed"
    assert groups("cluster", "check", "--only", "clock").code == 2


def test_settings_of_the_nodes_are_compared(cluster: RunningCluster) -> None:
    same = cluster("cluster", "config", "--diff")
    assert same.code == 0, same
    assert "\n0 settings with several values on 4 nodes" in same.out
    assert cluster("cluster", "config", "--service", "nothing").code == 1


def test_values_of_mqadmin_are_checked_as_those_of_baton(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    refused = cluster("mqadmin", "updateTopic", "-t", "huge", "-r", "5000")
    assert (refused.code, "--queues" in refused.err) == (2, True), refused
    assert cluster("topic", "describe", "huge").code == 1
