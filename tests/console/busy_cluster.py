"""A cluster in memory where something happens: messages, members, a stuck group, dead letters."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from uvicorn import Server

from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq.errors import BatonError
from batonmq_server.console.app import WebConsole, make_console
from batonmq_server.console.config import ConsoleSettings
from batonmq_server.console.server import server_config
from batonmq_server.testing import MemoryBroker
from tests.support.conditions import until

SERVICES = ("storage", "offsets", "lockmgr", "nameserver")


@dataclass(slots=True)
class BusyCluster:
    """A broker, a console that is served on a port, and its members."""

    broker: MemoryBroker
    web: WebConsole
    url: str
    server: Server
    stopped: asyncio.Event
    tasks: asyncio.TaskGroup

    async def member(
        self,
        group: str,
        topic: str,
        client_id: str,
        *,
        how: str = "handle",
        life_s: float | None = None,
    ) -> None:
        """Run a consumer until the end, or for a time.

        Args:
            how: `handle`, `hang` or `fail`: what its handler does.
        """

        async def handle(message: ReceivedMessage) -> None:
            if how == "hang":
                await self.stopped.wait()
            if how == "fail":
                raise ValueError(f"no account for key {message.keys[0]}")
            await asyncio.sleep(0.01)

        settings = ConsumerSettings(
            consume_from="first", send_back=how == "fail", retries_max=0, commit_interval_ms=50
        )
        expression = "*" if how != "hang" else "paid"
        async with (
            self.broker.consumer(
                group, {topic: expression}, settings if how == "fail" else None, client_id=client_id
            ) as consumer,
            asyncio.TaskGroup() as running,
        ):
            running.create_task(consumer.run(handle))
            try:
                async with asyncio.timeout(life_s):
                    await self.stopped.wait()
            except TimeoutError:
                pass
            consumer.stop()

    async def fill(self) -> None:
        """Send messages, and start members until one group is stuck and one has dead letters."""
        for topic, count in (("orders", 4), ("payments", 2), ("audit-log", 2)):
            await self.broker.create_topic(topic, count)
        async with self.broker.producer() as producer:
            for number in range(60):
                body = {"id": number, "customer": f"c-{number % 7}", "total": number * 1.5}
                await producer.send(
                    "orders", json.dumps(body).encode(), tag="paid" if number % 3 else "open",
                    keys=[f"order-{number}"], properties={"total": str(number)},
                )  # fmt: skip
            for number in range(3):
                await producer.send("payments", b"payment %d" % number, keys=[f"pay-{number}"])
            await producer.send("audit-log", bytes(range(96)), keys=["binary"])
        for group, topic, client_id, how in (
            ("billing", "orders", "billing-1", "handle"),
            ("billing", "orders", "billing-2", "handle"),
            ("warehouse", "orders", "warehouse-1", "hang"),
            ("settlement", "payments", "settlement-1", "fail"),
        ):
            self.tasks.create_task(self.member(group, topic, client_id, how=how))
        async with self.broker.admin() as admin:

            async def is_ready() -> bool:
                try:
                    topics = {topic.name for topic in await admin.list_topics()}
                    groups = {group.name for group in await admin.list_groups()}
                except BatonError:  # a busy machine
                    return False
                return "%DLQ%settlement" in topics and "warehouse" in groups

            await until(is_ready)


@asynccontextmanager
async def busy_cluster(**settings: object) -> AsyncIterator[BusyCluster]:
    """Start a cluster in memory, and a console on a free port; stop all members at the end."""
    streams = {service: {"metrics_stream": True} for service in SERVICES}
    async with MemoryBroker(broker_count=2, settings=streams) as broker:
        values: dict[str, object] = {
            "nameserver": broker.nameserver, "changes": True, "refresh_ms": 500, **settings
        }  # fmt: skip
        config = ConsoleSettings.model_validate(values)
        web = make_console(config, broker.environment)
        async with served(web, config) as (url, server), asyncio.TaskGroup() as tasks:
            cluster = BusyCluster(broker, web, url, server, asyncio.Event(), tasks)
            try:
                yield cluster
            finally:
                cluster.stopped.set()


@asynccontextmanager
async def served(web: WebConsole, config: ConsoleSettings) -> AsyncIterator[tuple[str, Server]]:
    """Serve a console on a free port; yield its address and its server."""
    server = Server(server_config(web.application(), config))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve([listener]))
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
            finally:
                server.should_exit = server.force_exit = True
