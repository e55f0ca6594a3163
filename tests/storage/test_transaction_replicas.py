"""Goal: an election loses no transaction, and no end of one; the new leader goes on checking.

Method: a real producer, a real nameserver, and a storage replica set (tests/storage/replicas.py);
its leader crashes while transactions are open.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import grpc.aio
import pytest

from baton.storage.v1 import transaction_service_pb2 as pb
from batonmq._common.rpc import from_rpc_error
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message
from batonmq._core.transactions import PendingTransaction, TransactionState
from batonmq._producer.producer import Producer
from batonmq.errors import TransactionEnded
from tests.nameserver.replica import replica
from tests.storage.batches import TOPIC
from tests.storage.replicas import BROKER, Replica, Scene, replica_set
from tests.support.conditions import until

pytestmark = pytest.mark.timeout(180)

QUEUE = QueueRef(TOPIC, BROKER, 0)
SETTINGS = {"transaction_check_first_ms": 1_000, "transaction_check_interval_ms": 2_000}


async def open_ids(node: Replica) -> list[str]:
    """Return the ids of the open transactions at a leader."""
    answer = await node.transactions.ListTransactions(pb.ListTransactionsRequest(), timeout=20)
    return [one.transaction_id for one in answer.transactions]


async def crash_leader(scene: Scene) -> Replica:
    """Crash the leader, start it again, and return the next one."""
    leader = await scene.leader()
    await leader.crash()
    after = await scene.leader()
    await scene.start(leader.name)
    await scene.wait_in_sync("a", "b", "c")
    return after


@pytest.mark.long
async def test_next_leader_has_the_open_transactions_and_the_ends(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    cluster = f"test-{secrets.token_hex(8)}"
    asked: list[PendingTransaction] = []

    async def check(pending: PendingTransaction) -> TransactionState:
        asked.append(pending)
        return TransactionState.UNKNOWN if len(asked) < 3 else TransactionState.COMMIT

    async with (
        replica_set(etcd_endpoint, cluster, tmp_path) as scene,
        replica(etcd_endpoint, cluster) as nameserver,
    ):
        scene.settings = dict(SETTINGS)
        await scene.start("a", "b", "c")
        await scene.wait_in_sync("a", "b", "c")
        async with Producer(nameserver.address, group="payments") as producer:
            begun = [
                await producer.begin_transaction(TOPIC, Message(b"%d" % n), queue=QUEUE)
                for n in range(6)
            ]
            names = [one.transaction_id for one in begun]
            await begun[0].commit()
            await begun[1].rollback()
            leader = await crash_leader(scene)
            assert await open_ids(leader) == names[2:]
            await begun[2].commit()
            with pytest.raises(TransactionEnded):
                await begun[1].commit()
            assert (await begun[0].commit()).offset == 0
            leader = await crash_leader(scene)
            assert await open_ids(leader) == names[3:]
            await begun[3].rollback()
            assert await leader.bodies() == [b"0", b"2"]
        async with Producer(nameserver.address, group="payments", transaction_checker=check):

            async def all_asked() -> bool:
                return len(asked) >= 2

            await until(all_asked)
            leader = await crash_leader(scene)

            async def all_ended(leader: Replica = leader) -> bool:
                return await open_ids(leader) == []

            await until(all_ended)
        numbers = [(one.transaction_id, one.check) for one in asked]
        assert len(numbers) == len(set(numbers)), "a check was asked twice"

        async def all_visible(leader: Replica = leader) -> bool:
            return sorted(await leader.bodies()) == [b"0", b"2", b"4", b"5"]

        await until(all_visible)
        await scene.wait_equal()


async def test_follower_rejects_calls_and_streams(etcd_endpoint: str, tmp_path: Path) -> None:
    cluster = f"test-{secrets.token_hex(8)}"
    async with replica_set(etcd_endpoint, cluster, tmp_path) as scene:
        await scene.start("a", "b", "c")
        leader = await scene.leader()
        follower = next(node for name, node in scene.nodes.items() if name != leader.name)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await open_ids(follower)
        assert from_rpc_error(refused.value).reason == "NOT_LEADER"
        stream = follower.transactions.WatchChecks(pb.WatchChecksRequest(group="g"))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream.read()
        assert from_rpc_error(refused.value).reason == "NOT_LEADER"
        stream = leader.transactions.WatchChecks(pb.WatchChecksRequest(group="g"))
        assert await stream.read() == pb.WatchChecksResponse()
        stream.cancel()
