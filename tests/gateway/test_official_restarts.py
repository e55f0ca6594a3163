"""Goal: restarts in mid-run cost the application of an official client neither message nor ack.

Gateway, storage leader and offsets leader end while an official client sends and consumes: no
message whose send was answered is lost, and none whose acknowledgement was answered comes again.
Method: producer and consumer are processes of their own, which write each event as it happens; the
test keeps a ledger for each language. One round of restarts by default; BATON_CLIENT_RESTARTS asks
for more, in which every process ends by SIGKILL, and by SIGTERM, in turn.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from batonmq import Admin
from batonmq.errors import BatonError
from batonmq_server.local.cluster import LocalCluster
from tests.gateway.official_clients import (
    COMPILE_S,
    LANGUAGES,
    MORE,
    OfficialClient,
    official_client,
)
from tests.support.cluster import local_cluster
from tests.support.conditions import until

ROUNDS = int(os.environ.get("BATON_CLIENT_RESTARTS", "1"))  # noqa: TID251  a run by hand
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240 + 240 * ROUNDS + COMPILE_S)]
QUEUES = 4
TOGETHER = (LANGUAGES, *((language,) for language in MORE))
"""Languages whose clients share a cluster, and so its restarts: those of every run do."""
LEADERS = ("gateway", "storage", "offsets")
MORE_ACKS = 20
"""Acknowledgements before the next restart: the clients work again."""
WAIT_S = 120


@dataclass
class Ledger:
    """What the clients have written, by body.

    Attributes:
        failed: Messages whose send ended with an error; they may be stored or not.
        unsure: Messages with an acknowledgement that ended with an error.
        again: Messages that came after their acknowledgement had been answered.
    """

    sent: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    deliveries: Counter[str] = field(default_factory=Counter)
    acknowledged: set[str] = field(default_factory=set)
    unsure: set[str] = field(default_factory=set)
    again: list[str] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)

    def note(self, event: Mapping[str, Any]) -> None:
        if (body := event.get("received")) is not None:
            self.deliveries[body] += 1
            if body in self.acknowledged:
                self.again.append(body)
        for name in ("sent", "failed", "acknowledged", "unsure"):
            if (body := event.get(name)) is not None:
                getattr(self, name).add(body)


@asynccontextmanager
async def running(
    client: OfficialClient, task: Mapping[str, Any], ledger: Ledger
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a client whose events the ledger gets; close its standard input to end it."""
    process = await asyncio.create_subprocess_exec(
        *client.command,
        json.dumps(task),
        env=client.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )

    async def read() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            ledger.note(json.loads(line))
        ledger.ended.add(task["op"])

    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(read())
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            await reading


async def end(cluster: LocalCluster, name: str, *, killed: bool) -> None:
    """End a process and wait until it serves again."""
    if killed:
        await cluster.kill(name)
        await cluster.serving(name)
    else:
        await cluster.restart(name)


@dataclass
class Application:
    """A producer and a consumer of one language, with a topic and a group of their own.

    Attributes:
        wanted: Number of acknowledgements that it waits for.
    """

    language: str
    ledger: Ledger
    producer: asyncio.subprocess.Process
    consumer: asyncio.subprocess.Process
    wanted: int = 0

    async def works(self) -> None:
        """Wait for further acknowledgements."""
        self.wanted = len(self.ledger.acknowledged) + MORE_ACKS
        await until(self._is_there, WAIT_S)

    def _is_there(self) -> bool:
        return len(self.ledger.acknowledged) >= self.wanted

    async def ends(self, admin: Admin) -> None:
        """End the producer, and the consumer once everything sent is acknowledged, durably."""
        assert self.producer.stdin is not None
        assert self.consumer.stdin is not None
        ledger = self.ledger
        self.producer.stdin.close()
        await until(lambda: "send_on" in ledger.ended, WAIT_S)
        await until(lambda: ledger.sent <= ledger.acknowledged | ledger.unsure, WAIT_S)
        await until(partial(is_done, admin, group_of(self.language)), WAIT_S)
        self.consumer.stdin.close()
        await until(lambda: "consume_on" in ledger.ended, WAIT_S)

    def check(self) -> None:
        one = self.ledger
        print(
            f"{self.language}: {len(one.sent):,} sent, {len(one.failed)} sends failed, "
            f"{len(one.acknowledged):,} acknowledged, {len(one.unsure)} unsure, "
            f"{sum(one.deliveries.values()) - len(one.deliveries)} delivered again"
        )
        assert one.again == [], f"{self.language}: an acknowledged message came again"
        assert one.sent <= set(one.deliveries), f"{self.language}: a message is lost"
        assert set(one.deliveries) <= one.sent | one.failed


@asynccontextmanager
async def application(
    client: OfficialClient, cluster: LocalCluster, admin: Admin
) -> AsyncIterator[Application]:
    """Run the two programs of a language."""
    language, ledger = client.language, Ledger()
    await admin.create_topic(language, QUEUES)
    task = {"endpoints": cluster.addresses["gateway"], "topic": language}
    consume = task | {"op": "consume_on", "group": group_of(language), "invisible_s": 10}
    produce = task | {"op": "send_on", "pause_s": 0.05}
    async with (
        running(client, consume, ledger) as consumer,
        running(client, produce, ledger) as producer,
    ):
        yield Application(language, ledger, producer, consumer)


def group_of(language: str) -> str:
    return f"{language}-billing"


async def is_done(admin: Admin, group: str) -> bool:
    """Whether the group has an acknowledgement of every stored message, durably."""
    try:
        queues = (await admin.group_progress(group)).queues
    except BatonError:
        return False
    return bool(queues) and all(queue.lag == 0 for queue in queues)


@pytest.mark.long
@pytest.mark.parametrize("languages", TOGETHER, ids="-".join)
async def test_official_client_keeps_every_message_through_restarts(
    tmp_path: Path, languages: Sequence[str]
) -> None:
    clients = [official_client(language) for language in languages]
    async with (
        local_cluster(tmp_path, gateways=1) as cluster,
        Admin(cluster.nameserver) as admin,
        AsyncExitStack() as stack,
    ):
        programs = [
            await stack.enter_async_context(application(client, cluster, admin))
            for client in clients
        ]
        for number in range(ROUNDS * len(LEADERS)):
            for each in programs:
                await each.works()
            turn, which = divmod(number, len(LEADERS))
            await end(cluster, LEADERS[which], killed=turn % 2 == 0)
        for each in programs:
            await each.works()
        for each in programs:
            await each.ends(admin)
    for each in programs:
        each.check()
