"""The consumer of one queue of Kombu: starts as many messages as the channel may hold."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from batonmq._common import timeouts
from batonmq._common.aio import only_error
from batonmq._consumer.consumer import Consumer, hold_messages
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.held_messages import HeldMessage, HeldMessages
from batonmq._consumer.session import OwnershipEvent
from batonmq._core.queues import QueueRef
from batonmq._core.retries import HandlingFailure
from batonmq._kombu.link_options import LinkOptions
from batonmq._kombu.queue_names import QueueNames
from batonmq._kombu.task_message import is_expired
from batonmq.errors import BatonError, NotServing

FIRST_QUEUES_S = 5.0
"""How long a new member waits for its first queues before it counts as ready."""
log = logging.getLogger(__name__)


@dataclass(slots=True)
class ChannelRoom:
    """How many messages a channel may hold without an acknowledgement.

    Attributes:
        limit: The prefetch count.
        held_count: Messages that it holds.
        consumers: Its consumers, by key.
    """

    limit: int
    held_count: int = 0
    consumers: dict[int, QueueConsumer] = field(default_factory=dict)

    @property
    def free(self) -> bool:
        """Whether it may hold one more."""
        return self.held_count < self.limit

    def release(self) -> None:
        """Note that it holds one message less."""
        self.held_count -= 1
        self.wake()

    def wake(self) -> None:
        """Have the consumers of the channel look again whether they may start a message."""
        for consumer in self.consumers.values():
            consumer.wake()


class QueueConsumer:
    """One member of the group of a queue.

    Args:
        room: Shared with the other consumers of the channel.
        deliver: Called with each message that is started, and its delivery tag.
        lost: Called with the error that ends the consumer after it was ready.
        by_get: Whether messages are delivered only as `credit` allows, for `get`.

    Attributes:
        held: The messages that are delivered and not ended, by tag.
        leaving: Tags of those that are being sent to the retry topic or to the dead letters.
        ready: Done when the consumer has joined and has its first queues, or has failed.
        closed: Set when it has released all queues.
    """

    def __init__(  # noqa: PLR0913  keyword-only
        self,
        *,
        names: QueueNames,
        nameserver: str,
        options: LinkOptions,
        room: ChannelRoom,
        tags: Iterator[int],
        deliver: Callable[[QueueConsumer, int, HeldMessage], None],
        lost: Callable[[QueueConsumer, BatonError], None],
        by_get: bool,
    ) -> None:
        self.names, self._options, self._room, self._tags = names, options, room, tags
        self._deliver, self._lost, self._by_get = deliver, lost, by_get
        self.credit = 0
        self.held: dict[int, HeldMessage] = {}
        self.leaving: set[int] = set()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.closed = asyncio.Event()
        self._cancelled = False
        self._messages: HeldMessages | None = None
        self._turn = 0
        self._granted = asyncio.Event()
        self._consumer = Consumer(
            nameserver,
            names.group,
            {names.topic: "*"},
            ConsumerSettings(
                consume_from="first",
                drain_timeout_ms=None,  # a task that runs is never delivered again
                handle_signals=False,
                retries_max=options.requeues_max,
                span_max=options.span_max,
                start_timeout_ms=max(options.connect_timeout_ms, 10_000),
                security=options.security,
            ),
            on_ownership=self._note_ownership,
        )

    async def run(self) -> None:
        """Deliver messages until cancelled by `cancel` and nothing is held any more."""
        error: BatonError | None = None
        try:
            async with self._consumer as consumer:
                self._messages = hold_messages(consumer, self._dropped)
                async with asyncio.TaskGroup() as tasks:
                    pump = tasks.create_task(self._pump(self._messages))
                    await self._wait_for_queues(consumer)
                    if not self.ready.done():
                        self.ready.set_result(None)
                    await pump
        except BatonError as failure:
            error = failure
        except BaseExceptionGroup as group:
            only = only_error(group)
            if not isinstance(only, BatonError):
                raise
            error = only
        finally:
            self._messages = None
            self._forget(list(self.held))
            self.closed.set()
        if error is not None:
            if self.ready.done():
                self._lost(self, error)
            else:
                self.ready.set_exception(error)

    def _note_ownership(self, event: OwnershipEvent) -> None:
        if event.kind == "granted":
            self._granted.set()
        self.wake()

    def wake(self) -> None:
        """Look again whether a message may be started."""
        if self._messages is not None:
            self._messages.available.set()

    def cancel(self) -> None:
        """Start no more messages; leave the group when none is held."""
        self._cancelled = True
        self._granted.set()
        self.wake()

    def finish(self, tag: int) -> asyncio.Future[None] | None:
        """Acknowledge a message; None if it does not count any more."""
        held = self._take(tag)
        if held is None or self._messages is None:
            return None
        return self._messages.finish(held)

    def give_up(self, tag: int) -> None:
        """End a message that was not handled: the next owner of its queue gets it."""
        if (held := self._take(tag)) is not None and self._messages is not None:
            self._messages.give_up(held)

    async def requeue(self, tag: int) -> None:
        """Have a message delivered again to any worker; too often, and it is a dead letter."""
        held = self.held.get(tag)
        if held is None or self._messages is None:
            return
        attempts = held.message.attempts
        failure = HandlingFailure("asked", f"requeued by the worker, attempt {attempts}")
        if attempts > self._options.requeues_max:
            log.error(
                "requeued too often, now a dead letter %r attempts=%d", held.message, attempts
            )
            await self._send_away(tag, held, failure, None)
        else:
            await self._send_away(tag, held, failure, self._options.requeue_delay_ms(attempts))

    async def reject(self, tag: int, reason: str) -> None:
        """Store a message among the dead letters of the group."""
        held = self.held.get(tag)
        if held is not None:
            await self._send_away(tag, held, HandlingFailure("asked", reason, final=True), None)

    async def _send_away(
        self, tag: int, held: HeldMessage, failure: HandlingFailure, delay_ms: int | None
    ) -> None:
        messages = self._messages
        if messages is None:
            return
        self.leaving.add(tag)
        try:
            if delay_ms is None:
                sent = await messages.dead_letter(held, failure)
            else:
                sent = await messages.send_back(held, failure, delay_ms)
        finally:
            self.leaving.discard(tag)
        if not sent:
            raise NotServing(
                f"{held.message!r} was not sent away: its queue was lost, so it is redelivered"
            )
        if (committed := self.finish(tag)) is not None:
            await committed

    async def _wait_for_queues(self, consumer: Consumer) -> None:
        if not consumer.assignment:
            with suppress(TimeoutError):  # there may be more members than queues
                async with timeouts.timeout(FIRST_QUEUES_S):
                    await self._granted.wait()

    async def _pump(self, messages: HeldMessages) -> None:
        while not (self._cancelled and not self.held):
            messages.available.clear()
            if not self._cancelled:
                self._start_messages(messages)
            await messages.available.wait()

    def _may_start(self) -> bool:
        return self.credit > 0 if self._by_get else self._room.free

    def _start_messages(self, messages: HeldMessages) -> None:
        """Start messages of the queues in turn, until the channel is full or none waits."""
        refs = sorted(messages.queues)
        self._turn += 1
        begin = self._turn % len(refs) if refs else 0
        waiting = refs[begin:] + refs[:begin]
        while waiting:
            for ref in list(waiting):
                if not self._may_start():
                    return
                if (held := messages.take(ref)) is None:
                    waiting.remove(ref)
                else:
                    self._start(messages, held)

    def _start(self, messages: HeldMessages, held: HeldMessage) -> None:
        message = held.message
        if is_expired(message.properties, self._consumer._session.clock.unix_ms()):
            log.info("expired %r", message)
            messages.finish(held).add_done_callback(_ignore_failure)
            return
        tag = next(self._tags)
        self.held[tag] = held
        self._room.held_count += 1
        if self._by_get:
            self.credit -= 1
        self._deliver(self, tag, held)

    def _take(self, tag: int) -> HeldMessage | None:
        held = self.held.pop(tag, None)
        if held is not None:
            self._room.release()
        self.wake()
        return held

    def _dropped(self, ref: QueueRef) -> None:
        tags = [tag for tag, held in self.held.items() if held.message.queue == ref]
        if tags:
            log.warning(
                "the queue was lost or reset, its running tasks are not acknowledged queue=%s "
                "tasks=%d",
                ref,
                len(tags),
            )
        self._forget(tags)

    def _forget(self, tags: list[int]) -> None:
        for tag in tags:
            self.held.pop(tag, None)
            self._room.release()
        self.wake()


def _ignore_failure(future: asyncio.Future[None]) -> None:
    """Retrieve a failed commit: the message is delivered again, which its log says."""
    if not future.cancelled():
        future.exception()
