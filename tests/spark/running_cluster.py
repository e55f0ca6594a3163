"""A local cluster for blocking tests; it runs in an event loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from batonmq._core.queues import QueueRef
from batonmq._core.records import Message
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq.admin.admin import Admin
from batonmq_server.local.cluster import LocalCluster
from batonspark.cluster import LoopThread
from tests.support.cluster import local_cluster

T = TypeVar("T")
START_S = 60
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Reduces the threads of the JVM: no optimizing compiler, no parallel garbage collector."""
TEST_CONFIG = {
    "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
}
"""The session starts sooner and runs at half speed: no code is compiled for the few rows."""


class RunningCluster:
    """A local cluster as a context manager; see `local_cluster` for its arguments."""

    def __init__(self, data_dir: Path, **options: Any) -> None:
        self._data_dir, self._options = data_dir, options
        self._thread = LoopThread()
        self._running: Future[None] | None = None

    def __enter__(self) -> Self:
        self._thread.__enter__()
        self.processes = self.call(self._begin())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.call(self._end())
        finally:
            self._thread.__exit__(kind, error, trace)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the event loop of the cluster; return its result."""
        return self._thread.call(work)

    @property
    def nameserver(self) -> str:
        return self.processes.nameserver

    def create(self, topic: str, queue_count: int = 2) -> str:
        """Create a topic; return its name."""

        async def create() -> None:
            async with Admin(self.nameserver, timeout_s=START_S) as admin:
                await admin.create_topic(topic, queue_count)

        self.call(create())
        return topic

    def send(
        self,
        topic: str,
        messages: Sequence[Message],
        settings: ProducerSettings | None = None,
        queue: QueueRef | None = None,
    ) -> None:
        """Store messages in `queue`, or in queues that the producer chooses: one may get all."""

        async def send() -> None:
            async with Producer(self.nameserver, settings) as producer:
                outcomes = [
                    await producer.submit(topic, message, queue=queue) for message in messages
                ]
                for outcome in outcomes:
                    await outcome

        self.call(send())

    def send_numbers(self, topic: str, numbers: range) -> None:
        """Store a message with each number as its body, evenly spread over the queues."""

        async def queues() -> Sequence[QueueRef]:
            async with Admin(self.nameserver, timeout_s=START_S) as admin:
                return (await admin.describe_topic(topic)).topic.queues

        all_queues = self.call(queues())
        for place, queue in enumerate(all_queues):
            messages = [Message(str(n).encode()) for n in numbers[place :: len(all_queues)]]
            self.send(topic, messages, queue=queue)

    def options(self, topic: str, **more: object) -> Mapping[str, str]:
        """Return options of `format("baton")` for the topic."""
        given = {"nameserver": self.nameserver, "topic": topic, "timeoutMs": "60000"}
        return given | {name: str(value) for name, value in more.items()}

    async def _begin(self) -> LocalCluster:
        loop = asyncio.get_running_loop()
        started: asyncio.Future[LocalCluster] = loop.create_future()
        self._stop = asyncio.Event()
        self._running = asyncio.run_coroutine_threadsafe(self._live(started), loop)
        async with asyncio.timeout(START_S):
            return await started

    async def _live(self, started: asyncio.Future[LocalCluster]) -> None:
        try:
            async with local_cluster(self._data_dir, **self._options) as running:
                started.set_result(running)
                await self._stop.wait()
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _end(self) -> None:
        assert self._running is not None
        self._stop.set()
        await asyncio.wrap_future(self._running)
