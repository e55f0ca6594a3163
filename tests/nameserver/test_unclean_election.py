"""Unclean election: a node outside the in-sync set, as all nodes of the set are lost.

Goal: no change is discarded while a node could be elected without a loss; the loss is shown before,
and is stored with the set together with the operator's name.
Method: sets and nodes are written into etcd as they write themselves; a real nameserver; the
command as a process.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from typing import Any

import grpc.aio
import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq._common.rpc import from_rpc_error
from batonmq.errors import BatonError
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.replication.replica_set import (
    ACCEPTED_LOSSES_MAX,
    ReplicaSetRecord,
    decode_record,
)
from tests.nameserver.replica import CALL_TIMEOUT_S, Replica, register_broker

SET = "broker-a"
KEY = f"replicas/storage/{SET}"
BEFORE = ReplicaSetRecord(7, "a-0", frozenset({"a-0", "a-1"}), 7)


async def put_set(etcd: EtcdSession, record: ReplicaSetRecord = BEFORE) -> None:
    await etcd.put(KEY, record.encode())


async def up(etcd: EtcdSession, name: str, epoch: int = 6, version: int = 4_096) -> None:
    fields: dict[str, Any] = {
        "replica_epoch": epoch,
        "replica_version": version,
        "replica_set": SET,
    }
    await register_broker(etcd, name, leader=False, **fields)


async def stored_set(etcd: EtcdSession) -> ReplicaSetRecord:
    return decode_record(await etcd.get(KEY))


async def elect(
    nameserver: Replica, node_id: str = "a-2", **fields: Any
) -> pb.ElectReplicaResponse:
    values: dict[str, Any] = {
        "service": pb.SERVICE_KIND_STORAGE,
        "replica_set": SET,
        "node_id": node_id,
        "execute": True,
        "by": "ops@host",
    }
    request = pb.ElectReplicaRequest(**(values | fields))
    try:
        return await nameserver.stub.ElectReplica(request, timeout=CALL_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def refusal(nameserver: Replica, **fields: Any) -> BatonError:
    with pytest.raises(BatonError) as raised:
        await elect(nameserver, **fields)
    return raised.value


async def test_dry_run_shows_the_loss_and_changes_nothing(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await put_set(etcd)
    await up(etcd, "a-2")
    before = await stored_set(etcd)
    answer = await elect(nameserver, execute=False, by="")
    assert (list(answer.before.in_sync), answer.before.served_epoch) == (["a-0", "a-1"], 7)
    assert [(n.node_id, n.replica_epoch, n.replica_version) for n in answer.up] == [
        ("a-2", 6, 4_096)
    ]
    assert await stored_set(etcd) == before


async def test_only_the_chosen_node_may_be_elected_and_the_loss_is_recorded(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await put_set(etcd)
    await up(etcd, "a-2")
    begin_ms = Clock().unix_ms()
    await elect(nameserver)
    now = await stored_set(etcd)
    assert (now.in_sync, now.epoch, now.served_epoch) == (frozenset({"a-2"}), 7, 0)
    (loss,) = now.accepted
    assert (loss.node_id, list(loss.lost), loss.epoch) == ("a-2", ["a-0", "a-1"], 7)
    assert (loss.by, loss.unix_ms >= begin_ms) == ("ops@host", True)
    assert (await refusal(nameserver)).reason == "STILL_IN_SYNC", "the node is in sync now"


async def test_earlier_losses_are_kept_up_to_a_limit(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await up(etcd, "a-2")
    for _ in range(ACCEPTED_LOSSES_MAX + 2):
        now = await stored_set(etcd)
        await put_set(
            etcd, ReplicaSetRecord(now.epoch + 1, "a-0", frozenset({"a-0"}), 0, now.accepted)
        )
        await elect(nameserver)
    epochs = [loss.epoch for loss in (await stored_set(etcd)).accepted]
    assert epochs == list(range(3, ACCEPTED_LOSSES_MAX + 3))


@pytest.mark.parametrize("execute", [False, True])
async def test_unclean_election_is_refused_while_an_in_sync_node_is_up(
    nameserver: Replica, etcd: EtcdSession, execute: bool
) -> None:
    await put_set(etcd)
    await up(etcd, "a-2")
    await up(etcd, "a-1")
    before = await stored_set(etcd)
    error = await refusal(nameserver, execute=execute)
    assert (error.reason, error.facts) == ("STILL_IN_SYNC", {"node_id": "a-1"})
    assert await stored_set(etcd) == before


async def test_unclean_election_is_refused_while_the_set_has_a_leader(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    """Its live key may be deleted a moment before its lease."""
    await put_set(etcd)
    await up(etcd, "a-2")
    key = etcd.key("elections", "storage", SET)
    await etcd.put(key, b"a-0")
    before = await stored_set(etcd)
    assert (await refusal(nameserver)).reason == "STILL_IN_SYNC"
    assert await stored_set(etcd) == before
    await etcd.delete(key)
    await elect(nameserver)


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"service": pb.SERVICE_KIND_LOCKMGR}, "INVALID_ARGUMENT", "service"),
        ({"replica_set": ""}, "INVALID_ARGUMENT", "replica_set"),
        ({"replica_set": "broker-b"}, "INVALID_ARGUMENT", "replica_set"),
        ({"replica_set": "a/b"}, "INVALID_ARGUMENT", "replica_set"),
        ({"node_id": "a-9"}, "INVALID_ARGUMENT", "node_id"),
        ({"by": ""}, "INVALID_ARGUMENT", "by"),
        ({"by": "x" * 201}, "LIMIT_EXCEEDED", "by"),
    ],
)
async def test_invalid_unclean_election_is_refused(
    nameserver: Replica, etcd: EtcdSession, fields: dict[str, Any], reason: str, field: str
) -> None:
    await put_set(etcd)
    await up(etcd, "a-2")
    error = await refusal(nameserver, **fields)
    assert (error.reason, error.facts["field"]) == (reason, field)
    assert (await stored_set(etcd)).in_sync == BEFORE.in_sync


async def command(nameserver: Replica, *more: str) -> tuple[int | None, str, str]:
    """Run `baton cluster elect … a-2`; return exit code, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "batonmq.cli", "--nameserver", nameserver.address,
        "cluster", "elect", "--service", "storage", "--set", SET, "a-2", *more,
        stdin=asyncio.subprocess.DEVNULL, stdout=PIPE, stderr=PIPE,
    )  # fmt: skip
    stdout, stderr = await process.communicate()
    return process.returncode, stdout.decode(), stderr.decode()


