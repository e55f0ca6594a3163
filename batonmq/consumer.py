"""Receives the messages of a group: each queue is owned by one member at a time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from types import TracebackType

from baton.common.v1 import queue_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as pb

from batonmq.common.aio import only_error
from batonmq.consuming.handling import Handler, Handling
from batonmq.consuming.joint import JointCalls
from batonmq.consuming.leases import Leases
from batonmq.consuming.local_offsets import LocalOffsets
from batonmq.consuming.membership import Membership, Verdict
from batonmq.consuming.message import ReceivedMessage
from batonmq.consuming.notices import Notices
from batonmq.consuming.results import MessageFailed
from batonmq.consuming.retrying import Returns, create_retry_topic, restore
from batonmq.consuming.runner import QueueRunner
from batonmq.consuming.session import (
    CONSUME_FROM,
    MODELS,
    ConsumerSettings,
    OwnershipEvent,
    Session,
)
from batonmq.core.flow import FlowReason
from batonmq.core.retries import retry_topic
from batonmq.core.route import QueueId
from batonmq.core.subscription import TagFilter
from batonmq.directory import Directory, Surroundings
from batonmq.routes import follow_route, queues_of

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
        DataLoss: the offsets file of a broadcasting member is damaged.
        InvalidArgument: the offsets file can't be used, or another process uses it.
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
        chosen = settings or ConsumerSettings()
        incarnation_id = random.getrandbits(63) or 1
        self.client_id = client_id or f"{host}-{incarnation_id:016x}"
        self._session = Session(
            group=group,
            incarnation=queue_pb2.Incarnation(
                client_id=self.client_id, incarnation_id=incarnation_id
            ),
            settings=chosen,
            directory=Directory(nameserver, random, outside.connect),
            clock=outside.clock,
            random=random,
            on_ownership=on_ownership,
            local=LocalOffsets(Path(chosen.offsets_file), group) if chosen.offsets_file else None,
        )
        if chosen.send_back:
            subscriptions = {**subscriptions, retry_topic(group): "*"}
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
            model=MODELS[chosen.model],
            consume_from=CONSUME_FROM[chosen.consume_from],
            orderly=chosen.orderly,
            host=host,
            room=chosen.room,
        )
        self._membership = Membership(self._session, heartbeat, self._rebalance)
        self._runners: dict[QueueId, QueueRunner] = {}
        self._routes: dict[str, tuple[QueueId, ...]] = {}
        self._notices = Notices(self._session, self._runners)
        self._calls = JointCalls(self._session)
        self._leases = Leases(self._session, self._calls, self._runners, self._notices)
        self._listening = False
        self._returns = Returns(self._session, self._spawn)
        self._handling: Handling | None = None
        self._handle_timeout_ms = self._session.settings.handle_timeout_ms
        self._failed: MessageFailed | None = None
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

    @property
    def flow(self) -> dict[QueueId, FlowReason]:
        """The queues that are not pulled at the moment because of a bound, and of which.

        `count`: `buffer_messages_max` messages of the queue wait. `bytes`: `buffer_bytes_max` bytes
        of all queues wait. `span`: a message is not acknowledged, and the queue has gone on for
        `span_max` offsets behind it.
        """
        return {queue: r.flow for queue, r in self._runners.items() if r.flow is not None}

    async def __aenter__(self) -> Consumer:
        session = self._session
        try:
            if session.local is not None:
                await session.local.open()
            if session.settings.send_back:
                await create_retry_topic(session)
            await self._membership.join(session.settings.start_timeout_ms)
        except BaseException:
            await self._let_go()
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
                if self._handling is not None:
                    self._handling.close()
                await self._let_go()

    def stop(self) -> None:
        """Hand out no more messages: `run` and the iteration end."""
        self._stopped.set()
        if self._handling is not None:
            self._handling.end()
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
                restore(found[1], self._session.group)
                self._current = found
                return found[1]
            self._session.available.clear()
            await self._session.available.wait()
        raise StopAsyncIteration

    async def run(self, handler: Handler) -> None:
        """Hand every message to `handler` until `stop`.

        Args:
            handler: A coroutine function, or a plain function, which runs in a thread. What it
                returns, None for success, is in `batonmq.consuming.results`. If it raises, or
                takes longer than `handle_timeout_ms`, the message is handled again later as the
                settings say; messages of other queues go on meanwhile.

        Raises:
            MessageFailed: a message has failed too often, and the settings say to stop then.
        """
        self._handling = Handling(
            self._session, handler, self._returns, self._tasks, self._stop_failed
        )
        self._handling.deadlines.set(self._handle_timeout_ms)
        for runner in self._runners.values():
            self._handling.begin(runner)
        await self._stopped.wait()
        if self._failed is not None:
            raise self._failed

    @property
    def handle_timeout_ms(self) -> int | None:
        """How long a handler may take. A change holds at once, for handlers that run too."""
        return self._handle_timeout_ms

    @handle_timeout_ms.setter
    def handle_timeout_ms(self, timeout_ms: int | None) -> None:
        self._handle_timeout_ms = timeout_ms
        if self._handling is not None:
            self._handling.deadlines.set(timeout_ms)

    def _stop_failed(self, failed: MessageFailed) -> None:
        self._failed = failed
        self.stop()

    def _spawn(self, loop: Coroutine[object, object, None]) -> None:
        self._loops.append(self._tasks.create_task(loop))

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
        await follow_route(self._session.directory, topic, self._see_route)

    def _see_route(self, route: pb.Route) -> None:
        """A broadcasting member reads all queues there are."""
        local, topic = self._session.local, route.topic
        if local is not None:
            queues = self._routes[topic.name] = queues_of(route)
            if local.meet(topic.name, topic.topic_id, queues):
                for runner in self._runners.values():
                    if runner.queue.topic == topic.name:
                        runner.fence(forget=True)
            self._rebalance()

    def _rebalance(self) -> None:
        """Let go of what is not ours any more, ask for what is; the rest goes on untouched."""
        view = self._session.view
        if self._stopped.is_set() or not view.member or not self._loops:
            return
        assigned = view.assigned.union(*self._routes.values())
        for queue, runner in self._runners.items():
            if runner.owned != view.owned:
                runner.drop()
            elif queue in assigned:
                runner.look()
            else:
                runner.unassign()
        for queue in sorted(assigned - self._runners.keys()):
            self._add_runner(queue)

    def _add_runner(self, queue: QueueId) -> None:
        if self._session.view.owned and not self._listening:
            self._listening = True
            self._loops.append(self._tasks.create_task(self._notices.run()))
        runner = QueueRunner(self._session, self._calls, queue)
        self._runners[queue] = runner
        self._turn.append(runner)
        self._tasks.create_task(self._run_queue(runner))
        if self._handling is not None:
            self._handling.begin(runner)

    async def _run_queue(self, runner: QueueRunner) -> None:
        try:
            await runner.run()
        finally:
            self._turn.remove(runner)
            del self._runners[runner.queue]
            if self._handling is not None:
                self._handling.leave(runner.queue)
            if not self._runners:
                self._emptied.set()
        self._rebalance()

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

    async def _let_go(self) -> None:
        try:
            if self._session.local is not None:
                await self._session.local.close()
        finally:
            await self._session.directory.close()
