"""Goal: an operator measures, watches and bundles a running cluster; a consumer ends gracefully.

Method: `baton up` is a process; the effect of one command is checked by another one.
"""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import tarfile
from pathlib import Path

import click
import pytest

from batonmq import BlockingConsumer, BlockingProducer, ConsumerSettings, ReceivedMessage
from batonmq.cli.app import baton as baton_command
from batonmq.cli.completion import complete_groups, complete_topics
from tests.cli.baton import BATON, RunningCluster
from tests.support.conditions import until_now

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
JSON = ("--format", "json")


def test_terminated_consumer_releases_its_queues_and_nothing_is_redelivered(
    cluster: RunningCluster, lines: Path
) -> None:
    cluster("topic", "create", "term", "--queues", "2")
    cluster("produce", "term", "--ordering-key", "x", "--file", str(lines))
    arguments = ("consume", "term", "--group", "term", "--follow")
    with cluster.started(*arguments) as first:
        assert first.stdout is not None
        assert [first.stdout.readline().split()[-1] for _ in "123"] == [b"1", b"2", b"3"]
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 0
    locks = cluster("lock", "list", "--group", "term", *JSON).json
    assert {lock["state"] for lock in locks} == {"free"}
    assert cluster("consume", "term", "--group", "term").out == ""
    assert cluster("group", "lag", "term", *JSON).json["lag"] == 0


def test_outputs_of_a_transformer_are_listed_and_traced_to_their_input(
    cluster: RunningCluster,
) -> None:
    for topic in ("made-from", "made"):
        assert cluster("topic", "create", topic, "--queues", "1").code == 0
    with BlockingProducer(cluster.nameserver) as producer:
        receipts = [producer.send("made-from", b"%d" % number) for number in range(3)]
    handled: list[bytes] = []
    settings = ConsumerSettings(consume_from="first", send_back=False)
    subscription = {"made-from": "*"}
    with BlockingConsumer(cluster.nameserver, "maker", subscription, settings) as consumer:

        def make(message: ReceivedMessage) -> list[bytes]:
            handled.append(message.body)
            if len(handled) == 3:
                consumer.stop()
            return [message.body, message.body + b"!"]

        consumer.transform(make, to="made")
    assert cluster("group", "lag", "maker", *JSON).json["lag"] == 0
    made = cluster("consume", "made", "--group", "check", "--from", "first", *JSON).json_lines
    assert [one["body"] for one in made] == ["0", "0!", "1", "1!", "2", "2!"]

    (listed,) = cluster("group", "outputs", "maker", *JSON).json
    assert (listed["group"], listed["input_broker"], listed["queue_id"]) == (
        "maker", "broker-0", 0,
    )  # fmt: skip
    assert listed["output_count"] <= 6
    assert cluster("group", "outputs", "other", *JSON).json == []

    place = ("--topic", "made", "--queue", "0", "--offset", "3")
    traced = cluster("message", "trace", *place, *JSON).json
    made_from = traced["made_from"]
    assert (made_from["group"], made_from["offset"], made_from["number"]) == ("maker", 1, 1)
    assert made_from["message_id"] == receipts[1].message_id
    assert traced["events"][0]["event"] == "made"
    assert f"as output 1 of made-from/broker-0/0@1, {receipts[1].message_id}" in [
        one["detail"] for one in traced["events"]
    ]
    source = cluster("message", "trace", receipts[1].message_id, *JSON).json
    assert source["made_from"] is None


def test_objects_become_messages_until_an_invalid_line(
    cluster: RunningCluster, lines: Path
) -> None:
    cluster("topic", "create", "objects", "--queues", "2")
    lines.write_text(
        '{"body": "a", "queue": "broker-0/1", "properties": {"n": "1"}, "keys": ["k"]}\n'
        '{"body_base64": "/w=="}\n{"body": 5}\n{"body": "b"}\n'
    )
    arguments = ("--jsonl", "--property", "all=x", "--queue", "broker-0/0", "--rate", "100/s")
    refused = cluster("produce", "objects", "--file", str(lines), *arguments)
    assert refused.code == 1
    assert "INVALID_ARGUMENT: line 3: body: " in refused.err
    read = cluster("consume", "objects", "--group", "objects", "--from", "1h", *JSON).json_lines
    messages = {m["queue_id"]: (m.get("body"), m["properties"], m["keys"]) for m in read}
    assert messages == {1: ("a", {"all": "x", "n": "1"}, ["k"]), 0: (None, {"all": "x"}, [])}


