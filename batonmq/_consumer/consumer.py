"""The consumer: one member of a consumer group."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from baton.common.v1 import queue_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common.aio import begin_task, only_error
from batonmq._common.client_block import ClientBlock
from batonmq._common.stop_signals import STOP_SIGNALS
from batonmq._connection.directory import ClientEnvironment, Directory
from batonmq._connection.routes import follow_route, queues_of
from batonmq._consumer.ack_committer import AckCommitter
from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.batched_calls import BatchedCalls
from batonmq._consumer.consumer_gauges import ConsumerGauges
from batonmq._consumer.consumer_settings import (
    CONSUME_FROM,
    MODELS,
    ORDERS,
    ConsumerSettings,
    check_transforms,
    retry_policy,
)
from batonmq._consumer.delivery_streams import DeliveryStreams
from batonmq._consumer.handler_adapters import (
    BatchAdapter,
    BatchHandler,
    Handler,
    HandlerAdapter,
    SingleMessageAdapter,
    check_handler,
)
from batonmq._consumer.handler_deadlines import HandlerDeadlines
from batonmq._consumer.handler_results import MessageFailed
from batonmq._consumer.held_messages import HeldMessages
from batonmq._consumer.lease_renewer import LeaseRenewer
from batonmq._consumer.local_offsets import LocalOffsets
from batonmq._consumer.lock_watch import LockWatch
from batonmq._consumer.membership import Membership, SubscriptionVerdict
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.message_dispatcher import MessageDispatcher
from batonmq._consumer.queue_rotation import QueueRotation
from batonmq._consumer.queue_runner import QueueRunner
from batonmq._consumer.reply_sender import ReplySender
from batonmq._consumer.retry_sender import RetrySender, create_group_topic
from batonmq._consumer.session import OwnershipEvent, Session
from batonmq._consumer.transform_adapter import TransformAdapter, TransformHandler
from batonmq._consumer.transformer import Transformer
from batonmq._core.flow_control import FlowReason
from batonmq._core.queues import QueueRef
from batonmq._core.requests import Reply
from batonmq._core.retries import dead_letter_topic, retry_topic
from batonmq._core.subscription import parse_filter
from batonmq._producer.producer import stream_of
from batonmq._telemetry.client_metrics import ClientMetrics, ConsumerMetrics
from batonmq.errors import BadExpression, BatonError, InvalidArgument, TopicNotFound

REPLY_FLUSH_S = 5.0
"""How long a consumer that closes waits for its replies to leave."""
log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from batonmq._telemetry.client_stream import ClientStream
    from batonmq._telemetry.event_counters import ConsumerEventCounter
    from batonmq._telemetry.open_telemetry import OpenTelemetry


class _QueueHandlers(Protocol):
    """What starts and ends the messages of the queues."""

    def begin(self, queue: AssignedQueue) -> None: ...

    def cancel(self, ref: QueueRef) -> None: ...

    def end(self) -> None: ...

    def close(self) -> None: ...


def _reason(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the only error; of several refusals, as of two deleted topics, the first one."""
    only = only_error(group)
    if isinstance(only, BaseExceptionGroup):
        refused = all(isinstance(one, BatonError) for one in only.exceptions)
        return only.exceptions[0] if refused else only
    return only


def _with_retries(
    subscriptions: Mapping[str, str], retries: str, settings: ConsumerSettings
) -> Mapping[str, str]:
    """Return the subscriptions, with that to the retry topic if the settings ask for it.

    Raises:
        InvalidArgument: There is none.
    """
    if not subscriptions:
        raise InvalidArgument(
            "subscriptions is empty: the consumer would get no message",
            remedy='Name a topic: {"orders": "*"}.',
            facts={"field": "subscriptions"},
        )
    return {**subscriptions, retries: "*"} if settings.sends_back else subscriptions


def _ignore(_: OwnershipEvent) -> None:
    return


