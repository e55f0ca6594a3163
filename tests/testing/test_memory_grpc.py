"""Streams of requests on the in-memory network.

Goal: a call with streams in both directions behaves as in gRPC: messages arrive in order and once;
a lost message, a cut or a crash breaks the stream at both ends; and a handler does not outlive its
client.
Method: a servicer of `Deliver` that answers each request with its number, in virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2_grpc as pb_grpc
from batonmq._common.rpc import from_rpc_error
from batonmq.errors import BatonError, InvalidArgument, NotServing, Unreachable
from batonmq_server.runtime.interceptor import EdgeInterceptor
from batonmq_server.testing.memory_grpc import DuplexCall, MemoryServer, memory_connector
from batonmq_server.testing.memory_network import Faults, MemoryCall
from batonmq_server.testing.processes import LoopClock, MemoryEnvironment
from batonmq_server.testing.virtual_time import VirtualHost, run_virtual

BAD, LAST, SILENT = 1_000, 1_001, 1_002
"""Deliveries that the servicer rejects; after which it ends the stream; and does not answer."""


class Echo(pb_grpc.StorageServiceServicer):
    """Answers each request with the number of its delivery."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.half_closed = self.ended = 0

    async def Deliver(
        self, requests: AsyncIterator[pb.DeliverRequest], context: object
    ) -> AsyncIterator[pb.DeliverResponse]:
        try:
            async for request in requests:
                number = request.commands[0].delivery_id
                self.read.append(number)
                if number == BAD:
                    raise InvalidArgument("a bad delivery")
                if number == LAST:
                    return
                if number != SILENT:
                    yield pb.DeliverResponse(frames=[pb.DeliveryFrame(delivery_id=number)])
            self.half_closed += 1
        finally:
            self.ended += 1


class Recorder(MemoryEnvironment):
    """Records what an observer is told, by number of the call."""

    def __init__(self) -> None:
        super().__init__("duplex")
        self.seen: list[tuple[str, int, Any, Any]] = []

    def called(self, call: MemoryCall, request: Any) -> None:
        self.seen.append(("called", call.number, _number(request), None))

    def answered(self, call: MemoryCall, request: Any, answer: Any) -> None:
        self.seen.append(("answered", call.number, _number(request), _number(answer)))

    def told(self, call: MemoryCall, answer: Any) -> None:
        self.seen.append(("told", call.number, None, _number(answer)))


def _number(message: Any) -> Any:
    match message:
        case pb.DeliverRequest():
            return message.commands[0].delivery_id
        case pb.DeliverResponse():
            return message.frames[0].delivery_id
        case grpc.aio.AioRpcError():
            return type(from_rpc_error(message))
        case BatonError():
            return type(message)
    return message


class Pair:
    """A client and a server on a network of their own."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.observed = Recorder()
        self.network = self.observed.network
        self.network.faults = faults or Faults()
        self.echo = Echo()  # type: ignore[abstract]
        self.client = VirtualHost("client")
        self.edge = EdgeInterceptor(LoopClock(), CollectorRegistry())
        self.server = self.serve(self.echo, self.edge)

    def serve(self, echo: Echo, edge: EdgeInterceptor) -> MemoryServer:
        """Start a server at the address."""
        server = MemoryServer(self.network, VirtualHost("server"), "server:1", edge)
        pb_grpc.add_StorageServiceServicer_to_server(echo, server)  # type: ignore[arg-type]
        server.start()
        return server

    def kill_server(self, *, noticed: bool) -> None:
        """Kill the server at once, as `SimulatedService.kill`."""
        self.server.crash(noticed)
        self.server.host.freeze()
        self.network.crash(self.server.host)

    def deliver(self, timeout_s: float | None = None) -> DuplexCall:
        """Start a call."""
        channel = memory_connector(self.network, self.client)("server:1")
        stub: Any = pb_grpc.StorageServiceStub(channel)
        call: DuplexCall = stub.Deliver(timeout=timeout_s)
        return call


def request(number: int) -> pb.DeliverRequest:
    return pb.DeliverRequest(commands=[pb.DeliveryCommand(delivery_id=number)])


async def numbers(call: DuplexCall) -> list[int]:
    """Return the numbers of all answers until the stream ends."""
    return [answer.frames[0].delivery_id async for answer in call]


async def refusal(call: DuplexCall) -> BatonError:
    """Return the error of a stream that ends with one."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await numbers(call)
    return from_rpc_error(raised.value)


def in_virtual_time(test: Callable[[Pair], Awaitable[None]], faults: Faults | None = None) -> None:
    async def main() -> None:
        pair = Pair(faults)
        hosts = [pair.client, pair.server.host]
        try:
            await test(pair)
        finally:
            for host in hosts:
                host.thaw()  # tasks of a frozen host can't end

    run_virtual(main())