def test_purge_prints_the_freed_and_the_remaining_bytes(
    cluster: RunningCluster, lines: Path
) -> None:
    """The only segment also has messages of other topics, so no bytes are freed at once."""
    cluster("topic", "create", "kept", "--queues", "1")
    cluster("topic", "create", "purged", "--queues", "1")
    for topic in ("kept", "purged"):
        cluster("produce", topic, "--file", str(lines))
    refused = cluster("topic", "delete", "absent", "--yes")
    assert (refused.code, "TOPIC_NOT_FOUND" in refused.err) == (1, True)
    purged = cluster("topic", "delete", "purged", "--purge", "--yes")
    assert purged.code == 0
    assert purged.out.endswith("\ntopic purged is deleted\n")
    assert re.search(
        r"broker-0: 0 bytes freed in 0 segments; \d+ bytes remain in 1 segment with messages of "
        r"other topics, which expire at 20\S+Z at the latest",
        purged.out,
    )
    again = cluster("topic", "delete", "purged", "--purge", "--yes", *JSON)
    assert (again.code, again.json["deleted"]) == (0, False)
    assert again.json["purged"][0]["purged_bytes"] == 0
    assert len(cluster("consume", "kept", "--group", "kept", *JSON).json_lines) == 3


def test_progress_is_shown_on_a_terminal_only(cluster: RunningCluster, lines: Path) -> None:
    cluster("topic", "create", "progress", "--queues", "1")
    arguments = ("produce", "progress", "--file", str(lines), *JSON)
    assert cluster(*arguments).err == ""
    ours, theirs = pty.openpty()
    try:
        command = [*BATON, "--nameserver", cluster.nameserver, *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, check=True)
        shown = os.read(ours, 65_536)
    finally:
        os.close(ours)
        os.close(theirs)
    assert [json.loads(line)["offset"] for line in done.stdout.splitlines()] == [3, 4, 5]
    assert b"messages stored" in shown


def test_interrupted_bench_deletes_its_topic(cluster: RunningCluster) -> None:
    def there() -> bool:
        return "bench-" in cluster("topic", "list").out

    with cluster.started("bench", "produce", "--rate", "10/s", "--seconds", "600") as running:
        until_now(there, timeout_s=30)
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
    assert not there()


def test_start_by_time_skips_older_messages(cluster: RunningCluster, lines: Path) -> None:
    cluster("topic", "create", "begin", "--queues", "1")
    cluster("produce", "begin", "--file", str(lines))
    assert cluster("consume", "begin", "--group", "b1", "--from", "2999-01-01").out == ""
    assert len(cluster("consume", "begin", "--group", "b2", "--from", "1h").out.splitlines()) == 3
    assert cluster("consume", "begin", "--group", "b3", "--from", "sometime").code == 2


@pytest.mark.parametrize(
    ("bench", "options"),
    [
        ("produce", ("--count", "2000", "--compression", "zstd")),
        ("produce", ("--rate", "500/s", "--seconds", "1")),
        ("end-to-end", ("--rate", "500/s", "--seconds", "1")),
        ("consume", ("--count", "5000")),
        ("consume", ("--count", "5000", "--handler", "single")),
    ],
)
def test_bench_deletes_its_topic_and_group(
    cluster: RunningCluster, bench: str, options: tuple[str, ...]
) -> None:
    measured = cluster("bench", bench, "--queues", "2", *options, *JSON)
    assert measured.code == 0, measured.err
    report = measured.json
    assert report["count"] == (int(options[1]) if options[0] == "--count" else 500)
    assert report["per_s"] > 0
    if bench != "consume":
        latency = list(report["latency_ms"].values())
        assert latency == sorted(latency)
        assert latency[0] > 0
    assert (report["missing_count"], report["repeated_count"], report["failures"]) == (0, 0, {})
    for noun in ("topic", "group"):
        names = [item["name"] for item in cluster(noun, "list", *JSON).json]
        assert [name for name in names if "bench" in name] == []


