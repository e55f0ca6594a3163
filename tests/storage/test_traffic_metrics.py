"""Prometheus metrics by topic and group.

Goal: stored and delivered messages are counted by topic and group; deleted topics and groups have
no series. Method: a real node on a real disk, with an etcd in which topics and groups are created
and deleted.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from batonmq._core.records import Message
from batonmq._core.retries import dead_letter_topic
from batonmq_server.storage.metrics import StorageMetrics
from tests.storage.batches import TOPIC, batch
from tests.storage.running_node import GROUP, RunningNode, running_node
from tests.support.conditions import until

NAMES = (
    "rocketmq_messages_in_total",
    "rocketmq_throughput_in_total",
    "rocketmq_messages_out_total",
    "rocketmq_throughput_out_total",
    "rocketmq_send_to_dlq_messages_total",
)


def messages(topic: str, *tags: str) -> bytes:
    return batch(*(Message(b"body", tag=tag) for tag in tags), topic=topic)


def shown(node: RunningNode, name: str) -> dict[tuple[str, ...], float]:
    """Return the values of a metric by label values."""
    return {
        tuple(sample.labels.values()): sample.value
        for metric in node.runtime.registry.collect()
        for sample in metric.samples
        if sample.name == name
    }


def labels(node: RunningNode) -> set[str]:
    """Return every topic and group that has a series."""
    return {label for name in NAMES for values in shown(node, name) for label in values}


async def delivering(node: RunningNode, *topics: str) -> None:
    """Pull everything for the group."""
    await node.put_gate()
    for topic in topics:
        await node.put_topic(topic)
        await node.append(messages(topic, "x", "x", "y"))
        await until(partial(_delivered, node, topic))


async def _delivered(node: RunningNode, topic: str) -> bool:
    """Return whether a delivery is counted: only once the node has the group."""
    await node.pull(topic=topic, expression="x")
    return (topic, GROUP) in shown(node, "rocketmq_messages_out_total")


async def test_messages_are_counted_by_topic_and_group(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await delivering(node, TOPIC)
        assert shown(node, "rocketmq_messages_in_total") == {(TOPIC,): 3}
        assert shown(node, "rocketmq_messages_out_total") == {(TOPIC, GROUP): 2}
        (stored_count,) = shown(node, "rocketmq_throughput_in_total").values()
        assert shown(node, "rocketmq_throughput_out_total") == {(TOPIC, GROUP): stored_count}


async def test_dead_letters_are_counted_by_group(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        dead = dead_letter_topic(GROUP)
        await node.put_topic(dead)
        await node.append(messages(dead, "x", "y"))
        assert shown(node, "rocketmq_send_to_dlq_messages_total") == {(GROUP,): 2}


async def test_topic_that_is_deleted_has_no_series(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await delivering(node, TOPIC, "bills")
        await node.etcd.delete(node.etcd.key("topics", "bills"))
        await until(lambda: "bills" not in labels(node))
        assert labels(node) == {TOPIC, GROUP}


async def test_group_that_is_deleted_has_no_series(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await delivering(node, TOPIC)
        dead = dead_letter_topic(GROUP)
        await node.put_topic(dead)
        await node.append(messages(dead, "x"))
        await node.etcd.delete(node.etcd.key("gates", GROUP))
        await until(lambda: GROUP not in labels(node))
        assert labels(node) == {TOPIC, dead}


async def test_unknown_group_has_no_series(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(messages(TOPIC, "x"))
        await node.pull()
        assert shown(node, "rocketmq_messages_out_total") == {}


def test_outcomes_of_transactions_are_zero_before_the_first_one() -> None:
    """Otherwise the increase over the first ones is 0, and no alert fires."""
    registry = CollectorRegistry()
    StorageMetrics(registry)
    for outcome in ("committed", "rolled_back", "discarded", "damaged"):
        name = "baton_storage_ended_transactions_total"
        assert registry.get_sample_value(name, {"outcome": outcome}) == 0
