"""Goal: an operator sees the cause of each dead letter, traces it, and redrives it once.

Method: `baton up` is a process; a consumer of the library fails on purpose until messages are dead
letters, and then handles them; the command shows what happened.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.handler_results import RetryLater
from batonmq._consumer.message import ReceivedMessage
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from batonmq.admin.dead_letters import DeadLetters
from tests.cli.baton import RunningCluster
from tests.support.conditions import until_now

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
JSON = ("--format", "json")
WHY = ("--reason", "the stock is back", "--by", "tester")


@pytest.fixture
def name(cluster: RunningCluster, request: pytest.FixtureRequest) -> str:
    """A topic of one queue, and the name of the group that reads it."""
    name = str(request.node.name.removeprefix("test_")[:60].rstrip("_"))
    assert cluster("topic", "create", name, "--queues", "1").code == 0
    return name


SETTINGS = ConsumerSettings(retries_max=1, consume_from="first")


async def handle_all(
    cluster: RunningCluster,
    name: str,
    handler: Callable[[ReceivedMessage], object],
    done: Callable[[], bool],
    client_id: str = "a",
) -> None:
    """Let a member handle messages until `done`."""
    consumer = Consumer(cluster.nameserver, name, {name: "*"}, SETTINGS, client_id=client_id)

    async def handle(message: ReceivedMessage) -> object:
        try:
            return handler(message)
        finally:
            if done():
                consumer.stop()

    async with consumer:
        await consumer.run(handle)


def die(cluster: RunningCluster, name: str, bodies: list[bytes]) -> list[str]:
    """Send messages that become dead letters after two attempts; return their ids."""

    async def run() -> list[str]:
        async with Producer(cluster.nameserver) as producer:
            ids = [
                (
                    await producer.send(
                        name, body, tag="paid", keys=[f"k{n}"], properties={"region": f"r{n}"}
                    )
                ).message_id
                for n, body in enumerate(bodies)
            ]
        left = 2 * len(bodies)

        def fail(message: ReceivedMessage) -> object:
            nonlocal left
            left -= 1
            if message.attempts == 1:
                return RetryLater(0)
            raise ValueError("no stock")

        await handle_all(cluster, name, fail, lambda: left == 0)
        return ids

    ids = asyncio.run(run())
    until_now(lambda: len(dead(cluster, name)) == len(bodies))
    return ids


def dead(cluster: RunningCluster, name: str, *arguments: str) -> list[dict[str, Any]]:
    done = cluster("dlq", "show", name, *arguments, *JSON)
    letters: list[dict[str, Any]] = done.json if done.code == 0 else []
    return letters


def handled(cluster: RunningCluster, name: str, count: int) -> list[ReceivedMessage]:
    """Return what a member gets next."""
    messages: list[ReceivedMessage] = []
    asyncio.run(handle_all(cluster, name, messages.append, lambda: len(messages) == count, "b"))
    return messages


def test_dead_letter_is_traced_redriven_once_and_handled(
    cluster: RunningCluster, name: str
) -> None:
    (message_id,) = die(cluster, name, [b"order"])
    (letter,) = dead(cluster, name)
    assert (letter["origin_id"], letter["cause"], letter["attempts"]) == (message_id, "failed", 2)
    assert (letter["error"], letter["client_id"]) == ("ValueError: no stock", "a")
    assert (letter["keys"], letter["properties"], letter["body"]) == (
        ["k0"],
        {"region": "r0"},
        "order",
    )
    (row,) = (one for one in cluster("dlq", "list", *JSON).json if one["group"] == name)
    assert (row["count"], row["redriven_count"]) == (1, 0)

    (story,) = cluster("message", "trace", message_id, *JSON).json["groups"]
    assert [copy["kind"] for copy in story["copies"]] == ["original", "retry", "dead"]
    assert (story["state"], story["passes"], story["recorded"]) == ("dead", True, True)
    first, retry, _ = story["copies"]
    for copy in (first, retry):
        steps = [(step["what"], step["client_id"]) for step in copy["trace"]["events"]]
        assert steps == [("delivered", "a"), ("acked", "a")]
    assert (retry["attempts"], retry["reason"]) == (1, "asked")

    planned = cluster("dlq", "redrive", name)
    assert planned.code == 0
    assert "1 dead letter would go to group" in planned.out
    assert "nothing was changed" in planned.out
    replay = ("--execute", "--replay-id", "again-1", *WHY, *JSON)
    outcomes = [cluster("dlq", "redrive", name, *replay).json_lines for _ in range(2)]
    assert [[one["outcome"] for one in each] for each in outcomes] == [
        ["redriven"],
        ["passed_over"],
    ]
    repeated = cluster("dlq", "redrive", name, *replay, "--again").json_lines
    assert [one["outcome"] for one in repeated] == ["repeated"]
    assert repeated[0]["copy_id"] == outcomes[0][0]["copy_id"]
    other = cluster("dlq", "redrive", name, "--execute", "--replay-id", "again-2", *WHY, *JSON)
    assert [one["outcome"] for one in other.json_lines] == ["passed_over"]

    (redriven,) = handled(cluster, name, 1)
    assert (redriven.body, redriven.attempts) == (b"order", 1)
    assert (redriven.tag, redriven.keys) == ("paid", ("k0",))
    assert (redriven.topic, redriven.origin.message_id) == (name, message_id)
    assert redriven.properties == {
        "region": "r0",
        "baton.redrive_id": "again-1",
        "baton.redriven_from": letter["message_id"],
        "baton.redriven_by": "tester",
        "baton.redrive_reason": "the stock is back",
        "baton.former_attempts": "2",
    }
    (story,) = cluster("message", "trace", message_id, *JSON).json["groups"]
    kinds = [copy["kind"] for copy in story["copies"]]
    assert kinds == ["original", "retry", "dead", "redriven"], "one copy of two runs of the replay"
    last = story["copies"][-1]
    assert (last["replay_id"], last["redriven_by"]) == ("again-1", "tester")
    assert [(s["what"], s["client_id"]) for s in last["trace"]["events"]][-1] == ("acked", "b")
    trace = cluster("message", "trace", "--topic", name, "--key", "k0")
    assert trace.code == 0, trace.err
    for word in ("stored", "delivered", "retry", "dead", "redriven", "acked", "now"):
        assert word in trace.out


def test_redrive_sends_matching_dead_letters_at_the_rate(
    cluster: RunningCluster, name: str
) -> None:
    die(cluster, name, [b"0", b"1", b"2"])
    assert [one["body"] for one in dead(cluster, name, "--key", "k1")] == ["1"]
    assert [one["body"] for one in dead(cluster, name, "--sql", "region <> 'r1'")] == ["0", "2"]
    assert dead(cluster, name, "--cause", "timeout") == []
    assert dead(cluster, name, "--tag", "new") == []
    assert dead(cluster, name, "--since", "2999-01-01") == []
    assert len(dead(cluster, name, "--since", "1h")) == 3
    assert len(dead(cluster, name, "--limit", "2")) == 2
    done = cluster(
        "dlq", "redrive", name, "--sql", "region <> 'r1'", "--rate", "5", "--execute", *WHY, *JSON
    )
    assert [one["outcome"] for one in done.json_lines] == ["redriven"] * 2
    assert sorted(each.body for each in handled(cluster, name, 2)) == [b"0", b"2"]
    assert [one["redriven"] for one in dead(cluster, name)] == [True, False, True]
    (row,) = (one for one in cluster("dlq", "list", *JSON).json if one["group"] == name)
    assert (row["count"], row["redriven_count"]) == (3, 2)
    rest = cluster("dlq", "redrive", name, *JSON).json
    assert (rest["count"], rest["passed_over_count"], rest["causes"]) == (1, 2, {"failed": 1})


def test_redrive_to_the_topic_reaches_other_groups(cluster: RunningCluster, name: str) -> None:
    (message_id,) = die(cluster, name, [b"order"])
    other = f"{name}-other"[-60:].lstrip("_")
    assert cluster("consume", name, "--group", other).code == 0
    done = cluster("dlq", "redrive", name, "--to-topic", "--execute", *WHY, *JSON).json_lines
    assert (done[0]["outcome"], done[0]["copy_topic"]) == ("redriven", name)
    (message,) = cluster("consume", name, "--group", other, *JSON).json_lines
    assert (message["body"], message["offset"]) == ("order", done[0]["copy_offset"])
    groups = cluster("message", "trace", message_id, *JSON).json["groups"]
    assert all(one["copies"][-1]["kind"] == "redriven" for one in groups)


def test_group_without_a_retry_topic_is_redriven_to_its_topic_only(
    cluster: RunningCluster, name: str
) -> None:
    die(cluster, name, [b"order"])
    assert cluster("group", "delete", name, "--yes").code == 0
    refused = cluster("dlq", "redrive", name, "--execute", *WHY)
    assert (refused.code, "GROUP_NOT_FOUND" in refused.err) == (1, True)
    assert cluster("consume", name, "--group", name).code == 0
    refused = cluster("dlq", "redrive", name, "--execute", *WHY)
    assert (refused.code, "NOT_SUBSCRIBED" in refused.err) == (1, True)
    assert cluster("dlq", "redrive", name, "--to-topic", "--execute", *WHY).code == 0


def test_export_writes_a_line_per_dead_letter(
    cluster: RunningCluster, name: str, tmp_path: Path
) -> None:
    die(cluster, name, [b"text", b"\xff\x00"])
    out = tmp_path / "dead.jsonl"
    assert cluster("dlq", "export", name, "--out", str(out)).code == 0
    text, raw = map(json.loads, out.read_text().splitlines())
    assert (text["body"], base64.b64decode(raw["body_base64"])) == ("text", b"\xff\x00")
    assert text["group"] == name
    out.write_text("kept")
    refused = cluster("dlq", "export", name, "--out", str(out))
    assert (refused.code, "--force" in refused.err, out.read_text()) == (2, True, "kept")
    assert cluster("dlq", "export", name, "--out", str(out), "--force").code == 0
    assert len(out.read_text().splitlines()) == 2


def test_trace_shows_a_message_that_a_filter_skipped(
    cluster: RunningCluster, name: str, lines: Path
) -> None:
    assert cluster("produce", name, "--file", str(lines), "--tag", "new").code == 0
    assert cluster("consume", name, "--group", name, "--filter", "paid").code == 0
    trace = cluster("message", "trace", "--topic", name, "--queue", "0", "--offset", "1", *JSON)
    (story,) = trace.json["groups"]
    assert (story["state"], story["expression"], story["passes"]) == ("filtered", "paid", False)
    events = [one["event"] for one in trace.json["events"] if one["group"] == name]
    assert events == ["filtered", "passed_over", "now"]


def test_dead_letters_of_a_group_without_any_are_not_found(cluster: RunningCluster) -> None:
    for command in ("show", "redrive"):
        done = cluster("dlq", command, "nobody")
        assert (done.code, "TOPIC_NOT_FOUND" in done.err) == (1, True)


def test_executed_redrive_needs_a_reason(cluster: RunningCluster) -> None:
    assert cluster("dlq", "redrive", "g", "--execute").code == 2
    assert cluster("dlq", "show", "g", "--sql", "a >").code == 2
    assert cluster("dlq", "show", "g", "--cause", "other").code == 2


def test_redriven_letters_beyond_the_ranges_that_offsets_names_are_not_sent_again(
    cluster: RunningCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    die(cluster, name, [b"%d" % n for n in range(6)])
    for key in ("k1", "k3"):
        assert cluster("dlq", "redrive", name, "--key", key, "--execute", *WHY).code == 0
    to_topic = ("--key", "k5", "--to-topic")
    assert cluster("dlq", "redrive", name, *to_topic, "--execute", *WHY).code == 0
    progress_of = Admin.progress

    async def first_range_of(admin: Admin, group: str) -> list[offsets_pb.Progress]:
        progress = list(await progress_of(admin, group))
        for one in progress:
            del one.acked[1:]
        return progress

    monkeypatch.setattr(Admin, "progress", first_range_of)

    async def look() -> tuple[list[bool], int]:
        async with Admin(cluster.nameserver) as admin:
            letters = DeadLetters(admin)
            redriven = [one.redriven async for one in letters.read(name)]
            groups = {one.group: one for one in (await letters.groups()).groups}
            return redriven, groups[name].redriven_count

    assert asyncio.run(look()) == ([False, True, False, True, False, True], 3)