def test_bench_of_an_existing_topic_keeps_it(cluster: RunningCluster, lines: Path) -> None:
    cluster("topic", "create", "mine", "--queues", "1")
    cluster("produce", "mine", "--file", str(lines))
    assert cluster("bench", "consume", "--topic", "mine", "--handler", "single").code == 0
    assert cluster("topic", "stats", "mine", *JSON).json[0]["count"] == 3
    cluster("topic", "create", "empty", "--queues", "1")
    assert cluster("bench", "consume", "--topic", "empty").code == 1


def test_stats_show_offsets_and_store_times_of_queues(cluster: RunningCluster, lines: Path) -> None:
    cluster("topic", "create", "stats", "--queues", "2")
    cluster("produce", "stats", "--queue", "broker-0/1", "--file", str(lines))
    empty, full = cluster("topic", "stats", "stats", *JSON).json
    assert (empty["count"], empty["last_store_unix_ms"]) == (0, None)
    assert (full["count"], full["first_offset"], full["next_offset"]) == (3, 0, 3)
    assert empty["stored_bytes"] == 0 < full["stored_bytes"]
    assert (
        f"stats: {full['stored_bytes']:,} bytes in 2 queues"
        in cluster("topic", "stats", "stats").out
    )
    assert full["idle_ms"] >= 0
    with cluster.started(
        "--format", "json", "topic", "stats", "stats", "--watch", "--interval", "0.2"
    ) as watching:
        assert watching.stdout is not None
        idle_count = 0
        while idle_count < 3:
            idle_count += watching.stdout.readline().strip() == b'"per_s": 0.0'
        watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == 0


def test_members_are_listed_with_their_queues(cluster: RunningCluster) -> None:
    cluster("topic", "create", "members", "--queues", "2")
    assert cluster("group", "members", "nobody").code == 1
    with cluster.started("consume", "members", "--group", "members", "--follow") as reading:

        def dealt() -> bool:
            members = cluster("group", "members", "members", *JSON)
            queues = [q for m in json.loads(members.out or "[]") for q in m["queues"]]
            return len([q for q in queues if q["topic"] == "members"]) == 2

        until_now(dealt, timeout_s=60)
        (row,) = cluster("group", "members", "members", "--format", "wide").rows
        assert "members/broker-0/0" in row["ASSIGNMENT"]
        reading.send_signal(signal.SIGTERM)
        assert reading.wait(60) == 0


def test_brokers_and_replication_are_shown(cluster: RunningCluster) -> None:
    (broker,) = cluster("cluster", "brokers", "--seconds", "0.2", *JSON).json
    assert (broker["broker"], broker["disk_state"]) == ("broker-0", "ok")
    assert broker["first_position"] <= broker["synced_position"] <= broker["next_position"]
    assert broker["appended_per_s"] >= 0
    rows = {row["SERVICE"]: row for row in cluster("cluster", "replication").rows}
    assert rows.keys() == {"storage", "offsets", "lockmgr", "nameserver"}
    assert {row["ROLE"] for row in rows.values()} == {"leader"}
    assert (rows["storage"]["SET"], rows["storage"]["LAG"]) == ("broker-0", "0")
    assert {row["IN-SYNC"] for row in rows.values()} == {"-"}, "no leader has a follower"


