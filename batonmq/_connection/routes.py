"""Routes of topics: queried, or watched at a nameserver."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc.aio

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common.rpc import from_rpc_error
from batonmq._connection.directory import CALL_TIMEOUT_S, Directory
from batonmq._core.queues import QueueRef
from batonmq.errors import BatonError, Retry, TopicNotFound

log = logging.getLogger(__name__)


def queues_of(route: pb.Route) -> tuple[QueueRef, ...]:
    """Return all queues of a route, ascending."""
    return tuple(
        sorted(
            QueueRef(route.topic.name, spread.broker, queue_id)
            for spread in route.topic.spread
            for queue_id in range(spread.queue_count)
        )
    )


def writable_queues_of(route: pb.Route) -> tuple[QueueRef, ...]:
    """Return the queues of a route that take messages, ascending."""
    if route.topic.permission == pb.TOPIC_PERMISSION_READ:
        return ()
    return tuple(
        sorted(
            QueueRef(route.topic.name, spread.broker, queue_id)
            for spread in route.topic.spread
            for queue_id in range(writable_count(spread))
        )
    )


def topic_epoch_of(route: pb.Route) -> int | None:
    """Return the epoch of the topic; None from a nameserver that does not know it."""
    return route.topic.epoch if route.topic.HasField("epoch") else None


def writable_count(spread: pb.QueueSpread) -> int:
    """Return how many queues of a topic on one broker take messages."""
    return 0 if spread.closed else spread.write_queue_count or spread.queue_count


async def query_route(directory: Directory, topic: str) -> pb.Route:
    """Ask a nameserver for the route of `topic`.

    Raises:
        TopicNotFound: The topic does not exist.
        Unreachable: No nameserver responds.
    """
    request = pb.QueryRouteRequest(topic=topic)
    answer = await directory.ask_nameserver(
        lambda stub: stub.QueryRoute(request, timeout=CALL_TIMEOUT_S)
    )
    return answer.route


async def follow_route(
    directory: Directory, topic: str, on_route: Callable[[pb.Route], None]
) -> None:
    """Call `on_route` with every newer route of `topic`, until cancelled; reopen a lost watch.

    A route of a higher epoch counts whatever its generation: another nameserver may be behind with
    its generations.

    Raises:
        TopicNotFound: The topic was deleted.
    """
    generation, epoch, failures = 0, 0, 0
    while True:
        try:
            async for answer in directory.nameserver().WatchRoute(
                pb.WatchRouteRequest(topic=topic)
            ):
                failures = 0
                if answer.route.generation > generation or answer.route.topic.epoch > epoch:
                    generation, epoch = answer.route.generation, answer.route.topic.epoch
                    on_route(answer.route)
            error: BatonError = TopicNotFound(
                f"the nameserver ended the watch of topic {topic}", retry_after_ms=100
            )
        except grpc.aio.AioRpcError as failure:
            error = from_rpc_error(failure)
            if isinstance(error, TopicNotFound):
                raise error from failure
        log.debug("reopening route watch topic=%s error=%s", topic, error)
        if error.retry is not Retry.NEVER:
            directory.next_nameserver()
        await directory.pause(error, failures)
        failures += 1


async def wait_for_route(directory: Directory, topic: str, timeout_ms: int) -> pb.Route:
    """Return the route of `topic`; retry for up to `timeout_ms` until a nameserver responds.

    Raises:
        TopicNotFound: The topic does not exist.
        Unreachable: No nameserver responded in time.
    """
    deadline = asyncio.get_running_loop().time() + timeout_ms / 1000
    failures = 0
    while True:
        try:
            return await query_route(directory, topic)
        except BatonError as error:
            if error.retry is Retry.NEVER or asyncio.get_running_loop().time() > deadline:
                raise
            await directory.pause(error, failures)
            failures += 1
