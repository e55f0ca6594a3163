"""Goal: the stream of a service that stops gracefully has no gap: every event is published, at once
or by the next incarnation, and both incarnations name each other. A killed one has no mark.

Method: real processes. Services are restarted one by one, storage is killed once, and the whole
cluster is stopped and started again. Then the batches in the topic are checked, source by source.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._consumer.puller import Puller
from batonmq._core.names import METRICS_TOPIC
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.runtime.unsent_batches import FILE
from tests.streams.reading import by_kind
from tests.support.cluster import local_cluster
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TOPIC = "work"
RESTARTED = ("storage", "offsets", "lockmgr")


async def _stored(nameserver: str) -> list[pb.MetricBatch]:
    """Return all batches that are in the topic now."""
    async with Admin(nameserver) as admin, Puller(nameserver) as puller:
        described = (await admin.describe_topic(METRICS_TOPIC)).queues
        ends = {one.queue: one.next_offset for one in described if one.next_offset}
        await puller.assign(ends)
        for queue in ends:
            await puller.seek(queue, "begin")
        found: list[pb.MetricBatch] = []
        while ends:
            for queue, messages in (await puller.poll()).items():
                found += (pb.MetricBatch.FromString(one.body) for one in messages)
                if messages and messages[-1].offset + 1 >= ends.get(queue, 0):
                    ends.pop(queue, None)
    return found


def _lives(batches: Sequence[pb.MetricBatch]) -> dict[str, list[list[pb.MetricBatch]]]:
    """Return the batches of each incarnation of each source, in the order of their first event."""
    found: dict[tuple[str, int], dict[int, pb.MetricBatch]] = defaultdict(dict)
    for batch in batches:
        found[batch.source, batch.incarnation_id][batch.seq] = batch
    lives: dict[str, list[list[pb.MetricBatch]]] = defaultdict(list)
    for (source, _), by_seq in found.items():
        assert sorted(by_seq) == list(range(1, len(by_seq) + 1)), f"{source} lost a batch"
        lives[source].append([by_seq[seq] for seq in sorted(by_seq)])
    for each in lives.values():
        each.sort(key=lambda life: life[0].events[0].unix_ms)
    return lives


def _follows(life: list[pb.MetricBatch], previous: list[pb.MetricBatch]) -> bool:
    """Return whether a life names the one before, and that one has the mark of its last batch."""
    (started,) = by_kind(life)["process_started"]
    marked = previous[-1].events[-1].HasField("process_stopped")
    named = started.process_started.previous_incarnation_id
    assert marked == (named == previous[0].incarnation_id)
    return marked


async def _served(cluster: LocalCluster, count: int) -> None:
    """Send messages; wait until the topic has all events of them."""

    async def appended() -> bool:
        events = by_kind(await _stored(cluster.nameserver))["appended"]
        return max((one.appended.next_offset for one in events), default=0) >= count

    async with Producer(cluster.nameserver) as producer:
        await producer.send(TOPIC, b"one")
    await until(appended, timeout_s=60)


@pytest.mark.long
async def test_graceful_restarts_leave_no_gap_and_a_kill_leaves_one(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    async with local_cluster(folder) as cluster:
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic(TOPIC, 1)
        for count, name in enumerate(RESTARTED, 1):
            async with Producer(cluster.nameserver) as producer:
                await producer.send(TOPIC, b"one")
            await cluster.stop(name)  # with events of the message that are not published
            assert (folder / name / FILE).exists() == (name != "lockmgr"), count
            await cluster.start(name)
        await _served(cluster, len(RESTARTED) + 1)
        await cluster.kill("storage")
        await cluster.serving("storage")
        await _served(cluster, len(RESTARTED) + 2)
    async with local_cluster(folder) as cluster:
        await _served(cluster, len(RESTARTED) + 3)
        lives = _lives(await _stored(cluster.nameserver))
        assert not (folder / "storage" / FILE).exists(), "what is published is removed"
    found = {
        source: [_follows(life, previous) for previous, life in pairwise(each)]
        for source, each in lives.items()
    }
    assert found == {
        "storage/broker-0": [True, False, True],
        "offsets/offsets-0": [True, True],
        "lockmgr/lockmgr-0": [True, True],
        "nameserver/nameserver-0": [True],
    }
    sent = [one for each in lives["storage/broker-0"] for one in by_kind(each)["appended"]]
    assert sum(one.appended.message_count for one in sent) == len(RESTARTED) + 3
