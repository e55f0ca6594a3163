"""The choice of the member of etcd that is called, and when a call is given up.

Goal: a member that does not respond delays repeatable calls for a moment, and no call for long;
other calls go to a live member; a mirror loses no event.
Method: a real etcd behind two proxies, each a member to the session, one of which gets stuck: it
reads all bytes and sends none. Timeouts of a minute, so that no call ends by its timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio

from batonmq._common.clock import Clock
from batonmq._connection.channels import connect
from batonmq.errors import NoQuorum
from batonmq_server.local.etcd import etcd_members as processes
from batonmq_server.runtime.etcd import members as etcd_members
from batonmq_server.runtime.etcd.members import FRESH_S, TRY_S
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.runtime.etcd_proxies import EtcdProxies, SlowProxy, two_proxies
from tests.support.conditions import until

MINUTE_MS = 60_000
SOON_S = 30
"""Far longer than the detection of a stuck member takes, and shorter than any timeout."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live member may be as slow as the machine."""
    monkeypatch.setattr(etcd_members, "CHECK_TIMEOUT_S", 2)


@pytest_asyncio.fixture
async def proxies(etcd_endpoint: str) -> AsyncIterator[EtcdProxies]:
    async with two_proxies(etcd_endpoint) as proxies:
        yield proxies


@asynccontextmanager
async def session_at(
    proxies: EtcdProxies, cluster: str, *, looks: bool = True
) -> AsyncIterator[EtcdSession]:
    """A session that has called one of the proxies.

    Args:
        looks: Whether it detects members that do not respond.
    """
    async with (
        EtcdSession(proxies.endpoint, cluster, Clock(), timeout_ms=MINUTE_MS) as session,
        asyncio.TaskGroup() as tasks,
    ):
        looking = tasks.create_task(session.run()) if looks else None
        await session.put("a", b"1")
        yield session
        if looking is not None:
            looking.cancel()


async def test_repeatable_call_is_answered_by_another_member(
    proxies: EtcdProxies, cluster: str
) -> None:
    async with session_at(proxies, cluster, looks=False) as session:
        lease = await session.lease(MINUTE_MS)
        for call in (
            session.get("a"),
            session.lease(MINUTE_MS),
            lease.refresh(),
            session.time_to_live(lease.lease_id),
            lease.revoke(),
        ):
            stuck = proxies.stick_the_used(session)
            async with asyncio.timeout(SOON_S):
                await call
            assert proxies.another_answers(stuck)
            stuck.free()


async def test_transaction_goes_to_a_live_member(proxies: EtcdProxies, cluster: str) -> None:
    async with session_at(proxies, cluster, looks=False) as session:
        now_s = asyncio.get_running_loop().time
        heard_s = now_s()
        proxies.stick_the_used(session)
        await until(lambda: now_s() - heard_s > FRESH_S)
        async with asyncio.timeout(SOON_S):
            await session.put("a", b"2")
            stored = await session.get("a")
        assert stored is not None
        assert stored.value == b"2"


async def test_transaction_at_a_member_that_stops_responding_has_an_unknown_outcome(
    proxies: EtcdProxies, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        etcd_members, "FRESH_S", MINUTE_MS / 1000
    )  # so that there is no life check first
    async with session_at(proxies, cluster) as session:
        proxies.stick_the_used(session)
        async with asyncio.timeout(SOON_S):
            with pytest.raises(NoQuorum, match="does not answer"):
                await session.put("a", b"2")
            await session.put("a", b"3")


async def test_slow_live_member_is_waited_for(
    proxies: EtcdProxies, cluster: str, etcd: EtcdSession
) -> None:
    """A watch without events is no fault: its member answers the life checks."""
    async with session_at(proxies, cluster) as session:
        revision = await session.put("b/1", b"")
        member = session._members.first
        answers = session.watch("b/", revision + 1)
        assert (await anext(answers)).created
        coming = anext(answers)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(coming)
            now_s = asyncio.get_running_loop().time
            begin_s = now_s()
            await until(lambda: member.answered_s > begin_s + 3)  # by the life checks
            assert not waiting.done()
            await etcd.put("b/2", b"")
        assert waiting.result().events
        await answers.aclose()