def test_requests_arrive_once_and_in_order_and_so_do_responses() -> None:
    async def main(pair: Pair) -> None:
        call = pair.deliver()
        for number in range(50):
            await call.write(request(number))
        await call.done_writing()
        assert await numbers(call) == pair.echo.read == list(range(50))
        assert (pair.echo.half_closed, pair.echo.ended) == (1, 1)

    in_virtual_time(main, Faults(slow=0.5, duplicate=1))


def test_stream_without_a_deadline_stays_open_until_it_is_cancelled() -> None:
    async def main(pair: Pair) -> None:
        call = pair.deliver()
        reading = pair.client.spawn(numbers(call))
        await asyncio.sleep(3_600)
        await call.write(request(1))
        await asyncio.sleep(1)
        assert (pair.echo.read, pair.echo.ended) == ([1], 0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await asyncio.sleep(1)
        assert (pair.echo.half_closed, pair.echo.ended) == (0, 1)
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(request(2))

    in_virtual_time(main)


def test_stream_with_a_deadline_ends_at_both_ends() -> None:
    async def main(pair: Pair) -> None:
        call = pair.deliver(timeout_s=5)
        await call.write(request(1))
        assert isinstance(await refusal(call), Unreachable)
        await asyncio.sleep(1)
        assert pair.echo.ended == 1
        assert asyncio.get_running_loop().time() == pytest.approx(6)

    in_virtual_time(main)


def test_client_reads_the_error_of_the_servicer_and_can_write_no_more() -> None:
    async def main(pair: Pair) -> None:
        call = pair.deliver()
        await call.write(request(BAD))
        assert isinstance(await refusal(call), InvalidArgument)
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(request(2))

    in_virtual_time(main)


def test_client_can_not_write_after_the_error_has_arrived_unread() -> None:
    async def main(pair: Pair) -> None:
        call = pair.deliver()
        await call.write(request(BAD))
        await asyncio.sleep(1)
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(request(2))
        assert isinstance(await refusal(call), InvalidArgument)

    in_virtual_time(main)


def test_servicer_can_end_a_stream_before_its_client_does() -> None:
    async def main(pair: Pair) -> None:
        call = pair.deliver()
        for number in (1, LAST, 2):
            await call.write(request(number))
        assert await numbers(call) == [1]
        assert pair.echo.read == [1, LAST]

    in_virtual_time(main)


def test_client_can_not_write_after_done_writing() -> None:
    async def main(pair: Pair) -> None:
        call = pair.deliver()
        await call.done_writing()
        await call.done_writing()
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(request(1))
        assert await numbers(call) == []

    in_virtual_time(main)


def test_two_tasks_can_not_write_at_the_same_time() -> None:
    async def main(pair: Pair) -> None:
        call = pair.deliver()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(call.write(request(1)))
            await asyncio.sleep(0)
            with pytest.raises(AssertionError):
                await call.write(request(2))

    in_virtual_time(main)


@pytest.mark.parametrize("by", ["loss", "cut"])
@pytest.mark.parametrize("number", [1, SILENT])
def test_lost_message_breaks_the_stream_at_both_ends(by: str, number: int) -> None:
    async def main(pair: Pair) -> None:
        call = pair.deliver()
        await call.write(request(0))
        await asyncio.sleep(1)
        if by == "loss":
            pair.network.faults = Faults(loss=1)
        else:
            pair.network.cut.add(("client", "server"))
        await call.write(request(number))
        pair.network.faults = Faults()
        pair.network.cut.clear()
        assert isinstance(await refusal(call), Unreachable)
        assert asyncio.get_running_loop().time() < 2
        await asyncio.sleep(1)
        assert (pair.echo.read, pair.echo.ended) == ([0], 1)

    in_virtual_time(main)


def test_lost_response_breaks_the_stream_at_both_ends() -> None:
    async def main(pair: Pair) -> None:
        pair.network.cut.add(("server", "client"))
        call = pair.deliver()
        await call.write(request(1))
        assert isinstance(await refusal(call), Unreachable)
        await asyncio.sleep(1)
        assert (pair.echo.read, pair.echo.ended) == ([1], 1)

    in_virtual_time(main)


def test_stream_that_does_not_arrive_fails_at_its_client() -> None:
    async def main(pair: Pair) -> None:
        pair.network.cut.add(("client", "server"))
        assert isinstance(await refusal(pair.deliver()), Unreachable)
        pair.network.cut.clear()
        await pair.server.stop(0)
        assert isinstance(await refusal(pair.deliver()), Unreachable)
        assert pair.echo.ended == 0

    in_virtual_time(main)


def test_broken_streams_end_at_both_ends() -> None:
    async def main(pair: Pair) -> None:
        call = pair.deliver()
        await call.write(request(SILENT))
        await asyncio.sleep(1)
        assert pair.network.break_streams(pair.client) == 1
        assert isinstance(await refusal(call), Unreachable)
        await asyncio.sleep(1)
        assert (pair.echo.half_closed, pair.echo.ended) == (0, 1)

    in_virtual_time(main)


@pytest.mark.parametrize("loss", [0, 1])
@pytest.mark.parametrize("how", ["cancel", "crash"])
def test_handler_ends_with_its_client(how: str, loss: float) -> None:
    async def main(pair: Pair) -> None:
        call = pair.deliver()
        await call.write(request(1))
        await asyncio.sleep(1)
        pair.network.faults = Faults(loss=loss)
        if how == "cancel":
            call.cancel()
        else:
            pair.network.crash(pair.client)
        await asyncio.sleep(1)
        assert pair.echo.ended == 1

    in_virtual_time(main)


@pytest.mark.parametrize("how", ["cancel", "crash"])
def test_handler_does_not_start_after_a_cancellation_that_follows_the_call(how: str) -> None:
    async def main(pair: Pair) -> None:
        pair.server.host.freeze()
        call = pair.deliver()
        await call.write(request(1))
        if how == "cancel":
            call.cancel()
        else:
            pair.network.crash(pair.client)
        await asyncio.sleep(60)
        pair.server.host.thaw()
        await asyncio.sleep(60)
        assert pair.echo.half_closed == 0
        assert len(pair.echo.read) == pair.echo.ended

    in_virtual_time(main)


def test_frozen_server_reads_the_requests_after_it_is_thawed() -> None:
    async def main(pair: Pair) -> None:
        call = pair.deliver()
        await call.write(request(1))
        await asyncio.sleep(1)
        pair.server.host.freeze()
        await call.write(request(2))
        await asyncio.sleep(60)
        assert pair.echo.read == [1]
        pair.server.host.thaw()
        await call.done_writing()
        assert await numbers(call) == [1, 2]

    in_virtual_time(main)


def test_crash_of_the_server_is_noticed_at_once() -> None:
    async def main(pair: Pair) -> None:
        call = pair.deliver()
        await call.write(request(SILENT))
        await asyncio.sleep(1)
        pair.kill_server(noticed=True)
        assert isinstance(await refusal(call), Unreachable)
        assert asyncio.get_running_loop().time() < 2

    in_virtual_time(main)


def test_machine_that_is_gone_is_noticed_by_pings() -> None:
    async def main(pair: Pair) -> None:
        call = pair.deliver()
        await call.write(request(SILENT))
        await asyncio.sleep(1)
        pair.kill_server(noticed=False)
        reading = pair.client.spawn(refusal(call))
        await asyncio.sleep(4)
        assert not reading.done()
        await asyncio.sleep(1)
        assert isinstance(await reading, Unreachable)

    in_virtual_time(main)


def test_unnoticed_crash_is_noticed_by_a_request_once_the_machine_runs_again() -> None:
    async def main(pair: Pair) -> None:
        call = pair.deliver()
        await call.write(request(SILENT))
        await asyncio.sleep(1)
        pair.kill_server(noticed=False)
        reading = pair.client.spawn(refusal(call))
        await call.write(request(1))
        await asyncio.sleep(1)
        assert not reading.done()
        again = Echo()  # type: ignore[abstract]
        pair.serve(again, EdgeInterceptor(LoopClock(), CollectorRegistry()))
        await asyncio.sleep(1)
        assert not reading.done()
        await call.write(request(2))
        assert isinstance(await reading, Unreachable)
        assert (again.read, again.ended) == ([], 0), "the new process does not have the old call"

    in_virtual_time(main)


def test_drain_ends_a_stream_and_refuses_the_next_one() -> None:
    async def main(pair: Pair) -> None:
        call = pair.deliver()
        await call.write(request(1))
        await asyncio.sleep(1)
        pair.edge.drain()
        assert isinstance(await refusal(call), NotServing)
        assert isinstance(await refusal(pair.deliver()), NotServing)
        assert pair.echo.ended == 1

    in_virtual_time(main)


def test_observer_sees_each_request_and_each_response() -> None:
    async def main(pair: Pair) -> None:
        call = pair.deliver()
        for number in (1, BAD):
            await call.write(request(number))
            await asyncio.sleep(1)
        assert isinstance(await refusal(call), InvalidArgument)
        assert pair.observed.seen == [
            ("called", 1, 1, None),
            ("answered", 1, 1, 1),
            ("called", 1, BAD, None),
            ("answered", 1, BAD, InvalidArgument),
            ("told", 1, None, 1),
            ("told", 1, None, InvalidArgument),
        ]
        pair.edge.drain()
        await refusal(pair.deliver())
        assert pair.observed.seen[-2:] == [
            ("answered", 2, None, NotServing),
            ("told", 2, None, NotServing),
        ]

    in_virtual_time(main)
