"""The streams by which storage nodes deliver messages to a consumer: one per node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

import grpc.aio

from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common import timeouts
from batonmq._common.aio import unless
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._connection.directory import Directory
from batonmq.errors import BatonError, Unreachable

COMMANDS_MAX = 10_000
"""Commands of one request, at most."""
SILENCE_S_MAX = 12.0
"""A stream that brings nothing for so long is given up: a node sends something every 5 s."""
Call = grpc.aio.StreamStreamCall[pb.DeliverRequest, pb.DeliverResponse]
OnFrame = Callable[[pb.DeliveryFrame], None]
OnEnd = Callable[[BatonError], None]


@dataclass(frozen=True, slots=True, eq=False)
class OpenDelivery:
    """One queue that a node delivers.

    Attributes:
        on_frame: Called with each frame of messages, in order.
        on_end: Called with the error that has ended the delivery, or its stream.
    """

    delivery_id: int
    on_frame: OnFrame
    on_end: OnEnd


class DeliveryStream:
    """The stream to one node. Commands of one turn of the event loop leave together.

    Args:
        open_call: Opens the call.
        on_end: Called when no more deliveries may begin.
    """

    def __init__(self, open_call: Callable[[], Call], on_end: Callable[[], None]) -> None:
        self._open_call, self._on_end = open_call, on_end
        self._deliveries: dict[int, OpenDelivery] = {}
        self._commands: list[pb.DeliveryCommand] = []
        self._pending, self._unused = asyncio.Event(), asyncio.Event()
        self._last_id = 0

    def start(self, start: pb.DeliveryStart, on_frame: OnFrame, on_end: OnEnd) -> OpenDelivery:
        """Begin a delivery; see `OpenDelivery`."""
        self._last_id += 1
        delivery = OpenDelivery(self._last_id, on_frame, on_end)
        self._deliveries[delivery.delivery_id] = delivery
        self._send(pb.DeliveryCommand(delivery_id=delivery.delivery_id, start=start))
        return delivery

    def raise_credit(self, delivery: OpenDelivery, credit: pb.DeliveryCredit) -> None:
        """Raise the credit of a delivery; without effect if it has ended."""
        self._send(pb.DeliveryCommand(delivery_id=delivery.delivery_id, credit=credit))

    def stop(self, delivery: OpenDelivery) -> None:
        """End a delivery: frames that still arrive are dropped."""
        if self._deliveries.pop(delivery.delivery_id, None) is not None:
            stop = pb.DeliveryStop()
            self._send(pb.DeliveryCommand(delivery_id=delivery.delivery_id, stop=stop))
            self._end_if_unused()

    async def run(self) -> None:
        """Exchange commands and frames until the stream breaks, or has no delivery left."""
        call = self._open_call()
        try:
            error = await unless(self._unused, self._exchange(call))
        finally:
            call.cancel()
            self._end()
        deliveries, self._deliveries = self._deliveries, {}
        for delivery in deliveries.values():
            delivery.on_end(error or Unreachable("the storage node ended the stream of deliveries"))

    async def _exchange(self, call: Call) -> BatonError | None:
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(self._write(call))
            try:
                async with timeouts.timeout(SILENCE_S_MAX) as silence:
                    async for response in call:
                        silence.reschedule(asyncio.get_running_loop().time() + SILENCE_S_MAX)
                        for frame in response.frames:
                            self._dispatch(frame)
            except grpc.aio.AioRpcError as error:
                return from_rpc_error(error)
            except TimeoutError:
                return Unreachable(f"the storage node was silent for {SILENCE_S_MAX:.0f} s")
            finally:
                writing.cancel()
        return None

    async def _write(self, call: Call) -> None:
        try:
            while True:
                await self._pending.wait()
                self._pending.clear()
                commands, self._commands = self._commands, []
                for begin in range(0, len(commands), COMMANDS_MAX):
                    part = commands[begin : begin + COMMANDS_MAX]
                    await call.write(pb.DeliverRequest(commands=part))
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            return  # reading the call shows why it has ended

    def _send(self, command: pb.DeliveryCommand) -> None:
        self._commands.append(command)
        self._pending.set()

    def _dispatch(self, frame: pb.DeliveryFrame) -> None:
        delivery = self._deliveries.get(frame.delivery_id)
        if delivery is None:
            return
        if frame.HasField("error"):
            del self._deliveries[frame.delivery_id]
            delivery.on_end(error_from_pb(frame.error))
            self._end_if_unused()
        else:
            delivery.on_frame(frame)

    def _end_if_unused(self) -> None:
        if not self._deliveries:
            self._unused.set()
            self._end()

    def _end(self) -> None:
        self._on_end()
        self._on_end = lambda: None


class DeliveryStreams:
    """The streams of one consumer; each opens with its first delivery.

    Args:
        spawn: Runs a task until the consumer is closed.
    """

    def __init__(
        self, directory: Directory, spawn: Callable[[Coroutine[object, object, None]], None]
    ) -> None:
        self._directory, self._spawn = directory, spawn
        self._by_address: dict[str, DeliveryStream] = {}

    async def of(self, broker: str, node_id: str) -> DeliveryStream:
        """Return the stream to a node of a broker; to the leader if the node is unknown.

        Begin a delivery on it before anything else is waited for.

        Raises:
            Unreachable: The broker is not registered, or no nameserver responds.
        """
        address = await self._directory.reader_address(broker, node_id)
        stream = self._by_address.get(address)
        if stream is None:
            stub = self._directory.storage_at(address)
            stream = DeliveryStream(stub.Deliver, lambda: self._remove(address))
            self._by_address[address] = stream
            self._spawn(stream.run())
        return stream

    def _remove(self, address: str) -> None:
        self._by_address.pop(address, None)
