"""Subscription policies, through real servers on a real etcd (protocol section 14).

Goal: the subscription of a group changes only while no queue has an owner, and every change and
refusal is reported.
Method: in-process replicas; lock entries are written as the lock manager writes them.
"""

from __future__ import annotations

import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1.stored_gate_pb2 import StoredGate
from batonmq_server.runtime.etcd.session import Compare, EtcdSession, KeyValue, Put
from tests.nameserver.replica import (
    Replica,
    grant,
    ids,
    incarnation,
    next_group,
    owners,
    refusal,
    replica,
)
from tests.support.conditions import until

STAGED = pb.SUBSCRIPTION_POLICY_STAGED
LATEST = pb.SUBSCRIPTION_POLICY_STAGED_LATEST
WARN = pb.SUBSCRIPTION_POLICY_WARN


async def gate_of(etcd: EtcdSession, group: str = "g") -> tuple[StoredGate, KeyValue]:
    stored = await etcd.get(etcd.key("gates", group))
    assert stored is not None
    return StoredGate.FromString(stored.value), stored


def expression(group: pb.Group) -> str:
    return group.subscriptions[0].expression


async def later_locks_are_seen(nameserver: Replica, etcd: EtcdSession) -> None:
    """Wait until the replica has handled an entry written now, and so all earlier ones."""
    await nameserver.join("other", "c1", "old")
    await grant(etcd, "other", "c1")
    assert (await nameserver.join("other", "c1", "new")).staged.draining
    await grant(etcd, "other", "")

    async def flipped() -> bool:
        return expression(await nameserver.group("other")) == "new"

    await until(flipped)