@pytest.mark.long
def test_bundle_has_all_files_and_is_not_overwritten(
    cluster: RunningCluster, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batonmq.admin.diagnostics._TIMEOUT_S", 30)
    cluster("topic", "create", "bundle", "--queues", "1")
    lines.write_text("the body of a message\n")
    cluster("produce", "bundle", "--key", "the-key-of-it", "--file", str(lines))
    cluster("consume", "bundle", "--group", "bundle", "--from", "last")
    cluster("group", "reset-offsets", "bundle", "--to-earliest", "--execute", "--reason", "r")
    out = tmp_path / "b.tar.gz"
    command = ("debug", "bundle", "--out", str(out))
    created = cluster(*command, "--data-dir", str(cluster.stderr.with_name("data")), *JSON)
    assert created.code == 0, created.err
    assert created.json["problems"] == []
    with tarfile.open(out) as archive:
        files = {
            name.removeprefix("b/"): content.read().decode()
            for name in archive.getnames()
            if (content := archive.extractfile(name)) is not None
        }
    assert {
        "about.json", "cluster.json", "health.json", "groups/bundle.json", "topics/bundle.json",
        "groups/bundle.why-stuck.json", "groups/bundle.resets.json", "brokers/broker-0.json",
        "locks.json", "metrics/storage-broker-0.txt", "settings-of-this-machine.json",
        "local/logs/storage.log", "problems.txt",
    } <= files.keys()  # fmt: skip
    assert "baton_storage_appended_messages_total" in files["metrics/storage-broker-0.txt"]
    everything = "".join(files.values())
    assert "the body of a message" not in everything
    assert "the-key-of-it" not in everything
    again = cluster(*command)
    assert again.code == 1
    assert "FILE_EXISTS" in again.err


def test_mqadmin_commands_equal_those_of_baton(cluster: RunningCluster) -> None:
    def mqadmin(*arguments: str) -> str:
        done = cluster("mqadmin", *arguments)
        assert done.code == 0, done.err
        return done.out

    created = cluster("mqadmin", "updateTopic", "-t", "rmq", "-r", "2", "-w", "2", "-c", "Default")
    assert "-c is ignored" in created.err
    assert cluster("topic", "describe", "rmq", *JSON).json["queue_count"] == 2
    mqadmin("updateTopic", "-t", "rmq", "-p", "6", "-r", "3")
    assert len(mqadmin("topicRoute", "-t", "rmq").splitlines()) == 4
    line = mqadmin("sendMessage", "-t", "rmq", "-p", "hi", "-k", "k", "-b", "broker-0", "-i", "1")
    message_id = line.split()[-1]
    looked = mqadmin("queryMsgById", "-i", message_id)
    assert looked == mqadmin("queryMsgByKey", "-t", "rmq", "-k", "k")
    place = ("-t", "rmq", "-b", "broker-0", "-i", "1", "-o", "0")
    assert looked == mqadmin("queryMsgByOffset", *place)
    cluster("consume", "rmq", "--group", "rmq")
    assert "rmq" in mqadmin("consumerProgress")
    assert "rmq" in mqadmin("consumerProgress", "-g", "rmq")
    reset = ("resetOffsetByTime", "-g", "rmq", "-t", "rmq", "-s", "2026-01-01#00:00:00:000")
    assert "nothing was changed" in mqadmin(*reset)
    mqadmin(*reset, "--execute")
    assert cluster("group", "lag", "rmq", *JSON).json["lag"] == 1
    for command in (
        ("topicList",), ("clusterList",), ("topicStatus", "-t", "rmq"),
        ("consumerConnection", "-g", "rmq"), ("deleteSubGroup", "-g", "rmq", "--yes"),
        ("deleteTopic", "-t", "rmq", "--yes"),
    ):  # fmt: skip
        mqadmin(*command)
    assert cluster("topic", "describe", "rmq").code == 1
    several = cluster.nameserver + ";127.0.0.1:1"
    assert cluster("mqadmin", "topicList", "-n", several).code == 0


def test_names_are_completed_and_an_unreachable_cluster_is_silent(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster("topic", "create", "complete-me", "--queues", "1")
    context = click.Context(baton_command)
    context.params["nameserver"] = cluster.nameserver
    with monkeypatch.context() as patient:
        patient.setattr("batonmq.cli.completion._TIMEOUT_S", 20)
        assert complete_topics(context, click.Argument(["name"]), "complete") == ["complete-me"]
        assert "complete-me" not in complete_groups(context, click.Argument(["name"]), "")
    context.params["nameserver"] = "127.0.0.1:1"
    assert complete_topics(context, click.Argument(["name"]), "") == []
