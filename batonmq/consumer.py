"""Receives the messages of a group: each queue is owned by one member at a time."""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from baton.common.v1 import queue_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as pb

from batonmq.common.aio import only_error, unless
from batonmq.common.backoff import Backoff
from batonmq.consuming.joint import JointCalls
from batonmq.consuming.leases import Leases
from batonmq.consuming.membership import Membership, Verdict
from batonmq.consuming.message import ReceivedMessage
from batonmq.consuming.notices import Notices
from batonmq.consuming.runner import QueueRunner
from batonmq.consuming.session import (
    CONSUME_FROM,
    ConsumerSettings,
    OwnershipEvent,
    Session,
)
from batonmq.core.route import QueueId
from batonmq.core.subscription import TagFilter
from batonmq.directory import Directory, Surroundings
from batonmq.routes import follow_route

log = logging.getLogger(__name__)

Handler = Callable[[ReceivedMessage], Awaitable[object] | object]

FAIR_RUN = 64
"""Messages of one queue handed out before another queue, and the rest of the loop, have a turn."""


def _ignore(_: OwnershipEvent) -> None:
    return


class Consumer:
    """One member of a consumer group. Use it as an async context manager.

    Either iterate (`async for message in consumer`): the message is acknowledged when the next
    one is asked for; one that was not, as after `break`, is delivered again, flagged. Or hand a
    function to `run`. Messages of one queue are handled one after the other, in order, unless
    `queue_concurrency` says otherwise; then they are acknowledged as they end.

    Leaving the block closes gracefully: nothing new starts, what runs ends, acks are committed
    and the queues pass to other members, who go on where this one stopped.

    Args:
        nameserver: host:port of a nameserver; several separated by commas.
        subscriptions: Topic to tag expression (`*`, or tags joined by `||`). All members of the
            group need the same; what happens else is the group's policy, see `verdict`.
        client_id: Unique within the group; by default host and a random part.
        on_ownership: Called, in the event loop, when a queue comes or goes.
        surroundings: Clock, randomness and transport; the real ones by default.

    Raises on entering:
        SubscriptionConflict: the group has another subscription; it names both clients.
        ClientIdInUse, TopicNotFound, InvalidName, BadExpression: refused.
        Unreachable: no nameserver answered within the start timeout.
    """

    def __init__(  # noqa: PLR0913  keyword-only from the settings on, each with a default
        self,
        nameserver: str,
        group: str,
        subscriptions: Mapping[str, str],
        settings: ConsumerSettings | None = None,
        *,
        client_id: str = "",
        on_ownership: Callable[[OwnershipEvent], None] = _ignore,
        surroundings: Surroundings | None = None,
    ) -> None:
        outside = surroundings or Surroundings()
        random, host = outside.random, socket.gethostname()
        incarnation_id = random.getrandbits(63) or 1
        self.client_id = client_id or f"{host}-{incarnation_id:016x}"
        self._session = Session(
            group=group,
            incarnation=queue_pb2.Incarnation(
                client_id=self.client_id, incarnation_id=incarnation_id
            ),
            settings=settings or ConsumerSettings(),
            directory=Directory(nameserver, random, outside.connect),
            clock=outside.clock,
            random=random,
            on_ownership=on_ownership,
        )
        self._topics = sorted(subscriptions)
        heartbeat = pb.HeartbeatRequest(
            group=group,
            incarnation=self._session.incarnation,
            subscriptions=[
                pb.Subscription(
                    topic=topic, expression=TagFilter.parse(subscriptions[topic]).canonical()
                )
                for topic in self._topics
            ],
            model=pb.MESSAGE_MODEL_CLUSTERING,
            consume_from=CONSUME_FROM[self._session.settings.consume_from],
            host=host,
            room=self._session.settings.room,
        )
        self._membership = Membership(self._session, heartbeat, self._rebalance)
        self._runners: dict[QueueId, QueueRunner] = {}
        self._notices = Notices(self._session, self._runners)
        self._calls = JointCalls(self._session)
        self._leases = Leases(self._session, self._calls, self._runners, self._notices)
        self._listening = False
        self._handler: Handler | None = None
        self._handling: dict[QueueId, list[asyncio.Task[None]]] = {}
        self._slots = asyncio.Semaphore(self._session.settings.concurrency)
        self._threads: ThreadPoolExecutor | None = None
        self._current: tuple[QueueRunner, ReceivedMessage] | None = None
        self._turn: list[QueueRunner] = []
        self._run_left = 0
        self._stopped = asyncio.Event()
        self._emptied = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._loops: list[asyncio.Task[None]] = []

    @property
    def assignment(self) -> tuple[QueueId, ...]:
        """The queues this member has at the moment, ascending."""
        return tuple(sorted(queue for queue, r in self._runners.items() if r.holding))

    @property
    def verdict(self) -> Verdict:
        """What the group says of this member's subscription; `staged`: it gets no queue yet."""
        return self._membership.verdict

    async def __aenter__(self) -> Consumer:
        session = self._session
        try:
            await self._membership.join(session.settings.start_timeout_ms)
        except BaseException:
            await session.directory.close()
            raise
        await self._tasks.__aenter__()
        loops = (
            self._calls.run,
            self._membership.run_heartbeats,
            self._membership.run_watch,
            self._leases.run_keep_alives,
            self._leases.run_commits,
        )
        self._loops = [self._tasks.create_task(loop()) for loop in loops]
        for topic in self._topics:
            self._loops.append(self._tasks.create_task(self._follow(topic)))
        self._rebalance()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._close()
        finally:
            for task in self._loops:
                task.cancel()
            try:
                await self._tasks.__aexit__(kind, error, trace)
            except BaseExceptionGroup as group:
                raise only_error(group) from None
            finally:
                if self._threads is not None:
                    self._threads.shutdown(wait=False)
                await self._session.directory.close()

    def stop(self) -> None:
        """Hand out no more messages: `run` and the iteration end."""
        self._stopped.set()
        self._session.available.set()

    def __aiter__(self) -> Consumer:
        return self

    async def __anext__(self) -> ReceivedMessage:
        """Acknowledge the message before and wait for the next."""
        if self._current is not None:
            runner, message = self._current
            self._current = None
            runner.finish(message)
        if self._run_left == 0:
            await asyncio.sleep(0)
        while not self._stopped.is_set():
            found = self._take()
            if found is not None:
                self._current = found
                return found[1]
            self._session.available.clear()
            await self._session.available.wait()
        raise StopAsyncIteration

    async def run(self, handler: Handler) -> None:
        """Hand every message to `handler` until `stop`.

        Args:
            handler: A coroutine function, or a plain function, which runs in a thread. If it
                raises, the message is handed to it again after a growing delay; messages of
                other queues go on meanwhile.
        """
        if not inspect.iscoroutinefunction(handler):
            self._threads = ThreadPoolExecutor(self._session.settings.concurrency, "handler")
        self._handler = handler
        for runner in self._runners.values():
            self._start_handling(runner)
        await self._stopped.wait()

    def _take(self) -> tuple[QueueRunner, ReceivedMessage] | None:
        """The next message, a run of one queue at a time."""
        for _ in range(len(self._turn) + 1):
            if self._run_left > 0 and self._turn:
                message = self._turn[0].take()
                if message is not None:
                    self._run_left -= 1
                    return self._turn[0], message
            self._turn = self._turn[1:] + self._turn[:1]
            self._run_left = FAIR_RUN
        return None

    async def _follow(self, topic: str) -> None:
        """End the consumer with TopicNotFound when the topic is deleted."""
        await follow_route(self._session.directory, topic, lambda _: None)

    def _rebalance(self) -> None:
        """Let go of what is not ours any more, ask for what is; the rest goes on untouched."""
        view = self._session.view
        if self._stopped.is_set() or not view.member or not self._loops:
            return
        for queue, runner in self._runners.items():
            if runner.owned != view.owned:
                runner.drop()
            elif queue in view.assigned:
                runner.look()
            else:
                runner.unassign()
        for queue in sorted(view.assigned - self._runners.keys()):
            self._add_runner(queue)

    def _add_runner(self, queue: QueueId) -> None:
        if self._session.view.owned and not self._listening:
            self._listening = True
            self._loops.append(self._tasks.create_task(self._notices.run()))
        runner = QueueRunner(self._session, self._calls, queue)
        self._runners[queue] = runner
        self._turn.append(runner)
        self._tasks.create_task(self._run_queue(runner))
        if self._handler is not None:
            self._start_handling(runner)

    async def _run_queue(self, runner: QueueRunner) -> None:
        try:
            await runner.run()
        finally:
            self._turn.remove(runner)
            del self._runners[runner.queue]
            for handling in self._handling.pop(runner.queue, ()):
                handling.cancel()
            if not self._runners:
                self._emptied.set()
        self._rebalance()

    def _start_handling(self, runner: QueueRunner) -> None:
        assert self._handler is not None
        self._handling[runner.queue] = [
            self._tasks.create_task(self._handle(runner, self._handler))
            for _ in range(self._session.settings.queue_concurrency)
        ]

    async def _handle(self, runner: QueueRunner, handler: Handler) -> None:
        """Handle one queue's messages one by one, until cancelled."""
        while True:
            await runner.arrived.wait()
            async with self._slots:
                if self._stopped.is_set():
                    return
                message = runner.take()
                done = message is not None and await self._attempt(message, handler)
            if message is None:
                continue
            while not (done or runner.draining) and runner.counts(message):
                done = await self._attempt_later(runner, message, handler)
            if done:
                runner.finish(message)
            else:
                runner.give_up(message)

    async def _attempt_later(
        self, runner: QueueRunner, message: ReceivedMessage, handler: Handler
    ) -> bool:
        settings = self._session.settings
        backoff = Backoff(first_ms=settings.retry_first_ms, delay_ms_max=settings.retry_ms_max)
        delay_ms = backoff.delay_ms(message.attempts - 1, self._session.random)
        await unless(runner.stopping, asyncio.sleep(delay_ms / 1000))
        if runner.draining or not runner.counts(message):
            return False
        message.attempts += 1
        async with self._slots:
            return await self._attempt(message, handler)

    async def _attempt(self, message: ReceivedMessage, handler: Handler) -> bool:
        """Whether the handler took the message without raising."""
        try:
            if self._threads is None:
                await handler(message)  # type: ignore[misc]
            else:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._threads, handler, message)
        except Exception:
            log.exception("handler failed message=%r attempts=%d", message, message.attempts)
            return False
        return True

    async def _close(self) -> None:
        """Leave, drain, commit, release: in that order, so that the others wait already."""
        self.stop()
        if self._current is not None:
            runner, message = self._current
            self._current = None
            runner.give_up(message)
        for runner in self._runners.values():
            runner.unassign()
        await self._membership.leave()
        while self._runners:
            self._emptied.clear()
            await self._emptied.wait()
        await self._calls.release_rest()
