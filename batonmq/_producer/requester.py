"""Requests of a producer: one reply inbox for all of them, at any storage node.

The inbox is opened with the first request, and opened again at another node if its node is lost.
Replies to requests of a lost inbox can't arrive any more, so these requests fail at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from hashlib import blake2b
from random import Random
from typing import Any, Protocol

import grpc.aio

from baton.storage.v1 import reply_service_pb2 as pb
from batonmq._common import timeouts
from batonmq._common.rpc import from_rpc_error
from batonmq._connection.directory import Directory
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message
from batonmq._core.requests import (
    Reply,
    ReplyAddress,
    RequestHeader,
    check_request,
    request_properties,
)
from batonmq._producer.receipts import PendingReceipt
from batonmq._telemetry.client_metrics import ProducerMetrics
from batonmq.errors import BatonError, Unreachable

log = logging.getLogger(__name__)

SILENCE_S_MAX = 12.0
"""A stream that brings nothing for so long is given up: a node sends something every 5 s."""


class RequestTimedOut(Unreachable):
    """No reply arrived in time. The request may be handled or not."""

    remedy = "Check that a consumer replies; repeat the request if handling it twice is safe."


class RequestFailed(Exception):
    """The responder replied with an error, or gave the request up as a dead letter."""


class Submit(Protocol):
    """`Producer.submit`."""

    def __call__(
        self, topic: str, message: Message, *, ordering_key: str | None, queue: QueueRef | None
    ) -> Coroutine[Any, Any, PendingReceipt]: ...


class Requester:
    """Sends requests and assigns the replies to them.

    Args:
        submit: Starts to send a message.
        start: Runs a coroutine until the producer is closed.
    """

    def __init__(
        self,
        directory: Directory,
        random: Random,
        submit: Submit,
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        metrics: ProducerMetrics | None,
    ) -> None:
        self._directory, self._random = directory, random
        self._submit, self._start, self._metrics = submit, start, metrics
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._address: ReplyAddress | None = None
        self._opened = asyncio.Event()
        self._is_running = False
        self._closed: BatonError | None = None
        self._error: BatonError | None = None

    async def request(
        self,
        topic: str,
        message: Message,
        timeout_ms: int,
        ordering_key: str | None,
        queue: QueueRef | None,
    ) -> Reply:
        """Send a request and return its reply; see `Producer.request`."""
        check_request(timeout_ms, message.properties)
        if not self._is_running:
            self._is_running = True
            self._start(self._run())
        now_s, outcome = asyncio.get_running_loop().time, "error"
        begin_s = now_s()
        try:
            async with timeouts.timeout(timeout_ms / 1000):
                reply = await self._exchange(topic, message, timeout_ms, ordering_key, queue)
            outcome = "failed" if reply.error else "replied"
        except TimeoutError:
            outcome = "timeout"
            why = "" if self._opened.is_set() or self._error is None else f": {self._error}"
            raise RequestTimedOut(
                f"no reply to a request to topic {topic} within {timeout_ms} ms{why}",
                facts={"topic": topic},
            ) from None
        finally:
            if self._metrics is not None:
                self._metrics.requested(topic, outcome, now_s() - begin_s)
        if reply.error:
            raise RequestFailed(reply.error)
        return reply

    def close(self, error: BatonError) -> None:
        """Fail all requests that wait for a reply."""
        self._closed = error
        self._fail_all(error)
        self._opened.set()

    async def _exchange(
        self,
        topic: str,
        message: Message,
        timeout_ms: int,
        ordering_key: str | None,
        queue: QueueRef | None,
    ) -> Reply:
        await self._opened.wait()
        if self._closed is not None:
            raise self._closed
        assert self._address is not None
        correlation_id = self._new_correlation_id()
        header = RequestHeader(self._address, correlation_id, timeout_ms)
        properties = {**message.properties, **request_properties(header)}
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[correlation_id] = reply
        request = replace(message, properties=properties)
        sending = self._start(self._send(reply, topic, request, ordering_key, queue))
        try:
            return await reply
        finally:
            self._waiting.pop(correlation_id, None)
            sending.cancel()

    async def _send(
        self,
        reply: asyncio.Future[Reply],
        topic: str,
        message: Message,
        ordering_key: str | None,
        queue: QueueRef | None,
    ) -> None:
        """Send a request; fail it if its message is not stored. The reply may be first."""
        try:
            await (await self._submit(topic, message, ordering_key=ordering_key, queue=queue))
        except Exception as error:  # noqa: BLE001  a wrong argument fails this request only
            if not reply.done():
                reply.set_exception(error)

    def _new_correlation_id(self) -> int:
        """Return an id that reveals nothing about those of other requests."""
        return int.from_bytes(blake2b(self._random.randbytes(16), digest_size=8).digest())

    async def _run(self) -> None:
        """Keep an inbox open until cancelled."""
        failures, lost_node = 0, ""
        while True:
            try:
                nodes = await self._directory.reply_nodes()
                others = [node for node in nodes if node != lost_node] or nodes
                if not others:
                    raise Unreachable("no storage node is registered", facts={"service": "storage"})
                lost_node = self._random.choice(others)
                await self._watch(lost_node)
                error: BatonError = Unreachable("the storage node closed the reply inbox")
            except BatonError as failure:
                error = failure
            self._error = error
            if self._opened.is_set():
                failures = 0
                self._opened.clear()
            log.info("reply inbox lost node_id=%s error=%s", lost_node, error)
            self._fail_all(
                Unreachable(
                    f"the reply inbox at {lost_node} was lost: {error.message}",
                    remedy="Repeat the request if handling it twice is safe.",
                )
            )
            await self._directory.pause(error, failures)
            failures += 1

    async def _watch(self, node_id: str) -> None:
        """Open an inbox at a node, and dispatch its replies until the stream ends."""
        stub = await self._directory.replies(node_id)
        call = stub.WatchReplies(pb.WatchRepliesRequest())
        try:
            async with timeouts.timeout(SILENCE_S_MAX) as silence:
                async for response in call:
                    silence.reschedule(asyncio.get_running_loop().time() + SILENCE_S_MAX)
                    if response.HasField("inbox"):
                        inbox = response.inbox
                        self._address = ReplyAddress(inbox.node_id, inbox.inbox_id)
                        self._opened.set()
                    for reply in response.replies:
                        self._dispatch(reply)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except TimeoutError:
            raise Unreachable(
                f"storage node {node_id} was silent for {SILENCE_S_MAX:.0f} s"
            ) from None
        finally:
            call.cancel()

    def _dispatch(self, reply: pb.RequestReply) -> None:
        waiting = self._waiting.pop(reply.correlation_id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(Reply(reply.body, reply.error))
        elif self._metrics is not None:
            self._metrics.late_reply()

    def _fail_all(self, error: BatonError) -> None:
        waiting, self._waiting = self._waiting, {}
        for reply in waiting.values():
            if not reply.done():
                reply.set_exception(error)
