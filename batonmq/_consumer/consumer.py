"""Receives the messages of a group: each queue is owned by one member at a time."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from types import TracebackType

from baton.common.v1 import queue_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common.aio import only_error
from batonmq._connection.directory import ClientEnvironment, Directory
from batonmq._connection.routes import follow_route, queues_of
from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.batched_calls import BatchedCalls
from batonmq._consumer.consumer_gauges import ConsumerGauges
from batonmq._consumer.consumer_settings import CONSUME_FROM, MODELS, ConsumerSettings
from batonmq._consumer.handler_adapters import (
    BatchAdapter,
    BatchHandler,
    Handler,
    HandlerAdapter,
    SingleMessageAdapter,
)
from batonmq._consumer.handler_results import MessageFailed
from batonmq._consumer.lease_renewer import LeaseRenewer
from batonmq._consumer.local_offsets import LocalOffsets
from batonmq._consumer.lock_watch import LockWatch
from batonmq._consumer.membership import Membership, SubscriptionVerdict
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.message_dispatcher import MessageDispatcher
from batonmq._consumer.queue_rotation import QueueRotation
from batonmq._consumer.retry_sender import RetrySender, create_retry_topic
from batonmq._consumer.session import OwnershipEvent, Session
from batonmq._core.flow_control import FlowReason
from batonmq._core.queues import QueueRef
from batonmq._core.retries import retry_topic
from batonmq._core.subscription import parse_filter
from batonmq._producer.producer import stream_of
from batonmq._telemetry.client_metrics import ClientMetrics
from batonmq._telemetry.client_stream import ClientStream
from batonmq._telemetry.tallies import ConsumerTally
from batonmq.errors import TopicNotFound


def _ignore(_: OwnershipEvent) -> None:
    return


class Consumer:
    """One member of a consumer group. Use it as an async context manager.

    Either iterate (`async for message in consumer`): the message is acknowledged when the next
    one is asked for; one that was not, as after `break`, is delivered again, flagged. Or hand a
    function to `run`, or to `run_batches`. Messages of one queue are handled one after the other,
    in order, unless `queue_concurrency` says otherwise; then they are acknowledged as they end.
    What a function does not take comes again later, by default by way of the group's retry topic.

    Leaving the block closes gracefully: nothing new starts, what runs ends, acks are committed
    and the queues pass to other members, who go on where this one stopped. `close` does so within
    the block, and says how long that may take. Who is cancelled while the block closes waits no
    longer: handlers are cut off, and the queues pass to others when their leases have run out.

    Args:
        nameserver: host:port of a nameserver; several separated by commas.
        group: 1 to 127 characters of A-Z a-z 0-9 _ % -; it is made when somebody joins it.
        subscriptions: Topic to expression: `*`, tags joined by `||`, or `sql:` and a condition on
            properties, as in `sql: price > 5 AND region IN ('eu', 'us')`. All members of the
            group need the same; what happens else is the group's policy, see `verdict`.
        client_id: Unique within the group, up to 255 visible ASCII characters without `/`; by
            default host and a random part.
        on_ownership: Called, in the event loop, when a queue comes or goes.
        metrics: Counts what happens here, if given.
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
        metrics: ClientMetrics | None = None,
        surroundings: ClientEnvironment | None = None,
    ) -> None:
        chosen = settings or ConsumerSettings()
        outside = (surroundings or ClientEnvironment()).secured(chosen.security)
        random, host = outside.random, socket.gethostname()
        incarnation_id = random.getrandbits(63) or 1
        self.client_id = client_id or f"{host}-{incarnation_id:016x}"
        counted = None if metrics is None else metrics.of_consumer(group, self.client_id)
        self._stream: ClientStream | None = None
        tally: ConsumerTally | None = None
        if chosen.metrics_stream:
            self._stream = stream_of(self.client_id, nameserver, outside)
            tally = ConsumerTally(self._stream.hub, group, self.client_id, outside.clock)
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
            metrics=counted,
            tally=tally,
            local=LocalOffsets(Path(chosen.offsets_file), group) if chosen.offsets_file else None,
        )
        if chosen.sends_back:
            subscriptions = {**subscriptions, retry_topic(group): "*"}
        self._topics = sorted(subscriptions)
        heartbeat = pb.HeartbeatRequest(
            group=group,
            incarnation=self._session.incarnation,
            subscriptions=[
                pb.Subscription(
                    topic=topic, expression=parse_filter(subscriptions[topic]).canonical()
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
        self._runners: dict[QueueRef, AssignedQueue] = {}
        self._routes: dict[str, tuple[QueueRef, ...]] = {}
        self._notices = LockWatch(self._session, self._runners)
        self._calls = BatchedCalls(self._session)
        self._leases = LeaseRenewer(self._session, self._calls, self._runners, self._notices)
        self._listening = False
        self._returns = RetrySender(self._session, self._spawn)
        self._handling: MessageDispatcher | None = None
        self._handle_timeout_ms = self._session.settings.handle_timeout_ms
        self._failed: MessageFailed | None = None
        self._turns = QueueRotation()
        self._handed_out_s = 0.0
        self._stopped = asyncio.Event()
        self._emptied = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._loops: list[asyncio.Task[None]] = []

    @property
    def assignment(self) -> tuple[QueueRef, ...]:
        """The queues this member has at the moment, ascending."""
        return tuple(sorted(queue for queue, r in self._runners.items() if r.holding))

    @property
    def verdict(self) -> SubscriptionVerdict:
        """What the group says of this member's subscription; `staged`: it gets no queue yet."""
        return self._membership.verdict

    @property
    def flow(self) -> dict[QueueRef, FlowReason]:
        """The queues that are not pulled at the moment because of a bound, and of which.

        `count`: `buffer_messages_max` messages of the queue wait. `bytes`: `buffer_bytes_max` bytes
        of all queues wait. `span`: a message is not acknowledged, and the queue has gone on for
        `span_max` offsets behind it. `paused`: by `pause`.
        """
        return {queue: r.flow for queue, r in self._runners.items() if r.flow is not None}

    def pause(self, queue: QueueRef) -> None:
        """Pull and hand out no message of a queue until `resume`; what runs, goes on.

        The queue stays ours. One that is not ours waits once it is.
        """
        self._session.paused.add(queue)
        if (runner := self._runners.get(queue)) is not None:
            runner.pause()

    def resume(self, queue: QueueRef) -> None:
        """Go on with a queue."""
        self._session.paused.discard(queue)
        if (runner := self._runners.get(queue)) is not None:
            runner.resume()

    async def __aenter__(self) -> Consumer:
        session = self._session
        try:
            if session.local is not None:
                await session.local.open()
            await self._join()
        except BaseException:
            await self._let_go()
            raise
        if session.metrics is not None:
            session.metrics.watch(ConsumerGauges(self._runners))
        await self._tasks.__aenter__()
        loops = (
            self._calls.run,
            self._membership.run_heartbeats,
            self._membership.run_watch,
            self._leases.run_keep_alives,
            self._leases.run_commits,
        )
        self._loops = [self._tasks.create_task(loop()) for loop in loops]
        if self._stream is not None:
            self._loops.append(self._stream.start(self._tasks))
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
            if self._stream is not None:
                await self._stream.close()
        except BaseException:
            kind, error, trace = sys.exc_info()  # it ends what still runs, not only the loops
            raise
        finally:
            for task in self._loops:
                task.cancel()
            try:
                await self._tasks.__aexit__(kind, error, trace)
            except BaseExceptionGroup as group:
                if (only := only_error(group)) is not error:
                    raise only from None
            finally:
                if self._handling is not None:
                    self._handling.close()
                if self._session.metrics is not None:
                    self._session.metrics.unwatch()
                await self._let_go()

    async def close(self, *, drain_ms: int | None) -> None:
        """Close now, within the block: hand out nothing more, drain, and let the queues go.

        Not for handlers, which it would wait for.

        Args:
            drain_ms: So long handlers may run on, in place of `drain_timeout_ms` of the settings;
                0 waits for none, None for all.
        """
        self._session.drain_timeout_ms = drain_ms
        await self._close()

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
        tally, finished = self._session.tally, self._turns.finish()
        if tally is not None and finished is not None:
            tally.handled(finished.topic, 1, (), self._loop_s() - self._handed_out_s)
        if self._turns.ended:
            await asyncio.sleep(0)
        while not self._stopped.is_set():
            if (message := self._turns.take()) is not None:
                if tally is not None:
                    tally.begun(message.topic, [message.store_unix_ms])
                    self._handed_out_s = self._loop_s()
                return message
            self._session.available.clear()
            await self._session.available.wait()
        raise StopAsyncIteration

    async def run(self, handler: Handler) -> None:
        """Hand every message to `handler` until `stop`.

        Args:
            handler: A coroutine function, or a plain function, which runs in a thread. What it
                returns, None for success, is in `batonmq._consumer.handler_results`. If it raises,
                or takes longer than `handle_timeout_ms`, the message is handled again later as the
                settings say; messages of other queues go on meanwhile.

        Raises:
            MessageFailed: a message has failed too often, and the settings say to stop then.
        """
        await self._run(SingleMessageAdapter(handler))

    async def run_batches(self, handler: BatchHandler, *, messages_max: int = 1_000) -> None:
        """Hand lists of messages to `handler` until `stop`; each of one queue, in order.

        A list has what waits at that moment, at least one message. One that has failed before comes
        in a list of its own, so that it takes no other with it if it fails again.

        Args:
            handler: As for `run`. It returns None when all are handled, or a list with what it has
                to say of each, in order. If it raises, or takes longer than `handle_timeout_ms` for
                the whole list, all have failed; `extend` of any message is for all of the list.
                With `orderly` only what stands before the first failure is handled: the rest is
                handed over again, message by message.
            messages_max: Length of a list, at most.

        Raises:
            MessageFailed: as `run`.
        """
        await self._run(BatchAdapter(handler, messages_max))

    async def _run(self, form: HandlerAdapter) -> None:
        self._handling = MessageDispatcher(
            self._session, form, self._returns, self._tasks, self._stop_failed
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

    @staticmethod
    def _loop_s() -> float:
        return asyncio.get_running_loop().time()

    def _spawn(self, loop: Coroutine[object, object, None]) -> None:
        self._loops.append(self._tasks.create_task(loop))

    async def _join(self) -> None:
        """Join the group; the first member of all creates what it sends back to."""
        session, retries = self._session, retry_topic(self._session.group)
        try:
            await self._membership.join(session.settings.start_timeout_ms)
        except TopicNotFound as error:
            if not session.settings.sends_back or error.detail.topic != retries:
                raise
            await create_retry_topic(session)
            await self._membership.join(session.settings.start_timeout_ms)

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

    def _add_runner(self, queue: QueueRef) -> None:
        if self._session.view.owned and not self._listening:
            self._listening = True
            self._loops.append(self._tasks.create_task(self._notices.run()))
        runner = AssignedQueue(self._session, self._calls, queue)
        self._runners[queue] = runner
        self._turns.add(runner)
        self._tasks.create_task(self._run_queue(runner))
        if self._handling is not None:
            self._handling.begin(runner)

    async def _run_queue(self, runner: AssignedQueue) -> None:
        try:
            await runner.run()
        finally:
            self._turns.remove(runner)
            del self._runners[runner.queue]
            if self._handling is not None:
                self._handling.leave(runner.queue)
            if not self._runners:
                self._emptied.set()
        self._rebalance()

    async def _close(self) -> None:
        """Leave, drain, commit, release: in that order, so that the others wait already."""
        self.stop()
        self._turns.give_up()
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
