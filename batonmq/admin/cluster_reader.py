"""Reads what the checks of a cluster need. It only reads.

An input that can't be read is noted with the reason, and the other inputs are read all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from baton.storage.v1 import storage_service_pb2 as storage_pb
from batonmq._common.clock import Clock
from batonmq._common.health import ask_health
from batonmq.admin.access import AccessControl
from batonmq.admin.admin import Admin
from batonmq.admin.cluster_state import BrokerDisk, ClusterState
from batonmq.admin.dead_letters import DeadLetters, DeadLetterSummary
from batonmq.admin.group_lag import GroupLag, group_lags
from batonmq.admin.group_reports import Group
from batonmq.admin.node_state import NODE_TIMEOUT_S, node_reports
from batonmq.admin.quotas import Quotas
from batonmq.admin.replication import Replica, replicas
from batonmq.admin.reports import Node
from batonmq.admin.transactions import TransactionDetail, Transactions
from batonmq.errors import BatonError, Unreachable

Value = TypeVar("Value")
_AT_ONCE = 16


async def read_cluster(admin: Admin) -> ClusterState:
    """Return what the checks need.

    Raises:
        BatonError: No nameserver answers.
    """
    clock = Clock()
    cluster = await admin.cluster()
    unread: dict[str, str] = {}

    async def tried(name: str, call: Coroutine[Any, Any, Value], otherwise: Value) -> Value:
        try:
            return await call
        except BatonError as error:
            unread[name] = f"{error.reason}: {error.message}"
            return otherwise

    async with asyncio.TaskGroup() as tasks:
        start = tasks.create_task
        reports = start(node_reports(admin, cluster.nodes))
        health = start(_health(admin, cluster.nodes))
        copies = start(tried("copies", _copies(admin, cluster.nodes), {}))
        disks = start(tried("disks", _disks(admin, cluster.nodes), {}))
        topics = start(tried("topics", admin.list_topics(), ()))
        groups = start(tried("groups", admin.list_groups(), ()))
        transactions = start(tried("transactions", _transactions(admin), ()))
        dead_letters = start(tried("dead_letters", _dead_letters(admin), ()))
        quotas = start(tried("quotas", Quotas(admin).list(), ()))
        identities = start(tried("identities", AccessControl(admin).list(), ()))
    lags = await tried("lags", _lags(admin, groups.result()), ())
    if "groups" in unread:
        unread["lags"] = unread["groups"]
    return ClusterState(
        now_unix_ms=clock.unix_ms(),
        nodes=reports.result(),
        health=health.result(),
        etcd_alarms=cluster.etcd_alarms,
        etcd_db_bytes=cluster.etcd_db_bytes,
        drained=cluster.drained,
        removals=cluster.removals,
        copies=copies.result(),
        disks=disks.result(),
        topics=topics.result(),
        groups=groups.result(),
        lags=lags,
        transactions=transactions.result(),
        dead_letters=dead_letters.result(),
        quotas=quotas.result(),
        identities=identities.result(),
        unread=unread,
    )


async def _health(admin: Admin, nodes: Iterable[Node]) -> dict[tuple[str, str], str]:
    turns = asyncio.Semaphore(_AT_ONCE)

    async def ask(node: Node) -> str:
        async with turns, admin.directory.connect(node.address) as channel:
            return await ask_health(channel, timeout_s=NODE_TIMEOUT_S)

    async with asyncio.TaskGroup() as tasks:
        calls = {(n.service, n.node_id): tasks.create_task(ask(n)) for n in nodes}
    return {node: task.result() for node, task in calls.items()}


async def _copies(admin: Admin, nodes: Iterable[Node]) -> dict[tuple[str, str], Replica]:
    copies, problems = await replicas(admin, nodes)
    if problems:
        raise Unreachable("; ".join(problems))
    return copies


async def _disks(admin: Admin, nodes: Iterable[Node]) -> dict[str, BrokerDisk]:
    """Return the disk of each storage node, followers included."""

    async def ask(node: Node) -> BrokerDisk:
        async def describe(limit_s: float) -> storage_pb.DescribeResponse:
            stub = admin.directory.storage_at(node.address)
            return await stub.Describe(storage_pb.DescribeRequest(), timeout=limit_s)

        answer = await admin.ask(describe, timeout_s=NODE_TIMEOUT_S)
        state = storage_pb.DiskState.Name(answer.disk_state).removeprefix("DISK_STATE_").lower()
        return BrokerDisk(
            state,
            answer.disk_used_percent,
            answer.disk_seconds_until_full,
            answer.damaged_batch_count,
        )

    disks, problems = dict[str, BrokerDisk](), list[str]()
    for node in nodes:
        if node.service == "storage":
            try:
                disks[node.node_id] = await ask(node)
            except BatonError as error:
                problems.append(f"{node.node_id}: {error.reason}: {error.message}")
    if problems:
        raise Unreachable("; ".join(problems))
    return disks


async def _transactions(admin: Admin) -> tuple[TransactionDetail, ...]:
    oldest, _, problems = await Transactions(admin).find(count_max=1)
    if problems:
        raise Unreachable("; ".join(problems))
    return oldest


async def _dead_letters(admin: Admin) -> tuple[DeadLetterSummary, ...]:
    found = await DeadLetters(admin).groups()
    if found.problems:
        raise Unreachable("; ".join(found.problems))
    return found.groups


async def _lags(admin: Admin, groups: Iterable[Group]) -> tuple[GroupLag, ...]:
    return await group_lags(admin, [group.name for group in groups])
