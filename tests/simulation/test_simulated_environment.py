"""Goal: the simulated loop, network and etcd behave like the real ones; else runs prove nothing.

Method: the loop, the network and the etcd twin, each alone, against what asyncio, gRPC and etcd
do in the same situation.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator

import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.lockmgr.v1 import lockmgr_service_pb2_grpc as lockmgr_grpc
from baton.nameserver.v1.stored_node_pb2 import StoredNode
from baton.offsets.v1 import offsets_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc
from batonmq._common.rpc import from_rpc_error
from batonmq._process.config import load
from batonmq.errors import NoQuorum, OldEpoch, OldEpochDetail, Unreachable
from batonmq_server.runtime.election import Election
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import Compare, Put
from batonmq_server.runtime.interceptor import EdgeInterceptor
from batonmq_server.runtime.service_runtime import Runtime
from batonmq_server.runtime.settings import ServiceSettings
from batonmq_server.testing.memory_etcd import MemoryEtcdSession
from batonmq_server.testing.memory_grpc import MemoryServer, memory_connector
from batonmq_server.testing.memory_network import Faults
from batonmq_server.testing.processes import LoopClock
from batonmq_server.testing.virtual_time import Deadlock, Livelock, VirtualHost, run_virtual
from tests.simulation.cluster import SimulatedCluster


class Offsets(pb_grpc.OffsetsServiceServicer):
    """Rejects old terms; a call with term 99 waits until it is cancelled."""

    def __init__(self) -> None:
        self.announced: list[int] = []
        self.cancelled = 0

    async def Announce(self, request: pb.AnnounceRequest, _: object) -> pb.AnnounceResponse:
        if request.term == 99:
            try:
                await asyncio.sleep(1_000)
            finally:
                self.cancelled += 1
        if request.term < 5:
            raise OldEpoch("term is over", detail=OldEpochDetail(current=5))
        self.announced.append(request.term)
        return pb.AnnounceResponse(offsets_epoch=request.term)


class Locks(lockmgr_grpc.LockmgrServiceServicer):
    """Answers List after two seconds; a watch sends one item, and ends when it is cancelled."""

    def __init__(self) -> None:
        self.heard = self.ended = 0

    async def List(self, request: lockmgr_pb.ListRequest, _: object) -> lockmgr_pb.ListResponse:
        await asyncio.sleep(2)
        return lockmgr_pb.ListResponse()

    async def Watch(
        self, request: lockmgr_pb.WatchRequest, _: object
    ) -> AsyncGenerator[lockmgr_pb.WatchResponse, None]:
        yield lockmgr_pb.WatchResponse()
        try:
            await asyncio.sleep(1_000)
        finally:
            self.ended += 1


class Pair:
    """A client and a server on a network of their own."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.cluster = SimulatedCluster("pair")
        self.offsets = Offsets()  # type: ignore[abstract]
        self.client, self.host = VirtualHost("client"), VirtualHost("server")
        edge = EdgeInterceptor(LoopClock(), CollectorRegistry())
        self.server = MemoryServer(self.cluster.network, self.host, "server:1", edge)
        pb_grpc.add_OffsetsServiceServicer_to_server(self.offsets, self.server)  # type: ignore[arg-type]
        self.server.start()
        self.cluster.network.faults = faults or Faults()

    async def announce(self, term: int, timeout_s: float = 5) -> pb.AnnounceResponse:
        stub = pb_grpc.OffsetsServiceStub(
            memory_connector(self.cluster.network, self.client)("server:1")
        )
        return await stub.Announce(pb.AnnounceRequest(term=term), timeout=timeout_s)

    async def refusal(self, term: int, timeout_s: float = 5) -> BaseException:
        with pytest.raises(Exception) as raised:
            await self.announce(term, timeout_s)
        return from_rpc_error(raised.value)  # type: ignore[arg-type]


def test_blocked_program_is_reported_as_a_deadlock() -> None:
    with pytest.raises(Deadlock):
        run_virtual(asyncio.Event().wait())


def test_spinning_program_is_reported_as_a_livelock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batonmq_server.testing.virtual_time.SPINS_MAX", 1_000)

    async def spin() -> None:
        loop = asyncio.get_running_loop()

        def again() -> None:
            loop.call_soon(again)

        again()
        await asyncio.sleep(1)

    with pytest.raises(Livelock):
        run_virtual(spin())


def test_virtual_hour_takes_no_real_time() -> None:
    async def sleep() -> float:
        await asyncio.sleep(3_600)
        return asyncio.get_running_loop().time()

    assert run_virtual(sleep()) == pytest.approx(3_600)


def test_callback_that_ran_is_freed_without_the_garbage_collector() -> None:
    async def main() -> int:
        host, before = VirtualHost("a"), len(gc.get_objects())
        for _ in range(100):
            host.post(int)
            await asyncio.sleep(0.1)
        return len(gc.get_objects()) - before

    assert run_virtual(main()) < 100


