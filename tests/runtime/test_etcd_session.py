"""The client of etcd.

Goal: a transaction applies all of its writes or none; keys are deleted with their lease;
a failed condition and an unknown outcome are different results.
Method: a real etcd, and a cluster name for each test.
"""

from __future__ import annotations

from typing import Any

import pytest

from batonmq._common.clock import Clock
from batonmq.errors import NoQuorum
from batonmq_server.runtime.etcd import session
from batonmq_server.runtime.etcd.session import Compare, EtcdSession, Put
from tests.support.conditions import until

# ---- keys


async def test_get_returns_value_and_revisions(etcd: EtcdSession) -> None:
    created = await etcd.put("topics/a", b"1")
    changed = await etcd.put("topics/a", b"2")
    stored = await etcd.get("topics/a")
    assert stored is not None
    assert (stored.key, stored.value, stored.lease_id) == ("topics/a", b"2", 0)
    assert (stored.create_revision, stored.mod_revision) == (created, changed)


async def test_get_of_a_missing_key_returns_none(etcd: EtcdSession) -> None:
    assert await etcd.get("topics/a") is None


async def test_get_prefix_is_ascending_and_has_no_other_keys(etcd: EtcdSession) -> None:
    for key in ("topics/b", "topics/a", "topicsx", "groups/a", "topics/a-b"):
        last = await etcd.put(key, b"")
    entries, revision = await etcd.get_prefix("topics/")
    assert [stored.key for stored in entries] == ["topics/a", "topics/a-b", "topics/b"]
    assert revision >= last


