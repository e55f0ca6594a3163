"""A broker that does nothing: it passes what comes on one stream of gRPC on to another one.

It is the reference of `bench.trickle`: it makes the same messages travel by the same library, with
a receipt for the producer and an acknowledgement by the consumer. Messages that come while another
one is written travel together. There is no log, no sync, no record of the delivery, no protobuf and
no client library. So a broker on `grpc.aio` can hardly do less.

    python -m bench.relay serve | consume PORT COUNT | produce PORT RATE COUNT
"""

from __future__ import annotations

import asyncio
import struct
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from time import monotonic, process_time
from typing import Any

import grpc
import grpc.aio

from batonmq._connection.channels import OPTIONS
from bench.measured_process import say, ticks, wait_for_go

Stream = grpc.aio.StreamStreamMultiCallable[bytes, bytes]
RECORD_BYTES = 100
RECEIPT, ACK = bytes(16), bytes(40)
WARM_UP_S = 2.0
_SENT = struct.Struct(">d")
_SERVICE = "bench.Relay"


class _Waiting:
    """Messages that leave together as soon as the stream takes them."""

    def __init__(self) -> None:
        self._messages: list[bytes] = []
        self._arrived = asyncio.Event()

    def add(self, messages: bytes) -> None:
        self._messages.append(messages)
        self._arrived.set()

    async def take(self) -> bytes:
        await self._arrived.wait()
        self._arrived.clear()
        taken, self._messages = b"".join(self._messages), []
        return taken


class _Relay:
    """Two streams, one for a producer and one for a consumer. Messages are bytes as they are."""

    def __init__(self) -> None:
        self._waiting = _Waiting()

    async def send(self, messages: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        async for message in messages:
            self._waiting.add(message)
            yield RECEIPT * (len(message) // RECORD_BYTES)

    async def deliver(self, acks: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        async def read() -> None:
            async for _ in acks:
                pass

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            yield b""
            while True:
                yield await self._waiting.take()


async def _serve() -> None:
    server, relay_ = grpc.aio.server(options=OPTIONS), _Relay()
    methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Send": grpc.stream_stream_rpc_method_handler(relay_.send),
        "Deliver": grpc.stream_stream_rpc_method_handler(relay_.deliver),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    say("serves", port=port)
    await server.wait_for_termination()


async def _consume(port: str, count: str) -> None:
    delays_ms: list[float] = []
    begin_s = 0.0
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        deliver: Stream = channel.stream_stream(f"/{_SERVICE}/Deliver")
        call = deliver()
        await call.read()
        say("ready")
        while len(delays_ms) < int(count):
            messages = await call.read()
            assert isinstance(messages, bytes), "the relay has ended the stream"
            if not delays_ms:
                begin_s = process_time()
            now_s = monotonic()
            sent_s = (
                _SENT.unpack_from(messages, at)[0] for at in range(0, len(messages), RECORD_BYTES)
            )
            delays_ms += [1_000 * (now_s - each) for each in sent_s]
            await call.write(ACK)
        say("done", cpu_s=process_time() - begin_s, delays_ms=delays_ms)


async def _produce(port: str, rate: str, count: str) -> None:
    padding = bytes(RECORD_BYTES - _SENT.size)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        send: Stream = channel.stream_stream(f"/{_SERVICE}/Send")
        call = send()

        waiting = _Waiting()

        async def write() -> None:
            while True:
                await call.write(await waiting.take())

        async def send_each() -> None:
            async for now_s in ticks(int(rate), int(count)):
                waiting.add(_SENT.pack(now_s) + padding)

        say("ready")
        await wait_for_go()
        await asyncio.sleep(WARM_UP_S)
        begin_s, receipts = process_time(), 0
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(write())
            tasks.create_task(send_each())
            while receipts < int(count):
                received = await call.read()
                assert isinstance(received, bytes), "the relay has ended the stream"
                receipts += len(received) // len(RECEIPT)
            writing.cancel()
        say("done", cpu_s=process_time() - begin_s)


if __name__ == "__main__":
    commands: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {
        "serve": _serve,
        "consume": _consume,
        "produce": _produce,
    }
    asyncio.run(commands[sys.argv[1]](*sys.argv[2:]))