class Consumer:
    """One member of a consumer group. Use it as an async context manager.

    Each queue of the group's topics is assigned to one member at a time. There are two ways to
    receive messages:

    - Iterate: `async for message in consumer`, in one task. A message is acknowledged when the next
      one is requested. A message that was not acknowledged, as after `break`, is delivered again,
      with `redelivered` set.
    - Pass a handler to `run` or `run_batches`. Messages of one queue are handled one after the
      other, in order, unless `queue_concurrency` is more than 1; `order` says more. A message is
      acknowledged when its handler returns. A message with a failed handler is handled again later,
      by default through the group's retry topic.

    The first SIGTERM or SIGINT stops the consumer (`handle_signals`), and its block is left as
    after `stop`: a deployment needs no code for it.

    Leaving the block closes the consumer: no message is started any more, running handlers end,
    acks are committed, and the queues are released to other members, which continue there. `close`
    does the same within the block, with a drain timeout of its own. If the task is cancelled while
    the block closes, handlers are cancelled and nothing is waited for; other members get the queues
    when their leases expire.

    Args:
        nameserver: host:port of a nameserver; several separated by commas.
        group: 1 to 127 characters of A-Z a-z 0-9 _ % -; created when the first member joins.
        subscriptions: Topic to expression: `*`, tags joined by `||`, or `sql:` and a condition on
            properties, as in `sql: price > 5 AND region IN ('eu', 'us')`. All members of a group
            should have the same subscriptions; if not, the group's policy decides, see `verdict`.
        client_id: Unique within the group, up to 255 visible ASCII characters without `/`; by
            default the host name and a random part.
        on_ownership: Called in the event loop when the ownership of a queue changes.
        metrics: Counts what this consumer does, if given.
        telemetry: Spans and metrics of OpenTelemetry; None for none.
        environment: Clock, random numbers and transport, for tests; signals are left alone then.

    Attributes:
        handles_signals: Whether SIGTERM and SIGINT stop this consumer, see `ConsumerSettings`.

    Raises:
        BadExpression, LimitExceeded: an expression is invalid.
        InvalidArgument: there is no subscription.

    Raises on entering:
        SubscriptionConflict: the group has another subscription; the error names both clients.
        ClientIdInUse: another member of the group had the client id during `start_timeout_ms`.
        TopicNotFound, InvalidName: a topic does not exist, or a name is not valid.
        BadExpression: the group has a subscription that this version of the library can't read.
        Unreachable: no nameserver answered within `start_timeout_ms`.
        DataLoss: the offsets file of a broadcasting member is damaged.
        InvalidArgument: the offsets file can't be read or written, or another process uses it.
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
        telemetry: OpenTelemetry | None = None,
        environment: ClientEnvironment | None = None,
    ) -> None:
        chosen = settings or ConsumerSettings()
        self.handles_signals = chosen.handle_signals and environment is None
        secured = (environment or ClientEnvironment()).secured(chosen.security)
        random, host = secured.random, socket.gethostname()
        incarnation_id = random.getrandbits(63) or 1
        self.client_id = client_id or f"{host}-{incarnation_id:016x}"
        counted = None if metrics is None else ConsumerMetrics(metrics, group, self.client_id)
        self._telemetry = telemetry
        self._stream: ClientStream | None = None
        event_counter: ConsumerEventCounter | None = None
        if chosen.metrics_stream:
            from batonmq._telemetry.event_counters import ConsumerEventCounter  # noqa: PLC0415

            self._stream = stream_of(self.client_id, nameserver, secured)
            event_counter = ConsumerEventCounter(
                self._stream.hub, group, self.client_id, secured.clock
            )
        self._session = Session(
            group=group,
            incarnation=queue_pb2.Incarnation(
                client_id=self.client_id, incarnation_id=incarnation_id
            ),
            settings=chosen,
            directory=Directory(nameserver, random, secured.connect),
            clock=secured.clock,
            random=random,
            on_ownership=on_ownership,
            metrics=counted,
            event_counter=event_counter,
            local=LocalOffsets(Path(chosen.offsets_file), group) if chosen.offsets_file else None,
        )
        subscriptions = _with_retries(subscriptions, retry_topic(group), chosen)
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
            order=ORDERS[chosen.order],
            host=host,
            room=chosen.room,
        )
        self._membership = Membership(self._session, heartbeat, self._rebalance)
        self._queues: dict[QueueRef, AssignedQueue] = {}
        self._routes: dict[str, tuple[QueueRef, ...]] = {}
        self._lock_watch = LockWatch(self._session, self._queues)
        self._calls = BatchedCalls(self._session)
        self._lease_renewer = LeaseRenewer(
            self._session, self._calls, self._queues, self._lock_watch
        )
        self._ack_committer = AckCommitter(self._session, self._queues)
        self._watching_locks = False
        self._retry_sender = RetrySender(self._session, self._spawn)
        self._reply_sender = ReplySender(self._session, self._spawn)
        self._streams = DeliveryStreams(self._session.directory, self._spawn)
        self._dispatcher: _QueueHandlers | None = None
        self._transformer: Transformer | None = None
        self._deadlines: HandlerDeadlines | None = None
        self._handle_timeout_ms = self._session.settings.handle_timeout_ms
        self._failed: MessageFailed | None = None
        self._rotation, self._returned_s = QueueRotation(self._session), 0.0
        self._is_awaited, self._stopped = False, asyncio.Event()
        self._all_released = asyncio.Event()
        self._block, self._tasks = ClientBlock("Consumer"), asyncio.TaskGroup()
        self._loops: list[asyncio.Task[None]] = []

    @property
    def assignment(self) -> tuple[QueueRef, ...]:
        """The queues that this member owns now, ascending."""
        return tuple(sorted(ref for ref, queue in self._queues.items() if queue.held))

    @property
    def verdict(self) -> SubscriptionVerdict:
        """The group's decision on this member's subscription; `staged`: it gets no queue yet."""
        return self._membership.verdict

    @property
    def flow(self) -> dict[QueueRef, FlowReason]:
        """The queues that are not pulled now because of a flow limit, and the limit.

        `count`: `buffer_messages_max` messages of the queue wait, or as many as `span_max` allows
        wait or are in handlers. `bytes`: `buffer_bytes_max` bytes of all queues wait. `span`: a
        message is not acknowledged, and `span_max` offsets behind it were received, of which some
        are handled or filtered. `paused`: by `pause`.
        """
        return {ref: queue.flow for ref, queue in self._queues.items() if queue.flow is not None}

    def pause(self, queue: QueueRef) -> None:
        """Pull and start no message of a queue until `resume`; running handlers continue.

        The consumer keeps the queue. A queue that is not assigned yet is paused once it is. Any
        thread may call this, such as that of a handler.
        """
        if self._block.passes_on(partial(self.pause, queue)):
            return
        self._session.paused.add(queue)
        if (assigned := self._queues.get(queue)) is not None:
            assigned.pause()

    def resume(self, queue: QueueRef) -> None:
        """Pull and start messages of a paused queue again; any thread may call this."""
        if self._block.passes_on(partial(self.resume, queue)):
            return
        self._session.paused.discard(queue)
        if (assigned := self._queues.get(queue)) is not None:
            assigned.resume()

    async def __aenter__(self) -> Consumer:
        self._block.enter()
        session = self._session
        try:
            if session.local is not None:
                await session.local.open()
            await self._join()
        except BaseException:
            self._block.undo()
            await self._close_files()
            raise
        if session.metrics is not None:
            session.metrics.watch(ConsumerGauges(self._queues))
        await self._tasks.__aenter__()
        loops = (
            self._calls.run,
            self._run_heartbeats,
            self._run_watch,
            self._lease_renewer.run,
            self._ack_committer.run,
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
            kind, error, trace = sys.exc_info()  # the task group cancels handlers too
            raise
        finally:
            for task in self._loops:
                task.cancel()
            try:
                await self._tasks.__aexit__(kind, error, trace)
            except BaseExceptionGroup as group:
                if (only := _reason(group)) is not error:
                    raise only from None
            finally:
                STOP_SIGNALS.remove(self)
                if self._dispatcher is not None:
                    self._dispatcher.close()
                if self._session.metrics is not None:
                    self._session.metrics.unwatch()
                await self._close_files()

    async def close(self, *, drain_ms: int | None) -> None:
        """Close now, within the block: start no more messages, drain, and release the queues.

        Do not call this in a handler: it would wait for itself.

        Args:
            drain_ms: How long running handlers may take, instead of `drain_timeout_ms`; 0 cancels
                them at once, None waits until they end.
        """
        self._session.drain_timeout_ms = drain_ms
        await self._close()

    def stop(self) -> None:
        """Start no more messages: `run`, `run_batches` and the iteration end.

        When they have ended, the consumer leaves the group, also if its block continues: other
        members get its queues when the handlers that still run have ended, at the latest after
        `drain_timeout_ms`. A consumer that has stopped can't be started again. Any thread may call
        this, such as that of a handler.
        """
        if self._block.passes_on(self.stop):
            return
        self._stopped.set()
        if self._dispatcher is not None:
            self._dispatcher.end()
        self._session.available.set()

    def __aiter__(self) -> Consumer:
        self._block.check()
        self._handle_signals()
        return self

    async def __anext__(self) -> ReceivedMessage:
        """Acknowledge the previous message and wait for the next.

        Raises:
            InvalidArgument: Another task waits for the next message.
        """
        event_counter, finished = self._session.event_counter, self._rotation.finish()
        if event_counter is not None and finished is not None:
            event_counter.handled(finished.topic, 1, (), self._loop_s() - self._returned_s)
        if self._rotation.run_ended:
            await asyncio.sleep(0)
        while not self._stopped.is_set():
            if (message := self._rotation.take()) is not None:
                if event_counter is not None:
                    event_counter.begun(message.topic, [message.store_unix_ms])
                    self._returned_s = self._loop_s()
                if self._telemetry is not None:
                    self._telemetry._receive(message, self._session.group, self.client_id)
                return message
            self._block.check()
            with self._waiting_alone():
                self._session.available.clear()
                await self._session.available.wait()
        self._leave_soon()
        raise StopAsyncIteration

    @contextmanager
    def _waiting_alone(self) -> Iterator[None]:
        """Refuse a second task: it would acknowledge the message that the first one handles."""
        if self._is_awaited:
            raise InvalidArgument(
                "another task iterates over this consumer",
                remedy="Iterate in one task. For several messages at a time use run, with "
                "`concurrency` in the settings.",
            )
        self._is_awaited = True
        try:
            yield
        finally:
            self._is_awaited = False

    def reply(self, message: ReceivedMessage, reply: Reply | bytes) -> None:
        """Start to send the reply to a request; for consumers that iterate.

        Handlers return their replies instead. The reply is not stored: if it is lost, the request
        times out.

        Raises:
            InvalidArgument: The message is not a request.
            LimitExceeded: The body is too long.
        """
        if isinstance(reply, bytes):
            reply = Reply(reply)
        if not self._reply_sender.send(message, reply):
            raise InvalidArgument(
                f"{message!r} is not a request",
                remedy="Reply to messages of Producer.request only: see ReceivedMessage.is_request",
                facts={"field": "message"},
            )

    async def run(self, handler: Handler, *, inline: bool = False) -> None:
        """Call `handler` with every message until `stop`.

        If the call is cancelled, the consumer stops. A consumer that has stopped starts no more
        messages: another call returns at once.

        Args:
            handler: A coroutine function, or a plain function, which runs in a thread. It returns
                None for success, a `RetryLater` or `Suspend`, or a `Reply` or bytes, which are the
                reply if the message is a request. If it raises, or takes longer than
                `handle_timeout_ms`, the message is handled again later as the settings say; other
                queues continue meanwhile.
            inline: Call a plain function in the event loop and not in a thread. This is the fastest
                form, for functions that take microseconds: nothing else runs meanwhile, not even
                the keep-alives of this consumer, and `handle_timeout_ms` does not end the call.

        Raises:
            InvalidArgument: The handler can't be called, another handler runs, or the consumer is
                not in its block.
            MessageFailed: a message failed too often, and `exhausted` is `stop`.
        """
        await self._run(SingleMessageAdapter(handler, inline=inline))

    async def run_batches(self, handler: BatchHandler, *, messages_max: int = 1_000) -> None:
        """Call `handler` with batches of messages until `stop`; each is of one queue, in order.

        A batch holds the messages that wait at that moment, at least one. A message that has failed
        before is in a batch of its own: if it fails again, no other message fails with it.

        Args:
            handler: As for `run`. It returns None when all messages are handled, or a list with one
                result for each message, in order. If it raises, or takes longer than
                `handle_timeout_ms` for the whole batch, all its messages have failed; `extend` of
                one message extends the time of the batch. With `order` `queue` only the messages
                before the first failure are handled: the rest is handled again, message by message.
            messages_max: Messages of a batch, at most.

        Raises:
            InvalidArgument: `order` is `key`: a batch would have messages of keys that must wait.
            MessageFailed: a message failed too often, and `exhausted` is `stop`.
        """
        if self._session.settings.order == "key":
            raise InvalidArgument(
                "run_batches is not possible with order 'key'",
                remedy="Use run, which handles messages of different keys side by side.",
                facts={"field": "order"},
            )
        await self._run(BatchAdapter(handler, messages_max))

    async def transform(self, handler: TransformHandler, *, to: str | Sequence[str]) -> None:
        """Call `handler` with every message, and store what it returns, until `stop`.

        Each output is stored once for its input, whatever dies, and the input is acknowledged when
        its outputs are stored. Outputs of one queue with the same ordering key keep the order of
        their inputs.

        Args:
            handler: As for `run`, but it returns the outputs: None, bytes, an `Output`, or several
                of these; it may also yield them. It must be deterministic: the same message must
                give the same outputs in the same order, also in another process.
            to: The output topics. They must exist.

        Raises:
            InvalidArgument: The settings send failed messages back, or are those of a broadcasting
                member: set `send_back=False`, or an `order`.
            TopicNotFound: An output topic does not exist.
            MessageFailed: A message failed too often, and `exhausted` is `stop`.
        """
        self._block.check()
        topics = (to,) if isinstance(to, str) else tuple(dict.fromkeys(to))
        settings = self._session.settings
        check_transforms(settings, topics)
        policy, dead_letters = retry_policy(settings), ""
        if policy.retries_max is not None and policy.exhausted == "dead_letter":
            dead_letters = dead_letter_topic(self._session.group)
            await create_group_topic(self._session, dead_letters)
        transformer = Transformer(self._session, topics, dead_letters, self._spawn)
        await transformer.begin()
        await self._run(TransformAdapter(handler, topics), transformer)

    async def _run(self, adapter: HandlerAdapter, transformer: Transformer | None = None) -> None:
        self._block.check()
        check_handler(adapter.handler)
        if self._stopped.is_set():
            self._leave_soon()
            return
        if self._dispatcher is not None:
            raise InvalidArgument(
                "the consumer has a handler already",
                remedy="Use another consumer of the group for another handler.",
                facts={"field": "handler"},
            )
        if self._telemetry is not None:
            from batonmq._consumer.traced_handlers import trace_calls  # noqa: PLC0415

            trace_calls(adapter, self._telemetry, self._session.group, self.client_id)
        dispatcher = MessageDispatcher(
            self._session,
            adapter,
            self._retry_sender,
            self._reply_sender,
            self._tasks,
            self._stop_failed,
            transformer,
            self._tasks_end,
        )
        self._deadlines, self._transformer = dispatcher.deadlines, transformer
        self._deadlines.set(self._handle_timeout_ms)
        self._handle_signals()
        self._begin(dispatcher)
        try:
            await self._stopped.wait()
        except asyncio.CancelledError:
            self.stop()  # else the handler would go on without a caller
            raise
        finally:
            self._leave_soon()
        if self._failed is not None:
            raise self._failed

    def _begin(self, handlers: _QueueHandlers) -> None:
        self._dispatcher = handlers
        for queue in self._queues.values():
            handlers.begin(queue)

    @property
    def handle_timeout_ms(self) -> int | None:
        """How long a handler may take; a change applies at once, also to running handlers."""
        return self._handle_timeout_ms

    @handle_timeout_ms.setter
    def handle_timeout_ms(self, timeout_ms: int | None) -> None:
        self._handle_timeout_ms = timeout_ms
        if self._deadlines is not None:
            self._deadlines.set(timeout_ms)

    def _handle_signals(self) -> None:
        if self.handles_signals:
            loop = asyncio.get_running_loop()
            STOP_SIGNALS.add(self, lambda: loop.call_soon_threadsafe(self.stop_by_signal))

    def stop_by_signal(self) -> None:
        """Stop because a signal asked the program to end."""
        log.info("stopping by a signal, a second one ends the program at once")
        self.stop()

    def _tasks_end(self) -> bool:
        """Whether the tasks of this consumer are being cancelled: its calls run as long as it."""
        calls = self._loops[0]
        return calls.done() or calls.cancelling() > 0

    def _stop_failed(self, failed: MessageFailed) -> None:
        self._failed = failed
        self.stop()

    @staticmethod
    def _loop_s() -> float:
        return asyncio.get_running_loop().time()

    def _spawn(self, loop: Coroutine[object, object, None]) -> None:
        task = begin_task(self._tasks, loop)
        self._loops.append(task)
        task.add_done_callback(self._loops.remove)

    async def _join(self) -> None:
        """Join the group; the first member creates the group's retry topic."""
        session, retries = self._session, retry_topic(self._session.group)
        try:
            try:
                await self._membership.join(session.settings.start_timeout_ms)
            except TopicNotFound as error:
                if not session.settings.sends_back or error.detail.topic != retries:
                    raise
                await create_group_topic(session, retries)
                await self._membership.join(session.settings.start_timeout_ms)
        except BadExpression:
            await self._membership.leave()  # it has joined, and can't read the group's record
            raise

    async def _follow(self, topic: str) -> None:
        """Follow a topic's route; end the consumer with TopicNotFound when it is deleted.

        A consumer that leaves the group needs it no longer.
        """
        try:
            await follow_route(self._session.directory, topic, self._apply_route)
        except TopicNotFound:
            if not self._session.leaving:
                await self._release_all()
                raise

    async def _run_heartbeats(self) -> None:
        """Send heartbeats.

        Raises:
            TopicNotFound, BadExpression: see `Membership.run_heartbeats`; the queues are released.
        """
        try:
            await self._membership.run_heartbeats()
        except (TopicNotFound, BadExpression):
            if not self._session.leaving:
                await self._release_all()
                raise

    async def _run_watch(self) -> None:
        """Follow the group's record.

        Raises:
            BadExpression: see `Membership.run_watch`; the queues are released.
        """
        try:
            await self._membership.run_watch()
        except BadExpression:
            if not self._session.leaving:
                await self._release_all()
                raise

    def _apply_route(self, route: pb.Route) -> None:
        """Read all queues of the route, as a broadcasting member does."""
        local, topic = self._session.local, route.topic
        if local is not None:
            refs = self._routes[topic.name] = queues_of(route)
            if local.note_topic(topic.name, topic.topic_id, refs):
                for queue in self._queues.values():
                    if queue.ref.topic == topic.name:
                        queue.reset()
            self._rebalance()

    def _rebalance(self) -> None:
        """Revoke the queues that are not assigned any more, and begin with those that are new.

        The queues that stay are not touched: their pulls and handlers continue. A consumer that has
        stopped begins with none.
        """
        view = self._session.view
        if self._session.leaving or not view.member or not self._loops:
            return
        assigned = view.assigned.union(*self._routes.values())
        for ref, queue in self._queues.items():
            if queue.with_ownership != view.owned:
                queue.change_mode()
            elif ref in assigned:
                queue.wakeup.notify()
            else:
                queue.revoke()
        for ref in () if self._stopped.is_set() else sorted(assigned - self._queues.keys()):
            self._add_queue(ref)

    def _add_queue(self, ref: QueueRef) -> None:
        if self._session.view.owned and not self._watching_locks:
            self._watching_locks = True
            self._loops.append(self._tasks.create_task(self._lock_watch.run()))
        queue = AssignedQueue(self._session, ref)
        self._queues[ref] = queue
        self._rotation.add(queue)
        self._tasks.create_task(self._run_queue(queue))
        if self._dispatcher is not None:
            self._dispatcher.begin(queue)

    async def _run_queue(self, queue: AssignedQueue) -> None:
        try:
            await QueueRunner(self._session, self._calls, self._streams, queue).run()
        finally:
            self._rotation.remove(queue)
            del self._queues[queue.ref]
            if self._dispatcher is not None:
                self._dispatcher.cancel(queue.ref)
            if not self._queues:
                self._all_released.set()
        self._rebalance()

    def _leave_soon(self) -> None:
        """Begin to leave the group: the queues must not wait for the end of the block."""
        if self._loops and not self._session.leaving and not self._tasks_end():
            self._spawn(self._release_all())

    async def _close(self) -> None:
        """Stop, leave the group, and release all queues."""
        self.stop()
        self._rotation.give_up()
        await self._release_all()
        await self._reply_sender.flush(REPLY_FLUSH_S)

    async def _release_all(self) -> None:
        """Leave the group, then drain, commit and release.

        In that order the members that get the queues wait for them already.
        """
        self._session.leaving = True
        for queue in self._queues.values():
            queue.revoke()
        await self._membership.leave()
        while self._queues:
            self._all_released.clear()
            await self._all_released.wait()
        await self._calls.release_rest()

    async def _close_files(self) -> None:
        try:
            if self._session.local is not None:
                await self._session.local.close()
        finally:
            await self._session.directory.close()


def hold_messages(consumer: Consumer, on_dropped: Callable[[QueueRef], None]) -> HeldMessages:
    """Start the messages of a consumer for holders outside of it; not for applications.

    Args:
        consumer: In its block; neither `run` nor the iteration is used.
        on_dropped: Called with a queue whose held messages do not count any more.
    """
    held = HeldMessages(consumer._session, consumer._retry_sender, on_dropped)
    consumer._begin(held)
    return held