async def test_prefix_that_is_larger_than_a_message_is_read_at_one_revision(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nothing that follows the prefix would start again."""
    monkeypatch.setattr(session, "_OPTIONS", (("grpc.max_receive_message_length", 8_000),))
    monkeypatch.setattr(session, "PAGE_KEYS", 3, raising=False)
    keys = [f"topics/{number:02}" for number in range(20)]
    for key in keys:
        last = await etcd.put(key, bytes(1_000))
    calls = 0

    async def overtaken(*args: Any) -> Any:
        """Make a call; before the second one, another session changes, adds and deletes keys."""
        nonlocal calls
        calls += 1
        if calls == 2:
            for key in (keys[0], keys[-1], "topics/99"):
                await etcd.put(key, b"late")
            await etcd.delete(keys[10])
        return await call(*args)

    async with EtcdSession(etcd_endpoint, cluster, Clock()) as small:
        call = small._members.call
        monkeypatch.setattr(small._members, "call", overtaken)
        entries, revision = await small.get_prefix("topics/")
    assert [(stored.key, stored.value) for stored in entries] == [
        (key, bytes(1_000)) for key in keys
    ]
    assert calls == 7
    assert last <= revision < (await etcd.get_prefix("topics/"))[1]


async def test_delete_returns_whether_the_key_existed(etcd: EtcdSession) -> None:
    await etcd.put("topics/a", b"")
    assert await etcd.delete("topics/a")
    assert not await etcd.delete("topics/a")


async def test_clusters_in_one_etcd_have_separate_keys(
    etcd: EtcdSession, etcd_endpoint: str, cluster: str
) -> None:
    await etcd.put("topics/a", b"")
    async with EtcdSession(etcd_endpoint, f"{cluster}-2", Clock()) as other:
        await other.put("topics/b", b"")
        assert [stored.key for stored in (await other.get_prefix(""))[0]] == ["topics/b"]
    assert [stored.key for stored in (await etcd.get_prefix(""))[0]] == ["topics/a"]


@pytest.mark.parametrize("parts", [("a", ""), ("a/b",), ("", "a")])
def test_key_with_a_bad_part_fails(parts: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError):
        EtcdSession.key(*parts)


async def test_get_tree_has_the_key_and_all_below_it_and_no_neighbours(etcd: EtcdSession) -> None:
    for key in ("topics/a", "topics/a-b", "topics/a/2", "topics/a/1/x", "topics/b", "topics/a0"):
        await etcd.put(key, key.encode())
    entries = await etcd.get_tree("topics/a")
    assert [(one.key, one.value) for one in entries] == [
        (key, key.encode()) for key in ("topics/a", "topics/a/1/x", "topics/a/2")
    ]
    assert await etcd.get_tree("topics/c") == []


# ---- transactions


async def test_create_revision_0_holds_only_for_a_missing_key(etcd: EtcdSession) -> None:
    absent = Compare("a", create_revision=0)
    assert await etcd.txn(compare=[absent], put=[Put("a", b"first")]) is not None
    assert await etcd.txn(compare=[absent], put=[Put("a", b"second")]) is None
    stored = await etcd.get("a")
    assert stored is not None
    assert stored.value == b"first"


async def test_mod_revision_0_holds_only_for_a_missing_key(etcd: EtcdSession) -> None:
    absent = Compare("a", mod_revision=0)
    assert await etcd.txn(compare=[absent], put=[Put("a", b"")]) is not None
    assert await etcd.txn(compare=[absent], put=[Put("a", b"")]) is None


async def test_mod_revision_holds_only_for_an_unchanged_key(etcd: EtcdSession) -> None:
    revision = await etcd.put("a", b"seen")
    await etcd.put("a", b"by another writer")
    assert (
        await etcd.txn(compare=[Compare("a", mod_revision=revision)], put=[Put("a", b"")]) is None
    )
    stored = await etcd.get("a")
    assert stored is not None
    assert stored.value == b"by another writer"
    again = Compare("a", mod_revision=stored.mod_revision)
    assert await etcd.txn(compare=[again], put=[Put("a", b"now")]) is not None


async def test_create_revision_holds_after_changes_and_not_after_a_deletion(
    etcd: EtcdSession,
) -> None:
    same = Compare("a", create_revision=await etcd.put("a", b"1"))
    await etcd.put("a", b"2")
    assert await etcd.txn(compare=[same], put=[Put("b", b"")]) is not None
    await etcd.delete("a")
    await etcd.put("a", b"3")
    assert await etcd.txn(compare=[same], put=[Put("b", b"")]) is None


async def test_one_failed_condition_stops_every_write(etcd: EtcdSession) -> None:
    kept = await etcd.put("kept", b"")
    revision = await etcd.txn(
        compare=[Compare("kept", mod_revision=kept), Compare("kept", create_revision=0)],
        put=[Put("new", b"")],
        delete=["kept"],
    )
    assert revision is None
    assert await etcd.get("new") is None
    assert await etcd.get("kept") is not None


async def test_transaction_of_more_writes_than_etcd_allows_is_carried_out_whole(
    etcd: EtcdSession,
) -> None:
    """etcd allows 128 in one transaction, and as many in each transaction within it."""
    keys = [f"many/{number:05}" for number in range(3_000)]
    revision = await etcd.txn(
        compare=[Compare("a", mod_revision=0)], put=[Put(k, b"") for k in keys]
    )
    entries, _ = await etcd.get_prefix("many/")
    assert [(one.key, one.mod_revision) for one in entries] == [(key, revision) for key in keys]
    assert await etcd.txn(compare=[Compare("a", mod_revision=1)], delete=keys) is None
    assert await etcd.txn(compare=[Compare("a", mod_revision=0)], delete=keys) is not None
    assert (await etcd.get_prefix("many/"))[0] == []


@pytest.mark.parametrize("count", [97, 128])
async def test_transaction_has_as_many_conditions_as_writes(etcd: EtcdSession, count: int) -> None:
    keys = [f"both/{number}" for number in range(count)]
    absent = [Compare(key, mod_revision=0) for key in keys]
    writes = [Put(key, b"") for key in keys]
    assert await etcd.txn(compare=absent, put=writes) is not None
    assert await etcd.txn(compare=absent, put=writes) is None, "they exist now"


async def test_writes_of_a_transaction_share_one_revision(etcd: EtcdSession) -> None:
    await etcd.put("old", b"")
    revision = await etcd.txn(
        compare=[Compare("a", create_revision=0)],
        put=[Put("a", b"1"), Put("b", b"2")],
        delete=["old"],
    )
    entries, _ = await etcd.get_prefix("")
    assert [(stored.key, stored.mod_revision) for stored in entries] == [
        ("a", revision),
        ("b", revision),
    ]


# ---- leases


async def test_key_is_deleted_when_its_lease_expires(etcd: EtcdSession) -> None:
    lease = await etcd.lease(4_000)
    await etcd.put("a", b"", lease)
    await etcd.put("b", b"")

    async def gone() -> bool:
        return await etcd.get("a") is None

    await until(gone)
    assert await etcd.get("b") is not None
    assert not await lease.refresh()


async def test_key_is_deleted_when_its_lease_is_revoked(etcd: EtcdSession) -> None:
    lease = await etcd.lease(60_000)
    await etcd.put("a", b"", lease)
    await lease.revoke()
    assert await etcd.get("a") is None


async def test_revoking_twice_has_no_effect(etcd: EtcdSession) -> None:
    lease = await etcd.lease(60_000)
    await lease.revoke()
    await lease.revoke()


async def test_refresh_returns_whether_the_lease_is_alive(etcd: EtcdSession) -> None:
    lease = await etcd.lease(60_000)
    assert await lease.refresh()
    await lease.revoke()
    assert not await lease.refresh()


async def test_lease_granted_elsewhere_can_be_refreshed_and_revoked(etcd: EtcdSession) -> None:
    lease = await etcd.lease(60_000)
    await etcd.put("a", b"", lease)
    stored = await etcd.get("a")
    assert stored is not None
    assert stored.lease_id == lease.lease_id
    other = etcd.attach(stored.lease_id)
    assert await other.refresh()
    await other.revoke()
    assert not await lease.refresh()


async def test_write_under_an_ended_lease_fails(etcd: EtcdSession) -> None:
    lease = await etcd.lease(60_000)
    await lease.revoke()
    with pytest.raises(NoQuorum, match="lease not found"):
        await etcd.put("a", b"", lease)
    assert await etcd.get("a") is None


async def test_write_without_a_lease_detaches_the_key(etcd: EtcdSession) -> None:
    lease = await etcd.lease(60_000)
    await etcd.put("a", b"", lease)
    await etcd.put("a", b"stays")
    await lease.revoke()
    assert await etcd.get("a") is not None


# ---- outages


async def test_unreachable_etcd_is_no_quorum(cluster: str) -> None:
    async with EtcdSession("127.0.0.1:1", cluster, Clock(), timeout_ms=500) as session:
        for call in (
            session.get("a"),
            session.get_prefix("a"),
            session.put("a", b""),
            session.delete("a"),
            session.lease(5_000),
            session.attach(1).refresh(),
            session.attach(1).revoke(),
            anext(session.watch("a", 1)),
        ):
            with pytest.raises(NoQuorum):
                await call
