"""Members whose connection breaks, through real servers on a real etcd.

Goal: a dead member is removed within a short grace period; a member that only reconnects is never
removed.
Method: watches that are sessions of members are cancelled; heartbeats go to the same or another
replica. The grace period is four seconds and the lease thirty, so only the session can be the
reason of a removal. "Never" is shown by a marker: a member whose session broke later and that has
been removed. Sessions break a second after the heartbeat: a closer one could not be distinguished
from one after the break.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from batonmq_server.runtime.etcd.session import EtcdSession
from tests.nameserver.replica import Replica, ids, incarnation, next_group, refusal, replica
from tests.support.conditions import until

GRACE_MS = 4_000
"""Time that a member has to reconnect."""


@pytest_asyncio.fixture
async def nameserver(etcd_endpoint: str, cluster: str, etcd: EtcdSession) -> AsyncIterator[Replica]:
    async with replica(etcd_endpoint, cluster, session_grace_ms=GRACE_MS) as running:
        await running.create("flights")
        yield running


@pytest_asyncio.fixture
async def other(etcd_endpoint: str, cluster: str, nameserver: Replica) -> AsyncIterator[Replica]:
    async with replica(etcd_endpoint, cluster, session_grace_ms=GRACE_MS) as running:
        yield running


async def broken(at: Replica, client_id: str, *, as_member: bool = True) -> None:
    """Open a session and let it break, a second after the last heartbeat."""
    with at.watch_group("g", session=client_id if as_member else "") as call:
        await next_group(call)
        await aged(at, client_id)


async def aged(at: Replica, client_id: str, by_s: int = 1) -> None:
    """Wait until the last heartbeat is older than that."""
    etcd = at.runtime.etcd
    live = await etcd.get(etcd.key("live", "g", client_id))
    assert live is not None

    async def old() -> bool:
        left_s, granted_s = await etcd.time_to_live(live.lease_id)
        return left_s < granted_s - by_s

    await until(old)


async def removed(at: Replica, client_id: str) -> None:
    await until(lambda: _is_gone(at, client_id))


async def _is_gone(at: Replica, client_id: str) -> bool:
    return client_id not in ids(await at.group("g"))


async def marked(at: Replica) -> None:
    """Wait until a member whose session breaks now is removed."""
    await at.join("g", "marker")
    await broken(at, "marker")
    await removed(at, "marker")


@pytest.mark.long
async def test_member_with_a_broken_session_is_removed_after_the_grace_period(
    nameserver: Replica, other: Replica, etcd: EtcdSession
) -> None:
    await nameserver.join("g", "stays")
    await other.join("g", "dies")
    with other.watch_group("g", session="stays") as call:
        assert ids(await next_group(call)) == ["dies", "stays"]
        await broken(nameserver, "dies")
        assert ids(await next_group(call)) == ["stays"]
    await until(lambda: nameserver.metric("broken_sessions_total") == 1)
    assert nameserver.metric("expiries_total") == 0
    assert await etcd.get(etcd.key("live", "g", "dies")) is None


@pytest.mark.long
async def test_member_that_reconnects_to_the_same_replica_is_kept(nameserver: Replica) -> None:
    await nameserver.join("g", "c1")
    await broken(nameserver, "c1")
    with nameserver.watch_group("g", session="c1") as call:
        await next_group(call)
        await marked(nameserver)
        assert ids(await nameserver.group("g")) == ["c1"]


@pytest.mark.long
async def test_member_that_reconnects_to_another_replica_and_sends_a_heartbeat_is_kept(
    nameserver: Replica, other: Replica
) -> None:
    await nameserver.join("g", "c1")
    await broken(nameserver, "c1")
    await other.join("g", "c1")
    await marked(nameserver)
    assert ids(await nameserver.group("g")) == ["c1"]


@pytest.mark.long
async def test_late_notice_of_a_broken_session_keeps_a_member_that_uses_another_replica(
    nameserver: Replica, other: Replica
) -> None:
    """This replica was paused: another replica had heartbeats of the member before the break."""
    await nameserver.join("g", "c1")
    with nameserver.watch_group("g", session="c1") as call:
        await next_group(call)
        await aged(nameserver, "c1", by_s=4)  # its session is younger than its heartbeat
        await other.join("g", "c1")
        await aged(nameserver, "c1")
    await marked(nameserver)
    assert ids(await nameserver.group("g")) == ["c1"]


@pytest.mark.long
async def test_member_with_a_second_session_is_kept(nameserver: Replica) -> None:
    await nameserver.join("g", "c1")
    with nameserver.watch_group("g", session="c1") as call:
        await next_group(call)
        await broken(nameserver, "c1")
        await marked(nameserver)
        assert ids(await nameserver.group("g")) == ["c1"]


@pytest.mark.long
async def test_watch_of_an_observer_is_no_session(nameserver: Replica) -> None:
    await nameserver.join("g", "c1")
    await broken(nameserver, "c1", as_member=False)
    await marked(nameserver)
    assert ids(await nameserver.group("g")) == ["c1"]


@pytest.mark.long
async def test_broken_session_of_an_earlier_incarnation_keeps_the_member(
    nameserver: Replica,
) -> None:
    await nameserver.join("g", "c1")
    with nameserver.watch_group("g", session="c1") as call:
        await next_group(call)
        await nameserver.leave("g", "c1")
        answer = await nameserver.beat("g", "c1", incarnation=incarnation("c1", 2))
        assert ids(answer.group) == ["c1"]
    await marked(nameserver)
    assert ids(await nameserver.group("g")) == ["c1"]


async def test_session_without_incarnation_is_invalid(nameserver: Replica) -> None:
    await nameserver.join("g", "c1")
    with nameserver.watch_group("g", session="c 1") as call:
        assert (await refusal(call.read())).reason == "INVALID_NAME"
