"""Goal: the gate of a group decides how it may pull, and the acks of a pull reach offsets.

Method: the whole node over gRPC with a real etcd, in which the test writes the group's gate;
offsets is a twin that keeps what it receives.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.common.v1 import queue_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from batonmq.errors import (
    BatonError,
    BeyondDelivered,
    GroupNotFound,
    ModeChanged,
    Paused,
)
from tests.storage.batches import batch
from tests.storage.running_node import GROUP, RunningNode, running_node
from tests.support.conditions import until

BROADCASTING: dict[str, Any] = {"model": nameserver_pb.MESSAGE_MODEL_BROADCASTING}
OFF: dict[str, Any] = {"ownership": nameserver_pb.OWNERSHIP_OFF}
OWNED: dict[str, Any] = {"ownership": nameserver_pb.OWNERSHIP_ON}
PAUSE = nameserver_pb.Pause(by="ann@ops", reason="poison message", since_unix_ms=1)
ACKS = offsets_pb.Acks(
    reset_epoch=2,
    committed_offset=1,
    acked=[queue_pb2.OffsetRange(first_offset=2, next_offset=3)],
)


async def refused(node: RunningNode, **fields: Any) -> BatonError | None:
    """Return the error of a pull; None if it succeeds."""
    try:
        await node.pull(**fields)
    except BatonError as error:
        return error
    return None


async def gate_seen(node: RunningNode, kind: type[BatonError] | None, **fields: Any) -> None:
    """Wait until a pull is rejected with `kind`: then the node has the gate."""

    async def seen() -> bool:
        error = await refused(node, **fields)
        return error is None if kind is None else isinstance(error, kind)

    await until(seen)


@pytest.mark.parametrize("unowned", [BROADCASTING, OFF], ids=["broadcasting", "ownership off"])
async def test_pull_without_token_is_served_and_not_recorded_in_a_group_without_owners(
    etcd_endpoint: str, tmp_path: Path, unowned: dict[str, Any]
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(b"a", b"b"))
        await node.put_gate(**unowned)
        await gate_seen(node, None, token=0)
        answer = await node.pull(token=0)
        assert (len(answer.batches), answer.next_offset, answer.offsets_epoch) == (1, 2, 0)
        assert node.offsets.calls == []


async def test_pull_without_token_of_an_unknown_group_is_rejected(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(b"a"))
        with pytest.raises(GroupNotFound):
            await node.pull(token=0)


async def test_pull_without_token_is_rejected_in_a_group_with_owners(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(b"a"))
        await node.put_gate(**OWNED)
        await gate_seen(node, ModeChanged, token=0)
        assert await refused(node) is None


@pytest.mark.parametrize("unowned", [BROADCASTING, OFF], ids=["broadcasting", "ownership off"])
async def test_token_is_rejected_in_a_group_without_owners(
    etcd_endpoint: str, tmp_path: Path, unowned: dict[str, Any]
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(b"a"))
        await node.put_gate(**unowned)
        await gate_seen(node, ModeChanged)
        recorded = len(node.offsets.recorded)
        error = await refused(node)
        assert error is not None
        assert error.facts["ownership"] == "off"
        assert len(node.offsets.recorded) == recorded


@pytest.mark.parametrize("token", [0, 1])
async def test_paused_group_gets_no_messages_and_an_error_with_the_reason(
    etcd_endpoint: str, tmp_path: Path, token: int
) -> None:
    mode = OWNED if token else OFF
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(b"a"))
        await node.put_gate(pause=PAUSE, **mode)
        await gate_seen(node, Paused, token=token)
        with pytest.raises(Paused, match="ann@ops: poison message") as raised:
            await node.pull(token=token)
        assert raised.value.retry_after_ms > 0
        await node.put_gate(**mode)
        await gate_seen(node, None, token=token)


async def test_long_poll_is_answered_when_its_group_is_paused(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, asyncio.TaskGroup() as tasks:
        pull = tasks.create_task(refused(node, hold_ms=30_000))
        await node.wait_long_polls(1)
        await node.put_gate(pause=PAUSE)
        assert isinstance(await pull, Paused)


async def test_long_poll_without_token_is_woken_and_never_touched(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"touch_interval_ms": 100}
    async with (
        running_node(etcd_endpoint, tmp_path, **settings) as node,
        asyncio.TaskGroup() as tasks,
    ):
        await node.put_gate(**OFF)
        await gate_seen(node, None, token=0)
        free = tasks.create_task(node.pull(token=0, hold_ms=30_000))
        owned = tasks.create_task(node.pull(group="owned", hold_ms=30_000))
        await node.wait_long_polls(2)
        await until(lambda: _is(len(node.offsets.touched) > 2))
        await node.append(batch(b"a"))
        assert (await free).next_offset == (await owned).next_offset == 1
        assert {group for group, *_ in node.offsets.touched} == {"owned"}
        assert [group for group, *_ in node.offsets.recorded] == ["owned"]


async def test_generation_and_acks_of_a_pull_reach_offsets_with_the_delivery(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(b"a", b"b", b"c", b"d"))
        answer = await node.pull(offset=3, subscription_generation=7, progress=ACKS)
        assert answer.progress_taken
        (item,) = node.offsets.items
        assert (item.subscription_generation, item.progress) == (7, ACKS)
        assert not (await node.pull(offset=3)).progress_taken


async def test_acks_of_a_long_poll_are_not_committed(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, asyncio.TaskGroup() as tasks:
        pull = tasks.create_task(node.pull(progress=ACKS, hold_ms=30_000))
        await node.wait_long_polls(1)
        await node.append(batch(b"a"))
        assert not (await pull).progress_taken
        assert not node.offsets.items[0].HasField("progress")


async def test_pull_gets_no_bytes_when_its_acks_are_rejected(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(b"a"))
        node.offsets.rejection = BeyondDelivered(
            "offset 9 was not delivered", facts={"offset": 9, "delivered": 0}
        )
        with pytest.raises(BeyondDelivered):
            await node.pull(progress=ACKS, group=GROUP)


async def _is(value: bool) -> bool:
    return value