async def test_staged_change_waits_for_members_and_then_for_owners(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await nameserver.set_group("g", policy=STAGED)
    await nameserver.join("g", "c1", "old")
    await nameserver.join("g", "c2", "old")
    await grant(etcd, "g", "c1", queue_id=0)
    await grant(etcd, "g", "c2", queue_id=1)
    first = await nameserver.beat("g", "c1", "new")
    assert first.verdict == pb.SUBSCRIPTION_VERDICT_STAGED
    assert [(d.newcomer_value, d.member_value) for d in first.differences] == [("new", "old")]
    assert (first.group.staged.draining, owners(first.group)) == (False, {"c2": 8})
    with nameserver.watch_group("g") as call:
        await next_group(call)
        second = await nameserver.beat("g", "c2", "new")
        assert (second.verdict, second.group.staged.draining) == (
            pb.SUBSCRIPTION_VERDICT_STAGED,
            True,
        )
        assert (expression(second.group), owners(second.group)) == ("old", {"": 8})
        gate, _ = await gate_of(etcd)
        assert (gate.draining, gate.subscription_generation, gate.bound) == (True, 1, True)
        draining = await next_group(call)
        assert draining == second.group
        await grant(etcd, "g", "", queue_id=0)
        await later_locks_are_seen(nameserver, etcd)
        assert await nameserver.group("g") == draining, "c2 owns a queue still"
        await grant(etcd, "g", "", queue_id=1)
        after = await next_group(call)
    assert (expression(after), after.subscription_generation) == ("new", 2)
    assert not after.HasField("staged")
    assert owners(after) == {"c1": 4, "c2": 4}
    gate, _ = await gate_of(etcd)
    assert (gate.draining, gate.subscription_generation) == (False, 2)
    assert (await nameserver.beat("g", "c1", "new")).verdict == pb.SUBSCRIPTION_VERDICT_ACCEPTED


async def test_change_without_other_members_and_owners_is_accepted_at_once(
    nameserver: Replica,
) -> None:
    await nameserver.join("g", "c1", "old")
    answer = await nameserver.beat("g", "c1", "new")
    assert answer.verdict == pb.SUBSCRIPTION_VERDICT_ACCEPTED
    assert (expression(answer.group), answer.group.subscription_generation) == ("new", 2)
    assert owners(answer.group) == {"c1": 8}


async def test_owner_of_the_old_subscription_delays_the_new_one(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    """Also under REJECT: a member without nameserver keeps its queues until its lease expires."""
    await nameserver.join("g", "zombie", "old")
    await grant(etcd, "g", "zombie")
    await nameserver.leave("g", "zombie")
    with nameserver.watch_group("g") as call:
        await next_group(call)
        answer = await nameserver.beat("g", "c1", "new")
        assert (answer.verdict, owners(answer.group)) == (pb.SUBSCRIPTION_VERDICT_STAGED, {"": 8})
        assert await next_group(call) == answer.group
        await grant(etcd, "g", "")
        assert expression(await next_group(call)) == "new"


async def test_grant_that_was_decided_before_the_drain_is_not_persisted_after_it(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    """The lock manager compares the gate: a late grant fails, so the change misses none."""
    await nameserver.set_group("g", policy=LATEST)
    await nameserver.join("g", "c1", "old")
    _, gate = await gate_of(etcd)
    lock = etcd.key("locks", "g", "flights", "broker-a", "0")
    answer = await nameserver.beat("g", "c2", "new")
    assert (answer.verdict, expression(answer.group)) == (pb.SUBSCRIPTION_VERDICT_ACCEPTED, "new")
    persisted = await etcd.txn(
        compare=[Compare(gate.key, mod_revision=gate.mod_revision)], put=[Put(lock, b"")]
    )
    assert persisted is None
    assert owners(answer.group) == {"c2": 8}, "c1 has the old subscription"


async def test_grant_written_just_before_the_drain_delays_the_change(
    nameserver: Replica, etcd: EtcdSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock entry is read from etcd after the drain was written, not from a copy."""
    await nameserver.set_group("g", policy=LATEST)
    await nameserver.join("g", "c1", "old")
    write = nameserver.runtime.etcd.txn
    granted: list[str] = []

    async def overtaken(**request: object) -> int | None:
        if not granted:
            granted.append("c1")
            await grant(etcd, "g", "c1")
        return await write(**request)  # type: ignore[arg-type]

    monkeypatch.setattr(nameserver.runtime.etcd, "txn", overtaken)
    answer = await nameserver.beat("g", "c2", "new")
    assert granted
    assert (answer.verdict, answer.group.staged.draining) == (pb.SUBSCRIPTION_VERDICT_STAGED, True)


async def test_two_replicas_put_a_subscription_in_force_once(
    etcd_endpoint: str, cluster: str, nameserver: Replica, etcd: EtcdSession
) -> None:
    async with replica(etcd_endpoint, cluster) as other:
        await nameserver.set_group("g", policy=LATEST)
        await nameserver.join("g", "c1", "old")
        await grant(etcd, "g", "c1")
        draining = (await other.beat("g", "c1", "new")).group
        assert draining.staged.draining
        with nameserver.watch_group("g") as watch, other.watch_group("g") as other_watch:
            for call in (watch, other_watch):
                while await next_group(call) != draining:
                    pass  # changes that a replica had not received yet
            await grant(etcd, "g", "")
            flipped = [await next_group(call) for call in (watch, other_watch)]
    assert flipped[0] == flipped[1]
    assert flipped[0].generation == draining.generation + 1
    assert flipped[0].subscription_generation == 2


async def test_drain_that_ended_while_no_nameserver_ran_is_finished_at_start(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with replica(etcd_endpoint, cluster) as before:
        await before.create("flights")
        await before.set_group("g", policy=LATEST)
        await before.join("g", "c1", "old")
        await grant(etcd, "g", "c1")
        assert (await before.join("g", "c1", "new")).staged.draining
    await grant(etcd, "g", "")
    async with replica(etcd_endpoint, cluster) as after:

        async def flipped() -> bool:
            return expression(await after.group("g")) == "new"

        await until(flipped)


async def test_warn_replaces_at_once_and_counts_it(nameserver: Replica, etcd: EtcdSession) -> None:
    await nameserver.set_group("g", policy=WARN)
    await nameserver.join("g", "c1", "old")
    await grant(etcd, "g", "c1")
    answer = await nameserver.beat("g", "c2", "new")
    assert (answer.verdict, expression(answer.group)) == (pb.SUBSCRIPTION_VERDICT_REPLACED, "new")
    assert [(d.newcomer_client_id, d.member_client_id) for d in answer.differences] == [
        ("c2", "c1")
    ]
    assert owners(answer.group) == {"c1": 4, "c2": 4}
    assert nameserver.metric("replacements_total") == 1
    assert nameserver.metric("differing_members") == 1
    again = await nameserver.beat("g", "c1", "old")
    assert (again.verdict, again.group.generation) == (
        pb.SUBSCRIPTION_VERDICT_OVERRULED,
        answer.group.generation,
    )
    gate, _ = await gate_of(etcd)
    assert (gate.bound, gate.subscription_generation) == (False, 2)


async def test_broadcasting_members_may_have_different_subscriptions(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    for client_id, tags in (("c1", "x"), ("c2", "y")):
        answer = await nameserver.beat("g", client_id, tags, model=pb.MESSAGE_MODEL_BROADCASTING)
        assert answer.verdict == pb.SUBSCRIPTION_VERDICT_ACCEPTED
    assert (ids(answer.group), list(answer.group.assignments)) == (["c1", "c2"], [])
    assert (await gate_of(etcd))[0].model == pb.MESSAGE_MODEL_BROADCASTING
    error = await refusal(nameserver.join("g", "c3", "x"))
    assert [(d.setting, d.member_value) for d in error.differences] == [("model", "BROADCASTING")]


async def test_member_with_a_staged_subscription_stays_by_its_heartbeats(
    nameserver: Replica,
) -> None:
    await nameserver.set_group("g", policy=STAGED)
    await nameserver.join("g", "c1", "old")
    waiting = await nameserver.beat("g", "c2", "new")
    again = await nameserver.beat("g", "c2", "new")
    assert (again.verdict, again.group) == (pb.SUBSCRIPTION_VERDICT_STAGED, waiting.group)


@pytest.mark.long
async def test_refused_client_is_shown_until_its_heartbeats_stop(
    etcd_endpoint: str, cluster: str, nameserver: Replica
) -> None:
    async with replica(
        etcd_endpoint, cluster, member_lease_ms=6_000, heartbeat_interval_ms=500
    ) as other:
        await nameserver.join("g", "c1", "x")
        assert (await refusal(other.join("g", "c2", "y"))).reason == "SUBSCRIPTION_CONFLICT"
        await until(lambda: nameserver.refused("g"))
        (client,) = await nameserver.refused("g")
        assert (client.incarnation.client_id, client.host) == ("c2", "host-of-c2")
        assert [d.newcomer_value for d in client.error.differences] == ["y"]
        await refusal(other.join("g", "c2", "y"))
        (again,) = await other.refused("g")
        assert again == client, "the same refusal, since the same time"

        async def is_dropped() -> bool:
            return not await nameserver.refused("g")

        await until(is_dropped)


async def test_refused_client_that_joins_is_no_longer_shown(nameserver: Replica) -> None:
    await nameserver.join("g", "c1", "x")
    await refusal(nameserver.join("g", "c2", "y"))
    await until(lambda: nameserver.refused("g"))
    await nameserver.join("g", "c2", "x")

    async def is_dropped() -> bool:
        return not await nameserver.refused("g")

    await until(is_dropped)


async def test_client_id_in_use_is_shown_as_refused(nameserver: Replica) -> None:
    await nameserver.join("g", "c1")
    error = await refusal(nameserver.beat("g", "c1", incarnation=incarnation("c1", 2)))
    assert error.reason == "CLIENT_ID_IN_USE"
    await until(lambda: nameserver.refused("g"))
    (client,) = await nameserver.refused("g")
    assert client.incarnation.incarnation_id == 2