def test_frozen_host_handles_missed_events_after_it_is_thawed() -> None:
    async def main() -> list[float]:
        host, ticks = VirtualHost("a"), list[float]()

        async def tick() -> None:
            for _ in range(4):
                await asyncio.sleep(1)
                ticks.append(asyncio.get_running_loop().time())

        ticking = host.spawn(tick())
        await asyncio.sleep(1.5)
        host.freeze()
        await asyncio.sleep(10)
        host.thaw()
        await ticking
        return ticks

    assert run_virtual(main()) == pytest.approx([1, 11.5, 12.5, 13.5])


def test_response_before_the_timeout_of_a_frozen_host_counts() -> None:
    async def main() -> str:
        host = VirtualHost("a")
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def wait() -> str:
            async with asyncio.timeout(5):
                return await answer

        waiting = host.spawn(wait())
        await asyncio.sleep(1)
        host.freeze()
        await asyncio.sleep(1)
        answer.set_result("came")
        await asyncio.sleep(60)
        host.thaw()
        return await waiting

    assert run_virtual(main()) == "came"


def test_thread_is_rejected() -> None:
    with pytest.raises(RuntimeError, match="thread"):
        run_virtual(asyncio.to_thread(print))


def test_call_returns_its_response_or_raises_its_error() -> None:
    async def main() -> None:
        pair = Pair()
        assert (await pair.announce(7)).offsets_epoch == 7
        refused = await pair.refusal(3)
        assert isinstance(refused, OldEpoch)
        assert isinstance(refused, OldEpoch)
        assert refused.detail == OldEpochDetail(current=5)

    run_virtual(main())


def test_lost_call_ends_at_its_deadline_and_a_closed_port_fails_at_once() -> None:
    async def main() -> None:
        pair, now = Pair(Faults(loss=1)), asyncio.get_running_loop().time
        assert isinstance(await pair.refusal(7), Unreachable)
        assert now() == pytest.approx(5)
        pair.cluster.network.faults = Faults()
        await pair.server.stop(0)
        assert isinstance(await pair.refusal(7), Unreachable)
        assert now() < 5.1
        assert pair.offsets.announced == []

    run_virtual(main())


def test_duplicated_call_is_executed_twice_and_answered_once() -> None:
    async def main() -> None:
        pair = Pair(Faults(duplicate=1))
        assert (await pair.announce(7)).offsets_epoch == 7
        await asyncio.sleep(1)
        assert pair.offsets.announced == [7, 7]

    run_virtual(main())


def test_abandoned_call_is_cancelled_at_the_server() -> None:
    async def main() -> None:
        pair = Pair()
        assert isinstance(await pair.refusal(99, timeout_s=1), Unreachable)
        await asyncio.sleep(1)
        assert pair.offsets.cancelled == 1

    run_virtual(main())


def test_call_to_a_killed_server_fails_at_once_or_at_its_deadline() -> None:
    async def main(noticed: bool) -> float:
        pair = Pair()
        asyncio.get_running_loop().call_later(1, pair.server.crash, noticed)
        assert isinstance(await pair.refusal(99), Unreachable)
        return asyncio.get_running_loop().time()

    assert run_virtual(main(noticed=True)) < 1.1
    assert run_virtual(main(noticed=False)) == pytest.approx(5)


def test_broken_stream_ends_on_both_sides_and_calls_continue() -> None:
    async def main() -> None:
        cluster, loop = SimulatedCluster("streams"), asyncio.get_running_loop()
        client, host = VirtualHost("client"), VirtualHost("server")
        locks = Locks()  # type: ignore[abstract]
        edge = EdgeInterceptor(LoopClock(), CollectorRegistry())
        server = MemoryServer(cluster.network, host, "server:1", edge)
        lockmgr_grpc.add_LockmgrServiceServicer_to_server(locks, server)  # type: ignore[arg-type]
        server.start()
        stub = lockmgr_grpc.LockmgrServiceStub(
            memory_connector(cluster.network, client)("server:1")
        )

        async def read() -> BaseException:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                async for _ in stub.Watch(lockmgr_pb.WatchRequest()):
                    locks.heard += 1
            return from_rpc_error(raised.value)

        async def ask() -> float:
            await stub.List(lockmgr_pb.ListRequest(), timeout=5)
            return loop.time()

        reading, asking = client.spawn(read()), client.spawn(ask())
        await asyncio.sleep(1)
        assert cluster.network.break_streams(client) == 1
        assert isinstance(await reading, Unreachable)
        assert loop.time() == pytest.approx(1, abs=0.1)
        assert (locks.heard, locks.ended) == (1, 1)
        assert await asking > 2

    run_virtual(main())


