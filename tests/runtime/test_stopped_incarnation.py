"""Goal: an incarnation finds the mark of the one before only if no other one ran in between.

Method: a real etcd; incarnations of one node, one after the other.
"""

from __future__ import annotations

import asyncio

import pytest

from batonmq.errors import NoQuorum
from batonmq_server.runtime import stopped_incarnation
from batonmq_server.runtime.etcd.session import Compare, EtcdSession
from batonmq_server.runtime.stopped_incarnation import MARK_MS, StoppedIncarnation

KEY = "stopped/storage/broker-a"


def mark_of(etcd: EtcdSession, node_id: str = "broker-a") -> StoppedIncarnation:
    return StoppedIncarnation(etcd, "storage", node_id)


async def test_mark_is_taken_once_and_by_its_node_only(etcd: EtcdSession) -> None:
    assert await mark_of(etcd).take() == 0
    await mark_of(etcd).leave(7)
    assert await mark_of(etcd, "broker-b").take() == 0
    assert await mark_of(etcd).take() == 7
    assert await mark_of(etcd).take() == 0, "an incarnation that is killed leaves none"
    await mark_of(etcd).leave(8)
    await mark_of(etcd).leave(9)
    assert await mark_of(etcd).take() == 9


async def test_mark_has_a_lease_which_ends_when_it_is_taken(etcd: EtcdSession) -> None:
    await mark_of(etcd).leave(7)
    stored = await etcd.get(KEY)
    assert stored is not None
    left_s, granted_s = await etcd.time_to_live(stored.lease_id)
    assert granted_s == MARK_MS / 1000 and left_s > granted_s - 600
    assert await mark_of(etcd).take() == 7
    assert await etcd.time_to_live(stored.lease_id) == (-1, 0)


async def test_mark_that_another_process_takes_meanwhile_is_not_taken_twice(
    etcd: EtcdSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mark_of(etcd).leave(7)
    rival, transact = mark_of(etcd), etcd.txn
    taken: list[int] = []

    async def later(*, compare: list[Compare], delete: list[str]) -> int | None:
        monkeypatch.setattr(etcd, "txn", transact)
        taken.append(await rival.take())
        return await transact(compare=compare, delete=delete)

    monkeypatch.setattr(etcd, "txn", later)
    assert await mark_of(etcd).take() == 0
    assert taken == [7]


async def test_mark_is_awaited_without_etcd_and_a_stop_is_not_held_up(
    etcd: EtcdSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await mark_of(etcd).leave(7)
    monkeypatch.setattr(stopped_incarnation, "RETRY_S", 0.01)
    read, failures = etcd.get, iter(range(3))

    async def away(*_: object) -> object:
        if next(failures, None) is not None:
            raise NoQuorum("away")
        monkeypatch.setattr(etcd, "get", read)
        return await read(KEY)

    monkeypatch.setattr(etcd, "get", away)
    assert await asyncio.wait_for(mark_of(etcd).take(), 30) == 7
    monkeypatch.setattr(etcd, "lease", _refused)
    await mark_of(etcd).leave(8)
    assert "graceful stop is not marked in etcd error=" in caplog.text


async def _refused(_: int) -> None:
    raise NoQuorum("away")