@pytest.mark.long
async def test_mirror_continues_at_another_member_without_a_gap(
    proxies: EtcdProxies, cluster: str, etcd: EtcdSession
) -> None:
    async with session_at(proxies, cluster) as session, asyncio.TaskGroup() as tasks:
        mirror = EtcdMirror(session, "topics/")
        following = tasks.create_task(mirror.run())
        await mirror.ready()
        changed: set[str] = set()
        mirror.on_change.append(changed.update)
        for number in range(3):
            stuck = proxies.stick_the_used(session)
            await etcd.put(f"topics/{number}", b"")
            await etcd.delete(f"topics/{number - 1}")
            revision = await etcd.put(f"topics/last-{number}", b"")
            async with asyncio.timeout(SOON_S):
                await mirror.reached(revision)
            stuck.free()
        assert changed == {"0", "1", "2", "last-0", "last-1", "last-2"}
        assert mirror.values.keys() == {"2", "last-0", "last-1", "last-2"}
        following.cancel()


async def test_watch_ends_when_its_member_has_no_leader(tmp_path: Path, cluster: str) -> None:
    """The member answers life checks, but gets no changes any more."""
    folders = [tmp_path / name for name in "abc"]
    members = processes(folders, [folder / "log" for folder in folders], {})
    for folder in folders:
        folder.mkdir(exist_ok=True)
    try:
        async with asyncio.TaskGroup() as tasks:
            for member in members:
                tasks.create_task(member.start())
        endpoint = members[0].endpoint
        async with EtcdSession(endpoint, cluster, Clock(), timeout_ms=MINUTE_MS) as session:
            answers = session.watch("b/", await session.put("b/1", b"") + 1)
            assert (await anext(answers)).created
            for other in members[1:]:
                other.child.kill_now()
            async with asyncio.timeout(30):
                with pytest.raises(NoQuorum, match="no leader"):
                    await anext(answers)
    finally:
        for member in members:
            await member.stop()


async def test_unreachable_member_is_skipped(etcd_endpoint: str, cluster: str) -> None:
    """This holds whichever of the two is called first."""
    endpoint = f"127.0.0.1:1,{etcd_endpoint}"
    for _ in range(8):
        async with EtcdSession(endpoint, cluster, Clock()) as session:
            await session.put("a", b"1")
            assert await session.get("a") is not None


async def test_slow_member_is_waited_for_while_the_other_is_unreachable(
    etcd_endpoint: str, cluster: str
) -> None:
    """The slow member is called again and again, and the other one fails in between."""
    async with (
        SlowProxy(etcd_endpoint) as slow,
        EtcdSession(
            f"127.0.0.1:1,{slow.address}", cluster, Clock(), timeout_ms=MINUTE_MS
        ) as session,
        asyncio.TaskGroup() as tasks,
    ):
        asking = tasks.create_task(session.get("a"))
        now_s = asyncio.get_running_loop().time
        begin_s = now_s()
        await until(lambda: now_s() - begin_s > 3 * TRY_S)
        assert not asking.done()
        slow.goes_on.set()
        async with asyncio.timeout(SOON_S):
            assert await asking is None


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_slow_members_answer_in_the_end(count: int) -> None:
    """Each try gets more time than the one before; else all would time out."""

    async def answer(member: etcd_members.EtcdMember) -> str:
        await asyncio.sleep(1.5 * TRY_S)
        return member.address

    addresses = [f"127.0.0.1:{number}" for number in range(1, count + 1)]
    members = etcd_members.EtcdMembers(addresses, Random(1), connect)
    try:
        async with asyncio.timeout(SOON_S):
            assert await members.call(answer, MINUTE_MS / 1000, TRY_S) in addresses
    finally:
        await members.close()


async def test_calls_fail_at_once_without_reachable_members(cluster: str) -> None:
    endpoint = "127.0.0.1:1,127.0.0.1:2"
    async with EtcdSession(endpoint, cluster, Clock(), timeout_ms=MINUTE_MS) as session:
        for call in (session.get("a"), session.put("a", b"")):
            async with asyncio.timeout(SOON_S):
                with pytest.raises(NoQuorum, match="UNAVAILABLE"):
                    await call