def session(cluster: SimulatedCluster, name: str) -> MemoryEtcdSession:
    return MemoryEtcdSession(cluster.etcd, VirtualHost(name), LoopClock(), cluster.random(name))


def test_memory_etcd_compares_and_swaps_and_counts_revisions() -> None:
    async def main() -> None:
        etcd = session(SimulatedCluster("etcd"), "a")
        first = await etcd.txn(compare=[Compare("k", mod_revision=0)], put=[Put("k", b"1")])
        assert first is not None
        assert await etcd.txn(compare=[Compare("k", mod_revision=0)], put=[Put("k", b"2")]) is None
        second = await etcd.txn(compare=[Compare("k", mod_revision=first)], put=[Put("k", b"2")])
        stored = await etcd.get("k")
        assert stored is not None
        assert (stored.value, stored.create_revision, stored.mod_revision) == (b"2", first, second)

    run_virtual(main())


def test_key_is_deleted_when_its_lease_expires() -> None:
    async def main() -> None:
        etcd = session(SimulatedCluster("etcd"), "a")
        lease = await etcd.lease(5_000)
        await etcd.put("k", b"1", lease)
        for _ in range(3):
            await asyncio.sleep(4)
            assert await lease.refresh()
        await asyncio.sleep(4.9)
        assert await etcd.get("k") is not None
        await asyncio.sleep(0.2)
        assert await etcd.get("k") is None
        assert not await lease.refresh()

    run_virtual(main())


def test_etcd_call_without_a_response_may_have_been_executed() -> None:
    async def main() -> None:
        cluster = SimulatedCluster("etcd")
        etcd = session(cluster, "a")
        cluster.network.cut.add(("etcd", "a"))
        with pytest.raises(NoQuorum):
            await etcd.put("k", b"1")
        cluster.network.cut.clear()
        assert await etcd.get("k") is not None

    run_virtual(main())


def test_mirror_follows_memory_etcd_through_lost_events() -> None:
    async def main() -> None:
        cluster = SimulatedCluster("etcd")
        etcd = session(cluster, "a")
        mirror = EtcdMirror(etcd, "topics/")
        following = asyncio.get_running_loop().create_task(mirror.run())
        await mirror.ready()
        cluster.network.faults = Faults(loss=0.2, slow=0.2)
        written = 0
        while written < 20:
            try:
                await etcd.put(f"topics/t{written}", b"1")
            except NoQuorum:
                continue
            written += 1
        cluster.network.faults = Faults()
        await asyncio.sleep(30)
        assert sorted(mirror.values) == sorted(f"t{n}" for n in range(20))
        following.cancel()

    run_virtual(main())


def test_election_has_one_winner_at_a_time_on_memory_etcd() -> None:
    async def main() -> list[tuple[str, int]]:
        cluster, led = SimulatedCluster("etcd"), list[tuple[str, int]]()
        hosts = {name: VirtualHost(name) for name in ("a", "b")}
        tasks = []
        for name, host in hosts.items():
            etcd = MemoryEtcdSession(cluster.etcd, host, LoopClock(), cluster.random(name))
            election = Election(etcd, "boss", name)

            async def lead(term: int, name: str = name) -> None:
                led.append((name, term))
                await asyncio.Event().wait()

            tasks.append(host.spawn(election.run(lead)))
        await asyncio.sleep(2)
        first = led[0][0]
        hosts[first].freeze()
        await asyncio.sleep(20)
        hosts[first].thaw()
        await asyncio.sleep(20)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return led

    led = run_virtual(main())
    assert len(led) == 2
    assert led[0][0] != led[1][0]
    assert led[0][1] < led[1][1]


def test_late_write_under_an_expired_lease_does_not_unlist_the_node_permanently() -> None:
    """An abandoned write landed after the successful one, and its key was deleted with its lease.

    The node kept refreshing the other lease, and no process could find it any more.
    """

    async def main() -> None:
        cluster = SimulatedCluster("etcd")
        etcd = session(cluster, "a")
        settings = load(ServiceSettings, "NODE", {"NODE_NODE_ID": "lock-a"})
        runtime = Runtime("lockmgr", settings, etcd)
        runtime.node_entry.set_addresses("lock-a:1", "")
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(runtime.nodes.run())]
        await runtime.node_entry.write(epoch=3)
        tasks.append(loop.create_task(runtime.node_entry.keep()))
        entry = await etcd.get("nodes/lockmgr/lock-a")
        assert entry is not None
        given_up = await etcd.lease(2_000)
        await etcd.put("nodes/lockmgr/lock-a", entry.value, given_up)
        await asyncio.sleep(10)
        stored = await etcd.get("nodes/lockmgr/lock-a")
        assert stored is not None
        assert StoredNode.FromString(stored.value).epoch == 3
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    run_virtual(main())
