"""The gateway as a member of one consumer group, on behalf of the group's remote clients.

The messages of the queues that the gateway owns wait in its consumer until a client asks for some.
Then they are started under the gateway's token, and leased. An acknowledgement is answered when
offsets has it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple

from apache.rocketmq.v2 import definition_pb2 as pb
from batonmq._common.aio import only_error, wait_until
from batonmq._consumer.consumer import Consumer, hold_messages
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.held_messages import HeldMessage, HeldMessages
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.session import OwnershipEvent
from batonmq._core.queues import QueueRef
from batonmq._core.retries import HandlingFailure, retry_topic
from batonmq._core.subscription import parse_filter
from batonmq.errors import BatonError, Fenced, NotServing, TopicNotFound
from batonmq_server.gateway.core.message_leases import LeaseTerms, MessageLease, QueueLeases
from batonmq_server.gateway.core.receipt_handles import ReceiptHandle
from batonmq_server.gateway.gateway_parts import GatewayParts
from batonmq_server.gateway.statuses import NotHeld, Refused

log = logging.getLogger(__name__)

BACKLOG_MAX = 1_000
"""Messages of one queue that are started and can't be leased yet, at most: those behind an earlier
message of their message group."""
BATCH_BYTES_MAX = 4 * 1024 * 1024
"""A batch of deliveries with more bytes of bodies gets no more messages."""
TERMINATED_MS = 1_000
"""Renewed leases of a client that has ended expire after this time."""
COMMIT_INTERVAL_MS = 500
REJOIN_MS = 1_000
ENDED_MAX = 4_096
"""Acknowledged deliveries of one queue that are remembered, for repeated calls."""
ATTEMPTS_MAX = 4_096
"""Answers to receive calls that are remembered, in case that a client repeats its call."""
TOPIC_IDLE_TIMES = 15
"""A topic that no client has used for so many times `group_idle_ms` leaves the subscription. With
the default it is 15 minutes: official clients send their subscriptions every 5 minutes."""
EXPRESSION_AGE_MS = 60_000
"""An expression that no client has used for this long may be replaced by another one."""


@dataclass(slots=True)
class Delivery:
    """A message as it is leased, at the moment of the lease."""

    message: ReceivedMessage
    queue: QueueRef
    offset: int
    serial: int
    attempt: int
    terms: LeaseTerms
    expires_ms: int


@dataclass(frozen=True, slots=True)
class _Ending:
    """An acknowledgement that offsets does not have yet.

    Attributes:
        serial: Number of the delivery.
        answer: Done when offsets has it; it fails if the queue is lost before.
        dead: Whether the message is stored among the dead letters.
    """

    serial: int
    answer: asyncio.Future[None]
    dead: bool


@dataclass(slots=True)
class _QueuePool:
    """The started messages of one queue that were sent to one topic.

    Attributes:
        ending: Acknowledgements that offsets does not have yet, by offset.
        burials: Forwarded messages on their way to the dead letters, by offset.
        ended: Acknowledged offsets and the numbers of their deliveries, oldest first.
    """

    ref: QueueRef
    leases: QueueLeases
    held: dict[int, HeldMessage] = field(default_factory=dict)
    ending: dict[int, _Ending] = field(default_factory=dict)
    burials: dict[int, _Ending] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)

    def lose(self) -> None:
        """Forget everything; acknowledgements that are not durable yet are refused."""
        for one in self.ending.values():
            if not one.answer.done():
                one.answer.set_exception(Fenced("the queue was lost"))
        self.ending.clear()
        self.held.clear()


@dataclass(slots=True, eq=False)
class _Waiter:
    """A receive call that waits for messages."""

    topic: str
    count_max: int
    terms: LeaseTerms
    batch: asyncio.Future[list[Delivery]]


class _Answered(NamedTuple):
    """The last answer to the receive calls of a client for a topic.

    Attributes:
        attempt_id: Id of the call; a client repeats it if it got no answer.
    """

    attempt_id: str
    deliveries: Sequence[tuple[QueueRef, int, int]]
    """Queue, offset and number of each."""


@dataclass(slots=True)
class _Subscription:
    """The filter expression of one topic, and the client that used it last."""

    expression: str
    client_id: str
    used_ms: int


class GroupConsumer:
    """One group of this gateway.

    Attributes:
        member_id: Client id under which the gateway is a member; empty if it is none.
        over: Set when the gateway has left the group.
    """

    def __init__(self, group: str, parts: GatewayParts) -> None:
        self.group, self._parts = group, parts
        self._clock, self._settings = parts.environment.clock, parts.settings
        self._subscriptions: dict[str, _Subscription] = {}
        self._pools: dict[QueueRef, dict[str, _QueuePool]] = {}
        self._waiters: dict[str, deque[_Waiter]] = {}
        self._answered: dict[tuple[str, str], _Answered] = {}
        self._held: HeldMessages | None = None
        self._failure: BatonError | None = None
        self._changed = asyncio.Event()
        self._used_ms = self._clock.monotonic_ms()
        self._turn = 0
        self._stopping = False
        self.member_id = ""
        self.over = asyncio.Event()

    # ---- what clients want

    @property
    def leased_count(self) -> int:
        """Number of messages that clients hold."""
        return sum(pool.leases.leased_count for pool in self._each_pool())

    @property
    def waiting_count(self) -> int:
        """Number of receive calls that wait."""
        return sum(map(len, self._waiters.values()))

    def leases(self) -> Iterator[tuple[QueueRef, QueueLeases]]:
        """Yield the leases of each queue; a queue of retries may have several parts, by topic."""
        for pool in self._each_pool():
            yield pool.ref, pool.leases

    def oldest_lease_ms(self) -> int | None:
        """Return when the oldest delivery that a client holds began."""
        begins = (pool.leases.oldest_lease_ms() for pool in self._each_pool())
        return min((one for one in begins if one is not None), default=None)

    def subscribes(self, topic: str) -> bool:
        """Whether the topic is part of the subscription."""
        return topic in self._subscriptions

    def subscribe(self, topic: str, expression: str, client_id: str) -> None:
        """Make a topic part of the group's subscription.

        Raises:
            Refused: The expression is not valid, or another client uses another one.
        """
        try:
            wanted = parse_filter(expression).canonical()
        except BatonError as error:
            raise Refused(
                pb.ILLEGAL_FILTER_EXPRESSION, f"{error.message}. {error.remedy}"
            ) from error
        now_ms = self._clock.monotonic_ms()
        self._used_ms = now_ms
        known = self._subscriptions.get(topic)
        if known is not None and known.expression == wanted:
            known.used_ms, known.client_id = now_ms, client_id
            return
        if (
            known is not None
            and known.client_id != client_id
            and now_ms - known.used_ms < EXPRESSION_AGE_MS
        ):
            raise Refused(
                pb.ILLEGAL_FILTER_EXPRESSION,
                f"group {self.group} subscribes to topic {topic} with {known.expression!r}, as "
                f"client {known.client_id} does; {wanted!r} would drop messages that it wants. Use "
                "one expression in all clients of a group, or another group",
            )
        self._subscriptions[topic] = _Subscription(wanted, client_id, now_ms)
        self._failure = None
        self._changed.set()

    async def receive(
        self, topic: str, count_max: int, terms: LeaseTerms, wait_ms: int, attempt_id: str = ""
    ) -> list[Delivery]:
        """Lease messages of a topic; wait up to `wait_ms` for the first one.

        Args:
            attempt_id: Id that the client gives to its call, and again if it has got no answer:
                then what that answer had is leased again, one message at a time, as the client may
                be unable to read one of them. Empty for none.

        Raises:
            BatonError: The gateway is no member of the group, and why.
        """
        key = terms.client_id, topic
        answered = self._answered.get(key)
        if attempt_id and answered is not None and answered.attempt_id == attempt_id:
            self._lapse(topic, answered)
            count_max = 1
        batch = await self._lease(topic, count_max, terms, wait_ms)
        if attempt_id and batch:
            self._answered.pop(key, None)
            self._answered[key] = _Answered(
                attempt_id, [(one.queue, one.offset, one.serial) for one in batch]
            )
            if len(self._answered) > ATTEMPTS_MAX:
                del self._answered[next(iter(self._answered))]
        return batch

    def _lapse(self, topic: str, answered: _Answered) -> None:
        """Let the leases of an answer expire that has not reached its client."""
        now_ms = self._clock.monotonic_ms()
        for ref, offset, serial in answered.deliveries:
            pool = self._find_pool(ref, topic)
            if pool is not None:
                pool.leases.lapse(offset, serial, now_ms)
        if self._held is not None:
            self._expire(self._held)

    async def _lease(
        self, topic: str, count_max: int, terms: LeaseTerms, wait_ms: int
    ) -> list[Delivery]:
        waiters = self._waiters.setdefault(topic, deque())
        if not waiters and (batch := self._collect(topic, count_max, terms)):
            return batch
        if self._failure is not None:
            raise self._failure
        waiter = _Waiter(topic, count_max, terms, asyncio.get_running_loop().create_future())
        waiters.append(waiter)
        try:
            await asyncio.wait({waiter.batch}, timeout=wait_ms / 1_000)
        except asyncio.CancelledError:
            if waiter.batch.done() and waiter.batch.exception() is None:
                self.undo(waiter.batch.result())
            raise
        finally:
            self._used_ms = self._clock.monotonic_ms()
            if waiter in waiters:
                waiters.remove(waiter)
        return waiter.batch.result() if waiter.batch.done() else []

    def handed_out(self, one: Delivery) -> None:
        """Note that a delivery left for its client."""
        message, events = one.message, self._parts.events
        events.handed_out(
            self.group,
            one.queue,
            one.offset,
            token=message.token,
            client_id=one.terms.client_id,
            attempt=one.attempt,
        )
        if one.attempt == 1:
            events.begun(self.group, message.topic, message.store_unix_ms)

    def undo(self, deliveries: Sequence[Delivery], begun_count: int = 0) -> None:
        """Take back the deliveries of a receive call that has failed.

        Its client drops those that arrived, as it has no end of the answer.

        Args:
            begun_count: The first ones that were sent, or were on their way. Their attempts count:
                a client that can't read a message, such as a large one, ends the call each time.
        """
        now_ms = self._clock.monotonic_ms()
        for number, one in enumerate(deliveries):
            pool = self._find_pool(one.queue, one.message.topic)
            if pool is None:
                continue
            if number < begun_count:
                pool.leases.lapse(one.offset, one.serial, now_ms)
            else:
                pool.leases.undo(one.offset, one.serial)
        self._wake()

    def acknowledge(self, handle: ReceiptHandle, topic: str) -> asyncio.Future[None]:
        """Acknowledge a delivery; a repeated call has the outcome of the first one.

        Returns:
            A future that is done when offsets has the acknowledgement; do not cancel it.

        Raises:
            Refused: The client does not hold the message by this handle.
        """
        pool = self._pool_of(handle, topic)
        if pool is not None:
            offset, serial = handle.offset, handle.serial
            if (ending := pool.ending.get(offset)) is not None and ending.serial == serial:
                return ending.answer
            if pool.ended.get(offset) == serial:
                done = asyncio.get_running_loop().create_future()
                done.set_result(None)
                return done
            if pool.leases.begin_end(offset, serial, self._clock.monotonic_ms()):
                return self._end(pool, offset, serial)
        raise self._not_held(handle)

    def change(self, handle: ReceiptHandle, topic: str, hold_ms: int) -> MessageLease:
        """Let the lease of a delivery expire `hold_ms` from now.

        Raises:
            Refused: The client does not hold the message by this handle.
        """
        pool = self._pool_of(handle, topic)
        now_ms = self._clock.monotonic_ms()
        lease = None
        if pool is not None:
            lease = pool.leases.change(handle.offset, handle.serial, now_ms, hold_ms)
        if lease is None:
            raise self._not_held(handle)
        self._wake()
        return lease

    async def forward(self, handle: ReceiptHandle, topic: str) -> None:
        """Store a held message among the dead letters of the group, and acknowledge it.

        A repeated call has the outcome of the first one.

        Raises:
            NotHeld: The client does not hold the message by this handle.
            NotServing: The queue was lost before that; the message is redelivered.
            Fenced: As before, but the message is stored among the dead letters.
        """
        pool = self._pool_of(handle, topic)
        if pool is None:
            raise self._not_held(handle)
        offset, serial = handle.offset, handle.serial
        burial = pool.burials.get(offset)
        if burial is None or burial.serial != serial:
            if pool.ended.get(offset) == serial:
                return
            if not pool.leases.begin_end(offset, serial, self._clock.monotonic_ms()):
                raise self._not_held(handle)
            burial = self._begin_burial(pool, offset, serial)
        await asyncio.wait({burial.answer})
        burial.answer.result()

    def _begin_burial(self, pool: _QueuePool, offset: int, serial: int) -> _Ending:
        failure = HandlingFailure("failed", "the client forwarded it to the dead letters")
        ended = asyncio.get_running_loop().create_future()
        ended.add_done_callback(_retrieve)
        ended.add_done_callback(lambda _: pool.burials.pop(offset, None))
        # In a task of its own: a client that goes must not leave the message without an outcome.
        self._parts.spawn(self._bury(pool, offset, serial, failure, ended))
        burial = pool.burials[offset] = _Ending(serial, ended, dead=True)
        return burial

    def terminated(self, client_id: str) -> None:
        """Let the renewed leases of a client that has ended expire soon."""
        at_ms = self._clock.monotonic_ms() + TERMINATED_MS
        for pool in self._each_pool():
            pool.leases.expire_soon(client_id, at_ms)
        self._wake()

    # ---- membership

    async def run(self) -> None:
        """Be a member while clients receive; run it as one task."""
        try:
            while not self._stopping and self._subscriptions:
                self._changed.clear()
                wanted = self._expressions()
                try:
                    await self._be_member(wanted)
                except BatonError as error:
                    log.warning("group not joined group=%s error=%s", self.group, error)
                    if isinstance(error, TopicNotFound) and self._lose(error.detail.topic, error):
                        continue
                    self._fail(error)
                    await wait_until(self._changed, REJOIN_MS)
                    self._drop_unused_topics()
                    if self._is_idle():
                        self._subscriptions.clear()
        finally:
            self._fail(NotServing("the gateway left the group", retry_after_ms=500))
            self.over.set()

    def stop(self) -> None:
        """Give no more messages, and leave the group when clients have ended what they hold."""
        self._stopping = True
        self._changed.set()
        self._fail(NotServing("the gateway is stopping", retry_after_ms=500))

    def _expressions(self) -> Mapping[str, str]:
        return {topic: one.expression for topic, one in self._subscriptions.items()}

    async def _be_member(self, wanted: Mapping[str, str]) -> None:
        """Be a member with this subscription until another one is wanted, or the group is idle."""
        settings, environment = self._settings, self._parts.environment
        member_id = f"{settings.node_id}-{environment.random.getrandbits(64):016x}"
        consumer = Consumer(
            self._parts.nameserver,
            self.group,
            wanted,
            ConsumerSettings(
                consume_from=settings.consume_from,
                span_max=settings.in_flight_max,
                commit_interval_ms=COMMIT_INTERVAL_MS,
                drain_timeout_ms=settings.drain_timeout_ms,
                retries_max=settings.delivery_attempts_max - 1,
            ),
            client_id=member_id,
            on_ownership=self._note_ownership,
            environment=environment,
        )
        pump: asyncio.Task[None] | None = None
        try:
            async with consumer:
                self._held = hold_messages(consumer, self._drop)
                self._failure, self.member_id = None, member_id
                pump = self._parts.spawn(self._pump(self._held))
                while not self._stopping and self._expressions() == wanted:
                    await wait_until(self._changed, settings.group_idle_ms // 4)
                    self._changed.clear()
                    self._drop_unused_topics()
                    if self._is_idle():
                        log.info("group is left, no client receives group=%s", self.group)
                        self._subscriptions.clear()
        except BaseExceptionGroup as group:
            raise only_error(group) from None
        finally:
            self._held, self.member_id = None, ""
            if pump is not None:
                pump.cancel()

    def _drop_unused_topics(self) -> None:
        """Forget the topics that no client uses any more.

        Their queues would be owned, and no client would get their messages. And a gateway that
        starts later, without them, would be refused as a member.
        """
        used_since_ms = self._clock.monotonic_ms() - TOPIC_IDLE_TIMES * self._settings.group_idle_ms
        for topic, one in list(self._subscriptions.items()):
            pools = (pools.get(topic) for pools in self._pools.values())
            held = any(pool is not None and pool.leases.leased_count for pool in pools)
            if one.used_ms < used_since_ms and not held and not self._waiters.get(topic):
                log.info("no client uses the topic group=%s topic=%s", self.group, topic)
                del self._subscriptions[topic]

    def _is_idle(self) -> bool:
        """Whether the group may be left.

        Messages that no client holds any more keep it only while a client lives that may ask for
        them: otherwise other members would never get the queues.
        """
        idle_ms = self._clock.monotonic_ms() - self._used_ms
        if idle_ms < self._settings.group_idle_ms or self.waiting_count or self.leased_count:
            return False
        started = any(len(pool.leases) for pool in self._each_pool())
        return not (started and self._parts.clients.consumes(self.group))

    def _lose(self, topic: str, error: BatonError) -> bool:
        """Go on without a topic that was deleted; return whether the group subscribed to it."""
        self._fail_waiters(self._waiters.get(topic, deque()), error)
        return self._subscriptions.pop(topic, None) is not None

    def _fail(self, error: BatonError) -> None:
        """Fail the receive calls that wait, and those that come, until the group is joined."""
        self._failure = error
        for waiters in self._waiters.values():
            self._fail_waiters(waiters, error)

    @staticmethod
    def _fail_waiters(waiters: deque[_Waiter], error: BatonError) -> None:
        for waiter in waiters:
            if not waiter.batch.done():
                waiter.batch.set_exception(error)
        waiters.clear()

    def _note_ownership(self, event: OwnershipEvent) -> None:
        if event.kind == "draining":
            self._withdraw(event.queue)
        elif event.kind == "fenced":
            self._give_up(event.queue)
        self._wake()

    def _give_up(self, ref: QueueRef) -> None:
        """Give up all messages of a queue whose token is lost: no handle is honoured any more.

        A handler would go on under the next token of its consumer (protocol section 11). A client
        must not: another gateway may have delivered and ended its messages meanwhile.
        """
        for pool in self._pools.pop(ref, {}).values():
            for offset, one in pool.held.items():
                if offset not in pool.ending and self._held is not None:
                    self._held.give_up(one)
            pool.lose()

    def _withdraw(self, ref: QueueRef) -> None:
        """Give up what no client holds of a queue that is handed over."""
        for pool in list(self._pools.get(ref, {}).values()):
            for offset in pool.leases.withdraw():
                if self._held is not None:
                    self._held.give_up(pool.held.pop(offset))

    def _drop(self, ref: QueueRef) -> None:
        """Forget a queue whose held messages do not count any more."""
        for pool in self._pools.pop(ref, {}).values():
            pool.lose()

    # ---- deliveries

    async def _pump(self, held: HeldMessages) -> None:
        """Serve the calls that wait, and expire leases, until cancelled."""
        while True:
            held.available.clear()
            self._expire(held)
            self._serve()
            ends = (pool.leases.next_expiry_ms() for pool in self._each_pool())
            end_ms = min((one for one in ends if one is not None), default=None)
            if end_ms is None:
                await held.available.wait()
            else:
                await wait_until(held.available, max(0, end_ms - self._clock.monotonic_ms()))

    def _wake(self) -> None:
        if self._held is not None:
            self._held.available.set()

    def _serve(self) -> None:
        for topic, waiters in self._waiters.items():
            while waiters:
                waiter = waiters[0]
                if not waiter.batch.done():
                    batch = self._collect(topic, waiter.count_max, waiter.terms)
                    if not batch:
                        break
                    waiter.batch.set_result(batch)
                waiters.popleft()

    def _collect(self, topic: str, count_max: int, terms: LeaseTerms) -> list[Delivery]:
        """Lease messages of a topic, of all queues in turn."""
        held = self._held
        if held is None or self._stopping:
            return []
        retries, now_ms = retry_topic(self.group), self._clock.monotonic_ms()
        refs = [ref for ref in held.queues if ref.topic in (topic, retries)]
        self._turn += 1
        begin = self._turn % len(refs) if refs else 0
        batch: list[Delivery] = []
        size = 0
        for ref in refs[begin:] + refs[:begin]:
            if len(batch) >= count_max or size >= BATCH_BYTES_MAX:
                break
            if not held.queues[ref].may_start():
                continue
            self._fill(held, ref, topic, count_max - len(batch))
            pool = self._find_pool(ref, topic)
            while pool is not None and len(batch) < count_max and size < BATCH_BYTES_MAX:
                leased = pool.leases.lease(1, now_ms, terms, with_others=bool(batch))
                if not leased:
                    break
                (lease,) = leased
                if lease.alone:
                    count_max = 1
                message = pool.held[lease.offset].message
                size += len(message.body)
                batch.append(
                    Delivery(
                        message,
                        ref,
                        lease.offset,
                        lease.serial,
                        lease.attempt,
                        terms,
                        lease.expires_ms,
                    )
                )
        if batch:
            self._wake()  # the first lease may expire before what the pump waits for
        return batch

    def _fill(self, held: HeldMessages, ref: QueueRef, topic: str, wanted: int) -> None:
        """Start messages of a queue until `wanted` of a topic may be leased."""
        backlog = self._backlog(ref)
        while backlog < BACKLOG_MAX:
            pool = self._find_pool(ref, topic)
            if pool is not None and pool.leases.ready_count >= wanted:
                return
            taken = held.take(ref)
            if taken is None:
                return
            backlog += 1
            message = taken.message
            of_topic = self._pool(ref, message.topic)
            of_topic.held[message.offset] = taken
            before = message.attempts - 1 + int(message.redelivered)
            of_topic.leases.add(message.offset, before, message.ordering_key or "")

    def _backlog(self, ref: QueueRef) -> int:
        pools = self._pools.get(ref, {}).values()
        return sum(len(pool.leases) - pool.leases.leased_count for pool in pools)

    def _each_pool(self) -> Iterator[_QueuePool]:
        return chain.from_iterable(pools.values() for pools in self._pools.values())

    def _find_pool(self, ref: QueueRef, topic: str) -> _QueuePool | None:
        return self._pools.get(ref, {}).get(topic)

    def _pool(self, ref: QueueRef, topic: str) -> _QueuePool:
        pools = self._pools.setdefault(ref, {})
        pool = pools.get(topic)
        if pool is None:
            leases = QueueLeases(self._settings.delivery_attempts_max, self._parts.serials)
            pool = pools[topic] = _QueuePool(ref, leases)
        return pool

    def _pool_of(self, handle: ReceiptHandle, topic: str) -> _QueuePool | None:
        if handle.gateway != self._settings.node_id:
            return None
        return self._find_pool(handle.queue, topic)

    def _not_held(self, handle: ReceiptHandle) -> NotHeld:
        own = self._settings.node_id
        where = f", by gateway {handle.gateway}; this is {own}" if handle.gateway != own else ""
        return NotHeld(
            f"the message at offset {handle.offset} of {handle.queue} is not held by this handle "
            f"any more (attempt {handle.attempt}, token {handle.token}{where}). It was "
            "acknowledged, or its invisible duration is over, and it is delivered again with a new "
            "handle",
        )

    def _expire(self, held: HeldMessages) -> None:
        now_ms = self._clock.monotonic_ms()
        for pool in list(self._each_pool()):
            for lease in pool.leases.expire(now_ms, self._parts.clients.may_renew):
                failure = HandlingFailure(
                    "timeout", "not acknowledged within its invisible duration"
                )
                ended = asyncio.get_running_loop().create_future()
                ended.add_done_callback(_retrieve)
                self._parts.spawn(self._bury(pool, lease.offset, lease.serial, failure, ended))
            queue = held.queues.get(pool.ref)
            if queue is not None and not queue.assigned:
                self._withdraw(pool.ref)

    async def _bury(
        self,
        pool: _QueuePool,
        offset: int,
        serial: int,
        failure: HandlingFailure,
        ended: asyncio.Future[None],
    ) -> None:
        """Store a message among the dead letters, then acknowledge it."""
        held, one = self._held, pool.held.get(offset)
        if held is None or one is None or not await held.dead_letter(one, failure):
            ended.set_exception(NotServing("the queue was lost; the message is redelivered"))
            return
        if offset not in pool.held:
            ended.set_exception(NotServing("the queue was lost; the message is redelivered"))
            return
        done = self._end(pool, offset, serial, dead=True)
        await asyncio.wait({done})
        if (error := done.exception()) is not None:
            ended.set_exception(error)
        else:
            ended.set_result(None)

    def _end(
        self, pool: _QueuePool, offset: int, serial: int, *, dead: bool = False
    ) -> asyncio.Future[None]:
        """Acknowledge a message that is ending; a `dead` one is stored among the dead letters."""
        one = pool.held[offset]
        assert self._held is not None, "the pools are empty without a membership"
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(_retrieve)
        ending = pool.ending[offset] = _Ending(serial, answer, dead)
        self._held.finish(one).add_done_callback(partial(self._ended, pool, offset, ending))
        return answer

    def _ended(
        self, pool: _QueuePool, offset: int, ending: _Ending, committed: asyncio.Future[None]
    ) -> None:
        if ending.answer.done():
            return  # the queue was lost meanwhile
        error = Fenced("the queue was lost") if committed.cancelled() else committed.exception()
        if error is not None:
            ending.answer.set_exception(error)
            return  # its pools are dropped
        pool.ending.pop(offset, None)
        lease, held = pool.leases.get(offset), pool.held.pop(offset, None)
        pool.leases.end(offset)
        if lease is not None and lease.terms is not None and held is not None:
            topic, client_id = held.message.topic, lease.terms.client_id
            if ending.dead:
                self._parts.events.dead_lettered(self.group, topic, client_id)
            else:
                took_ms = self._clock.monotonic_ms() - lease.begin_ms
                self._parts.events.handled(self.group, topic, client_id, took_ms)
        pool.ended[offset] = ending.serial
        if len(pool.ended) > ENDED_MAX:
            del pool.ended[next(iter(pool.ended))]
        ending.answer.set_result(None)
        self._wake()


def _retrieve(future: asyncio.Future[None]) -> None:
    """Retrieve the exception, so that asyncio logs no warning for a caller that has gone."""
    if not future.cancelled():
        future.exception()
