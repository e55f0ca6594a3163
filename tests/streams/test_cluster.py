"""Goal: the streams of a real cluster show a hand-over, redelivered messages with their cause, and
a conflict; they continue after storage was killed; `baton top` shows the same.

Method: real processes; one member leaves gracefully, one is killed with messages in flight, one
has another subscription. The test compares the topic with the records of the members.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.puller import Puller
from batonmq._core.names import METRICS_TOPIC
from batonmq.admin.admin import Admin
from batonmq.errors import SubscriptionConflict, TopicNotFound
from tests.e2e.worker_group import send, worker_group
from tests.streams.reading import by_kind
from tests.support.cluster import local_cluster
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TOPIC, QUEUES = "work", 4
SOON = {"lockmgr": {"lock_lease_ms": 10_000}, "nameserver": {"session_grace_ms": 1_000}}


class MetricsTopicReader:
    """Reads the metrics topic from its first message on."""

    def __init__(self, nameserver: str) -> None:
        self._nameserver = nameserver
        self.batches: list[pb.MetricBatch] = []

    def of(self, kind: str) -> list[pb.MetricEvent]:
        return [e for e in by_kind(self.batches)[kind] if e.queue.queue.topic in ("", TOPIC)]

    async def read(self) -> None:
        async with Puller(self._nameserver) as puller:
            queues = None
            while queues is None:  # a nameserver creates the topic soon after the start
                with suppress(TopicNotFound):
                    queues = await puller.queues(METRICS_TOPIC)
                await asyncio.sleep(0.1)
            await puller.assign(queues)
            for queue in puller.assignment:
                await puller.seek(queue, "begin")
            while True:
                for messages in (await puller.poll()).values():
                    for message in messages:
                        batch = pb.MetricBatch.FromString(message.body)
                        assert message.keys == (batch.source,)
                        self.batches.append(batch)

    def delivered(self) -> Counter[tuple[int, int]]:
        """Return how often each offset of each queue was delivered to the group."""
        counts: Counter[tuple[int, int]] = Counter()
        for event in self.of("delivered"):
            offset = event.delivered.range.first_offset
            runs = event.delivered.runs or [0, event.delivered.range.next_offset - offset]
            for index, length in enumerate(runs):
                if index % 2:
                    counts.update((event.queue.queue.queue_id, offset + i) for i in range(length))
                offset += length
        return counts


@pytest.mark.long
async def test_streams_have_a_hand_over_a_redelivery_and_a_conflict(tmp_path: Path) -> None:
    async with (
        local_cluster(tmp_path / "cluster", **SOON) as cluster,  # type: ignore[arg-type]
        Admin(cluster.nameserver) as admin,
        worker_group(cluster.nameserver, TOPIC, tmp_path) as workers,
    ):
        await admin.create_topic(TOPIC, QUEUES)
        topic = MetricsTopicReader(cluster.nameserver)
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(topic.read())
            first = await workers.join("first", handle_ms=20)
            await until(lambda: len(first.owned) == QUEUES, timeout_s=60)
            second = await workers.join("second", handle_ms=100)
            await until(lambda: len(second.owned) == QUEUES // 2, timeout_s=60)
            await send(cluster.nameserver, TOPIC, range(100))
            with pytest.raises(SubscriptionConflict):
                async with Consumer(
                    cluster.nameserver, workers.group, {TOPIC: "x"}, client_id="odd"
                ):
                    pass
            # Storage loses unpublished events when it is killed.
            await until(lambda: len(topic.delivered()) == 100, timeout_s=60)
            await until(lambda: topic.of("subscription_refused"), timeout_s=30)
            await cluster.kill("storage")
            await send(cluster.nameserver, TOPIC, range(100, 400))
            await until(lambda: any(h.number >= 100 for h in second.handlings()), timeout_s=60)
            second.kill()
            await until(lambda: len(first.owned) == QUEUES, timeout_s=60)
            await until(lambda: len(topic.delivered()) == 400, timeout_s=90)
            shown = await _top(cluster.nameserver)
            await first.leave()
            reading.cancel()
    _check_events(topic)
    redelivered = {place for place, count in topic.delivered().items() if count > 1}
    flagged = {(h.queue_id, h.offset) for h in first.handlings() if h.redelivered}
    assert redelivered and flagged <= redelivered, "a flagged message was delivered once"
    assert sum(e.delivered.redelivered_count for e in topic.of("delivered")) >= len(flagged)
    assert {row["group"] for row in shown["groups"]} == {workers.group}
    assert {(row["client_id"], row["queues"]) for row in shown["owners"]} == {("first", QUEUES)}
    assert shown["nodes"] == 4


def _check_events(topic: MetricsTopicReader) -> None:
    """Assert the kinds of events, and that the batches of each source have no gap."""
    graceful, after_kill = _hand_overs(topic)
    assert {one.manner for one in graceful} == {pb.HandedOver.MANNER_GRACEFUL}
    # A queue without messages in flight is handed over as after a release.
    assert pb.HandedOver.MANNER_LEASE_EXPIRED in {one.manner for one in after_kill}
    assert {one.previous_client_id for one in after_kill} == {"second"}
    (refused, *_) = topic.of("subscription_refused")
    assert refused.subscription_refused.client_id == "odd"
    assert any(e.member_expired.client_id == "second" for e in topic.of("member_expired"))
    incarnations = {(b.source, b.incarnation_id) for b in topic.batches}
    assert len([one for one in incarnations if one[0].startswith("storage/")]) == 2, (
        "storage runs again after the kill"
    )
    for incarnation in incarnations:
        numbers = [b.seq for b in topic.batches if (b.source, b.incarnation_id) == incarnation]
        assert sorted(set(numbers)) == list(range(1, max(numbers) + 1)), incarnation


def _hand_overs(topic: MetricsTopicReader) -> tuple[list[pb.HandedOver], list[pb.HandedOver]]:
    """Return the hand-overs to the second member, and those to the first."""
    events = [event.handed_over for event in topic.of("handed_over")]
    return (
        [one for one in events if one.client_id == "second"],
        [one for one in events if one.client_id == "first"],
    )


async def _top(nameserver: str) -> Any:
    """Return the JSON output of `baton top`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "batonmq.cli", "--nameserver", nameserver, "--format", "json", "top",
        "--seconds", "12", stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode == 0
    return json.loads(out)
