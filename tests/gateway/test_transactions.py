"""Transactions of remote clients, by stubs: ends, refusals, checks, and gateways that die."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from apache.rocketmq.v2 import definition_pb2 as pb
from batonmq import Admin
from batonmq._common.clock import Clock
from tests.gateway.remote_stub import Checks, RemoteStub, handle_of, remote_client
from tests.support.cluster import local_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
INTERVAL_MS = 1_000
STORAGE = {"transaction_check_first_ms": 0, "transaction_check_interval_ms": INTERVAL_MS}
INVALID = pb.INVALID_TRANSACTION_ID
UNKNOWN = pb.TRANSACTION_RESOLUTION_UNSPECIFIED


CHECKS = 3


@pytest.mark.long
async def test_transactions_end_once_and_a_live_producer_is_asked(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, gateways=2, storage=STORAGE) as cluster:
        async with Admin(cluster.nameserver) as admin:
            for topic in ("orders", "refunds"):
                await admin.create_topic(topic, 1)
        first, second = cluster.addresses["gateway"], cluster.addresses["gateway-1"]
        async with remote_client(first, "a") as stub, remote_client(second, "b") as other:
            left = await ends(stub, other)
            checks: Checks = asyncio.Queue()
            async with stub.producing("orders", checks=checks):
                async with other.producing("orders", checks=checks), asyncio.timeout(30):
                    await asked_in_turn(left, checks)
                await cluster.kill("gateway-1")
                while not checks.empty():
                    checks.get_nowait()
                async with asyncio.timeout(30):
                    name, check = await checks.get()
                assert name == "a", "the gateway that is left asks"
                assert (await stub.end("orders", check.transaction_id, pb.COMMIT)).code == pb.OK
            messages = await stub.receive_until("audit", "orders", 2, wait_ms=10_000)
            assert {one.body for one in messages} == {b"committed", b"left"}
            assert {one.system_properties.message_type for one in messages} == {pb.TRANSACTION}
            await stub.ack("audit", "orders", [handle_of(one) for one in messages])
            assert (await stub.receive("audit", "orders", wait_ms=1_000))[1] == []


async def ends(stub: RemoteStub, other: RemoteStub) -> str:
    """End transactions once, at any gateway; return one that is left open."""
    committed, rolled_back, left = [
        await stub.begin("orders", body) for body in (b"committed", b"rolled back", b"left")
    ]
    assert (await stub.receive("audit", "orders", wait_ms=0))[1] == []
    assert (await stub.end("refunds", committed, pb.COMMIT)).code == INVALID
    assert (await stub.end("orders", committed, UNKNOWN)).code == pb.OK
    for client in (stub, other):
        assert (await client.end("orders", committed, pb.COMMIT)).code == pb.OK
        assert (await client.end("orders", rolled_back, pb.ROLLBACK)).code == pb.OK
    assert (await stub.end("refunds", committed, pb.COMMIT)).code == INVALID
    refused = await other.end("orders", committed, pb.ROLLBACK)
    assert (refused.code, "TRANSACTION_ENDED" in refused.message) == (INVALID, True)
    assert (await stub.end("orders", rolled_back, pb.COMMIT)).code == INVALID
    broker = left.rpartition("-")[0]
    for bad in ("", "x", f"{broker}-", f"{broker}-ffff", f"{broker}-zz"):
        assert (await stub.end("orders", bad, pb.COMMIT)).code == INVALID, bad
    status = await stub.end("orders", "nowhere-1", pb.COMMIT)
    assert status.code == pb.HA_NOT_AVAILABLE, "it may be the id of a broker that is down"
    odd = pb.TransactionResolution.ValueType(9)
    assert (await stub.end("orders", left, odd)).code == pb.BAD_REQUEST
    return left


async def asked_in_turn(left: str, checks: Checks) -> None:
    """See that one producer at a time is asked about the transaction, once per interval."""
    clock, names, times = Clock(), [], []
    for _ in range(CHECKS):
        name, check = await checks.get()
        names.append(name)
        times.append(clock.monotonic_ms())
        assert check.transaction_id == left
        assert check.message.body == b"left"
        assert check.message.system_properties.message_id == "id-left"
        assert check.message.system_properties.message_type == pb.TRANSACTION
    assert set(names) == {"a", "b"}
    assert all(after - before > INTERVAL_MS / 2 for before, after in pairwise(times)), times