async def test_command_changes_the_set_only_if_the_loss_is_accepted(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await put_set(etcd)
    await up(etcd, "a-2", epoch=5)
    await up(etcd, "a-3", epoch=6)
    before = await stored_set(etcd)
    code, stdout, stderr = await command(nameserver)
    assert code == 0, stderr
    for line in (
        "a-0, a-1 had everything that broker-a acknowledged up to epoch 7; what a-2 lacks of it is",
        "a-2 has nothing of the last 2 epochs",
        "a-3 had more data when it registered",
        "nothing was changed; do it with --accept-loss",
    ):
        assert line in stdout
    code, _, stderr = await command(nameserver, "--accept-loss")
    assert (code, "give --yes" in stderr) == (2, True), "there is no terminal to confirm at"
    assert await stored_set(etcd) == before
    code, stdout, stderr = await command(
        nameserver, "--accept-loss", "--yes", "--by", "ops", "--format", "json"
    )
    assert (code, stderr) == (0, "")
    report = json.loads(stdout)
    assert (report["lost"], report["done"]) == (["a-0", "a-1"], True)
    now = await stored_set(etcd)
    assert (now.in_sync, now.accepted[0].by) == (frozenset({"a-2"}), "ops")
    code, _, stderr = await command(nameserver, "--accept-loss", "--yes")
    assert (code, "STILL_IN_SYNC: node a-2 of the in-sync set is up" in stderr) == (1, True)
