"""Client process of RocketMQ: `python -m bench.peers.clients.rocketmq TASK`."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from time import monotonic, sleep
from types import TracebackType
from typing import Self

import grpc.aio
from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
)
from rocketmq.grpc_protocol import Code, MessagingServiceStub, QueryRouteRequest, Resource
from rocketmq.v5.exception import InternalErrorException
from rocketmq.v5.util import Signature

from bench.peers.clients.steps import Client, Sender, run
from bench.peers.clients.task import PARTITIONS, SENDS_IN_FLIGHT, TOPICS, Task, Work

_REQUEST_S = 30
_INVISIBLE_S = 60
_RECEIVE = 32
_RETRY_S = 0.2
_ROUTES_S = 60


class RocketSender(Sender):
    """The producer of rocketmq-python-client; it has no call for several messages."""

    bulk_messages = 1_000

    def __init__(self, task: Task) -> None:
        self._task = task
        self._topic = task.topic
        self._posted: deque[Future[object]] = deque()

    async def __aenter__(self) -> Self:
        self._producer = Producer(_configuration(self._task), (self._topic,))
        self._producer.startup()
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._producer.shutdown()

    def _message(self, body: bytes) -> Message:
        message = Message()
        message.topic = self._topic
        message.body = body
        return message

    async def send_bulk(self, bodies: Sequence[bytes]) -> None:  # noqa: D102
        for body in bodies:
            self.post(body)
        self._wait_until(len(bodies))  # one call is in flight while the next one is made

    def _wait_until(self, in_flight_max: int) -> None:
        while len(self._posted) > in_flight_max:
            self._posted.popleft().result(_REQUEST_S)

    async def send(self, body: bytes) -> None:  # noqa: D102
        self._producer.send(self._message(body))

    def post(self, body: bytes) -> None:  # noqa: D102
        self._posted.append(self._producer.send_async(self._message(body)))

    async def flush(self) -> None:  # noqa: D102
        self._wait_until(0)

    async def keep_in_flight(self, body: bytes, work: Work) -> None:  # noqa: D102
        while not work.is_over():
            self.post(body)
            work.add(1)
            self._wait_until(SENDS_IN_FLIGHT - 1)


class RocketClient(Client):
    """The library rocketmq-python-client."""

    async def create_topics(self, task: Task) -> None:
        """Wait until the proxy knows the routes of the topics, which the bench has created.

        A client that starts before does not fail: it reports the missing route when it sends.

        Raises:
            TimeoutError: It does not know one of them in time.
        """
        end_s = monotonic() + _ROUTES_S
        async with grpc.aio.insecure_channel(task.address) as channel:
            proxy = MessagingServiceStub(channel)
            for topic in TOPICS:
                while failure := await _route_failure(proxy, topic, _configuration(task)):
                    if monotonic() > end_s:
                        raise TimeoutError(f"no route of topic {topic}: {failure}")
                    await asyncio.sleep(_RETRY_S)

    def sender(self, task: Task) -> Sender:  # noqa: D102
        return RocketSender(task)

    async def receive(  # noqa: D102
        self, task: Task, handle: Callable[[Sequence[bytes]], bool]
    ) -> None:
        consumer = SimpleConsumer(
            _configuration(task), task.group, {task.topic: FilterExpression()}
        )
        consumer.startup()
        finished, lock = threading.Event(), threading.Lock()
        begin_s = monotonic()

        def receive() -> None:
            while not finished.is_set():
                try:
                    messages = consumer.receive(_RECEIVE, _INVISIBLE_S)
                except InternalErrorException:
                    # The proxy answers so until it knows the settings of a new consumer.
                    if monotonic() > begin_s + _REQUEST_S:
                        raise
                    sleep(_RETRY_S)
                    continue
                if not messages:
                    continue
                with lock:
                    if handle([message.body for message in messages]):
                        finished.set()
                for message in messages:
                    consumer.ack(message)  # ack_async works in the main thread only

        async with asyncio.TaskGroup() as tasks:
            for _ in range(PARTITIONS):
                tasks.create_task(asyncio.to_thread(receive))
        consumer.shutdown()

    async def receive_each(  # noqa: D102
        self, task: Task, handle: Callable[[bytes], bool]
    ) -> None:
        finished, lock = threading.Event(), threading.Lock()

        class Listener(MessageListener):  # type: ignore[misc]
            def consume(self, message: Message) -> ConsumeResult:
                with lock:
                    if not finished.is_set() and handle(message.body):
                        finished.set()
                return ConsumeResult.SUCCESS

        consumer = PushConsumer(
            _configuration(task), task.group, Listener(), {task.topic: FilterExpression()}
        )
        consumer.startup()
        await asyncio.to_thread(finished.wait)
        consumer.shutdown()


async def _route_failure(
    proxy: MessagingServiceStub, topic: str, configuration: ClientConfiguration
) -> str:
    """Return why the proxy has no route of a topic; empty if it has one."""
    request = QueryRouteRequest(
        topic=Resource(name=topic), endpoints=configuration.rpc_endpoints.endpoints
    )
    metadata = Signature.metadata(configuration, "bench-create")
    try:
        answer = await proxy.QueryRoute(request, metadata=metadata, timeout=_REQUEST_S)
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    status = answer.status
    return "" if status.code == Code.OK else f"{Code.Name(status.code)}: {status.message}"


def _configuration(task: Task) -> ClientConfiguration:
    return ClientConfiguration(task.address, Credentials(), request_timeout=_REQUEST_S)


if __name__ == "__main__":
    run(RocketClient())
