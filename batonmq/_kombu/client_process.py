"""The client process of a program with Kombu: `python -m batonmq._kombu.client_process FD`.

It holds the connections to the cluster, so that the program may fork at any time, and may block,
while leases are renewed. It ends when the program ends: the socket between the two is closed then.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from typing import Any

from batonmq._common import timeouts
from batonmq._consumer.held_messages import HeldMessage
from batonmq._kombu.frames import Frame, FrameDecoder, encode_frame
from batonmq._kombu.link_errors import error_text
from batonmq._kombu.link_options import LinkOptions, options_from_json
from batonmq._kombu.queue_administrator import QueueAdministrator
from batonmq._kombu.queue_consumer import ChannelRoom, QueueConsumer
from batonmq._kombu.queue_names import QueueNames
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import Durability, ProducerSettings
from batonmq.admin.admin import Admin
from batonmq.errors import BatonError, Internal, Unreachable

CALLS_MAX = 256
"""Calls of the program that run at once; the socket is not read meanwhile."""
READ_BYTES = 256 * 1024
CLOSE_S = 10.0
LEAVING_S = 3.0
"""How long a channel that closes waits for messages that are requeued or rejected."""
log = logging.getLogger("batonmq.kombu")


class ClientProcess:
    """Carries out the calls of one program.

    Args:
        write: Sends a frame to the program.
    """

    def __init__(
        self,
        options: LinkOptions,
        producer: Producer,
        admin: Admin,
        write: Callable[[dict[str, Any], bytes], None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._options, self._producer, self._write, self._tasks = options, producer, write, tasks
        self._administrator = QueueAdministrator(admin, options)
        self._admin = admin
        self._channels: dict[int, ChannelRoom] = {}
        self._consumers: dict[int, QueueConsumer] = {}
        self._by_tag: dict[int, QueueConsumer] = {}
        self._tags = count(1)
        self._calls = asyncio.Semaphore(CALLS_MAX)
        administrator = self._administrator
        self._handlers: dict[str, Callable[[dict[str, Any], bytes], Awaitable[Any]]] = {
            "open": self._open,
            "send": self._send,
            "consume": self._consume,
            "get": self._get,
            "cancel": self._cancel,
            "close": self._close_channel,
            "declare": lambda fields, _: administrator.declare(_names(fields)),
            "exists": lambda fields, _: administrator.exists(_names(fields)),
            "size": lambda fields, _: administrator.size(_names(fields)),
            "purge": lambda fields, _: administrator.purge(_names(fields)),
            "delete": lambda fields, _: administrator.delete(_names(fields)),
        }

    async def receive(self, frame: Frame) -> None:
        """Start what a frame asks for; wait while too many calls run."""
        fields = frame.fields
        op = fields["op"]
        if op == "limit":
            room = self._room(fields["channel"])
            room.limit = fields["count"] or self._options.unacked_max
            room.wake()
        elif op == "ack":
            self._ack(fields["tag"])
        elif op == "release":
            self._release(fields["tag"])
        else:
            await self._calls.acquire()
            self._tasks.create_task(self._call(op, fields, frame.body))

    async def close(self) -> None:
        """Give up what the program holds, and release all queues."""
        for channel in list(self._channels):
            await self._close_channel({"channel": channel}, b"")

    async def _call(self, op: str, fields: dict[str, Any], body: bytes) -> None:
        answer: dict[str, Any] = {"id": fields.get("id", 0)}
        try:
            if op in ("requeue", "reject"):
                await self._send_away(op, fields)
            else:
                answer["result"] = await self._handlers[op](fields, body)
        except BatonError as error:
            answer["error"] = error_text(error)
            if not answer["id"]:
                log.error("%s failed: %s", op, error)
        except Exception as error:
            log.exception("%s failed", op)
            answer["error"] = error_text(Internal(f"{op} failed: {error!r}"))
        finally:
            self._calls.release()
        if answer["id"]:
            self._write(answer, b"")

    async def _open(self, fields: dict[str, Any], _: bytes) -> None:
        limit_s = self._options.connect_timeout_ms / 1000
        try:
            async with timeouts.timeout(limit_s):
                await self._admin.directory.refresh()
        except TimeoutError:
            raise Unreachable(
                f"no nameserver of {self._options.nameserver} answered in {limit_s:g} s"
            ) from None

    async def _send(self, fields: dict[str, Any], body: bytes) -> None:
        await self._producer.send(
            fields["topic"],
            body,
            tag=fields["tag"],
            keys=fields["keys"],
            properties=fields["properties"],
            deliver_at_unix_ms=fields["at"],
        )

    def _room(self, channel: int) -> ChannelRoom:
        return self._channels.setdefault(channel, ChannelRoom(self._options.unacked_max))

    async def _consume(self, fields: dict[str, Any], _: bytes) -> None:
        room, key = self._room(fields["channel"]), fields["consumer"]

        def deliver(consumer: QueueConsumer, tag: int, held: HeldMessage) -> None:
            message = held.message
            self._by_tag[tag] = consumer
            redelivered = message.redelivered or message.attempts > 1
            self._write(
                {"op": "message", "consumer": key, "tag": tag, "redelivered": redelivered},
                message.body,
            )

        consumer = QueueConsumer(
            names=_names(fields),
            nameserver=self._options.nameserver,
            options=self._options,
            room=room,
            tags=self._tags,
            deliver=deliver,
            lost=lambda _, error: self._write(
                {"op": "lost", "consumer": key, "error": error_text(error)}, b""
            ),
            by_get=fields["by_get"],
        )
        room.consumers[key] = self._consumers[key] = consumer
        self._tasks.create_task(self._run(key, room, consumer))
        await consumer.ready

    async def _run(self, key: int, room: ChannelRoom, consumer: QueueConsumer) -> None:
        try:
            await consumer.run()
        finally:
            room.consumers.pop(key, None)
            self._consumers.pop(key, None)
            for tag in [tag for tag, owner in self._by_tag.items() if owner is consumer]:
                del self._by_tag[tag]

    async def _get(self, fields: dict[str, Any], _: bytes) -> None:
        """Allow one message, or take the allowance back; the message is a frame of its own."""
        consumer = self._consumers.get(fields["consumer"])
        if consumer is not None:
            consumer.credit = fields["credit"]
            consumer.wake()

    async def _cancel(self, fields: dict[str, Any], _: bytes) -> None:
        consumer = self._consumers.get(fields["consumer"])
        if consumer is not None:
            consumer.cancel()
            if not consumer.held:
                await consumer.closed.wait()

    async def _close_channel(self, fields: dict[str, Any], _: bytes) -> None:
        room = self._channels.pop(fields["channel"], None)
        if room is None:
            return
        consumers = list(room.consumers.values())
        for consumer in consumers:
            for tag in consumer.held.keys() - consumer.leaving:
                consumer.give_up(tag)
            consumer.cancel()
        # A message that is given up while it is stored elsewhere would be delivered twice.
        with suppress(TimeoutError):
            async with timeouts.timeout(LEAVING_S):
                for consumer in consumers:
                    await consumer.closed.wait()
        for consumer in consumers:
            for tag in list(consumer.held):
                consumer.give_up(tag)
        for consumer in consumers:
            await consumer.closed.wait()

    def _ack(self, tag: int) -> None:
        consumer = self._by_tag.pop(tag, None)
        committed = None if consumer is None else consumer.finish(tag)
        if committed is not None:
            committed.add_done_callback(_log_lost_ack)

    def _release(self, tag: int) -> None:
        if (consumer := self._by_tag.pop(tag, None)) is not None:
            consumer.give_up(tag)

    async def _send_away(self, op: str, fields: dict[str, Any]) -> None:
        consumer = self._by_tag.get(fields["tag"])
        if consumer is None:
            return
        if op == "requeue":
            await consumer.requeue(fields["tag"])
        else:
            await consumer.reject(fields["tag"], fields["reason"])
        self._by_tag.pop(fields["tag"], None)


def _names(fields: dict[str, Any]) -> QueueNames:
    return QueueNames(fields["queue"], fields["topic"], fields["group"])


def _log_lost_ack(committed: asyncio.Future[None]) -> None:
    error = None if committed.cancelled() else committed.exception()
    if error is not None:
        log.warning("an acknowledgement was lost, the task is delivered again: %s", error)


async def serve(link: socket.socket) -> None:
    """Carry out the calls that arrive at a socket until the program closes it."""
    reader, writer = await asyncio.open_connection(sock=link)
    decoder = FrameDecoder()
    frames: list[Frame] = []
    while not frames:
        data = await reader.read(READ_BYTES)
        if not data:
            return
        frames.extend(decoder.feed(data))
    options = options_from_json(frames.pop(0).body.decode())

    def write(fields: dict[str, Any], body: bytes) -> None:
        if not writer.is_closing():
            writer.write(encode_frame(fields, body))

    settings = ProducerSettings(
        durability=Durability[options.durability],
        delivery_timeout_ms=options.send_timeout_ms,
        security=options.security,
    )
    async with (
        Admin(
            options.nameserver,
            timeout_s=options.connect_timeout_ms / 1000,
            security=options.security,
        ) as admin,
        Producer(options.nameserver, settings) as producer,
        asyncio.TaskGroup() as tasks,
    ):
        process = ClientProcess(options, producer, admin, write, tasks)
        try:
            while True:
                for frame in frames:
                    await process.receive(frame)
                data = await reader.read(READ_BYTES)
                if not data:
                    break
                frames = list(decoder.feed(data))
        except ConnectionError as error:
            log.info("the program has gone: %s", error)
        async with timeouts.timeout(CLOSE_S):
            await process.close()


def main() -> None:
    """Run until the program that started this process has gone."""
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s batonmq.kombu: %(message)s"
    )
    # The program decides when to end; Ctrl-C and a supervisor may signal all processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
