"""Hands messages to the user's function, and sees to what comes of it.

A queue has one task for each call that may run at once. A slot, of which the whole consumer has so
many, is held while the function runs, and no longer.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from batonmq._common.aio import unless
from batonmq._common.threads import DaemonThreads
from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.handler_adapters import HandlerAdapter
from batonmq._consumer.handler_deadlines import HandlerCall, HandlerDeadlines
from batonmq._consumer.handler_results import MessageFailed
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.retry_sender import RetryRequest, RetrySender
from batonmq._consumer.session import Session
from batonmq._core.queues import QueueRef
from batonmq._core.retries import HandlingFailure, RetryInPlace, SendBack, SkipMessage, StopConsumer

log = logging.getLogger(__name__)


class MessageDispatcher:
    """Handles the messages of the runners it is told of.

    Args:
        form: The user's function, and what it takes.
        tasks: Where what runs, runs.
        on_stop: Called when a message has failed too often, and the settings say to stop.

    Attributes:
        deadlines: How long one call may take.
    """

    def __init__(
        self,
        session: Session,
        form: HandlerAdapter,
        returns: RetrySender,
        tasks: asyncio.TaskGroup,
        on_stop: Callable[[MessageFailed], None],
    ) -> None:
        settings = session.settings
        self._session, self._form, self._returns = session, form, returns
        self._tasks, self._on_stop = tasks, on_stop
        self._policy, self._metrics = settings.policy, session.metrics
        self._tally = session.tally
        self._threads: DaemonThreads | None = None
        if not inspect.iscoroutinefunction(form.handler):
            self._threads = DaemonThreads("handler")
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._by_queue: dict[QueueRef, list[asyncio.Task[None]]] = {}
        self._ended = False
        self.deadlines = HandlerDeadlines(settings.handle_timeout_ms)

    def begin(self, runner: AssignedQueue) -> None:
        """Handle the messages of a queue until `leave`."""
        settings = self._session.settings
        self._by_queue[runner.queue] = [
            self._tasks.create_task(self._handle(runner))
            for _ in range(1 if settings.orderly else settings.queue_concurrency)
        ]

    def leave(self, queue: QueueRef) -> None:
        """The queue is given back: whatever of it still runs, counts no more."""
        for task in self._by_queue.pop(queue, ()):
            task.cancel()

    def end(self) -> None:
        """Start no more messages."""
        self._ended = True

    def close(self) -> None:
        """Let the threads go; for one that hangs nobody waits, the end of the process neither."""
        self.deadlines.close()
        if self._threads is not None:
            self._threads.close()

    async def _handle(self, runner: AssignedQueue) -> None:
        """Handle one queue's messages, call by call, until cancelled."""
        while True:
            await runner.arrived.wait()
            await self._slots.acquire()
            messages = [] if self._ended else runner.take(self._form.messages_max)
            if messages:
                failures = await self._attempt(messages)
                if failures is None:
                    runner.finish(messages)
                else:
                    await self._meet(runner, messages, failures)
            else:
                self._slots.release()
                if self._ended:
                    return

    async def _meet(
        self,
        runner: AssignedQueue,
        messages: Sequence[ReceivedMessage],
        failures: Sequence[HandlingFailure | None],
    ) -> None:
        """See what failed through, each message by itself; the rest is done with.

        What is kept in hand holds its queue up, in order; what is sent back goes together. Where
        order matters nothing that stands behind a failure counts: it is handled after it.
        """
        if self._session.settings.orderly:
            first = next(index for index, failure in enumerate(failures) if failure is not None)
            runner.finish(messages[:first])
            await self._see_through(runner, messages[first], failures[first])
            for message in messages[first + 1 :]:
                await self._see_through(runner, message, None)
            return
        met = list(zip(messages, failures, strict=True))
        runner.finish([message for message, failure in met if failure is None])
        failed = [(message, failure) for message, failure in met if failure is not None]
        if self._policy.sends_back:
            async with asyncio.TaskGroup() as tasks:
                for message, failure in failed:
                    tasks.create_task(self._see_through(runner, message, failure))
        else:
            for message, failure in failed:
                await self._see_through(runner, message, failure)

    async def _see_through(
        self, runner: AssignedQueue, message: ReceivedMessage, failure: HandlingFailure | None
    ) -> None:
        """Until the message is done with or given up; without a failure it is handled first."""
        step: RetryInPlace | bool = RetryInPlace(0)
        if failure is not None:
            step = await self._decide(runner, message, failure)
        while isinstance(step, RetryInPlace):
            found = await self._again(runner, message, step.delay_ms)
            step = found if isinstance(found, bool) else await self._decide(runner, message, found)
        if step:
            runner.finish([message])
        else:
            runner.give_up(message)

    async def _again(
        self, runner: AssignedQueue, message: ReceivedMessage, delay_ms: int
    ) -> HandlingFailure | bool:
        """Handle a message that is in hand; True if that went well, False if it may not begin."""
        await unless(runner.stopping, asyncio.sleep(delay_ms / 1000))
        if runner.paused:
            await unless(runner.stopping, runner.going.wait())
        await self._slots.acquire()
        if self._ended or runner.draining or not runner.counts(message):
            self._slots.release()
            return False
        message.attempts += 1
        failures = await self._attempt([message])
        return (failures and failures[0]) or True

    async def _decide(
        self, runner: AssignedQueue, message: ReceivedMessage, failure: HandlingFailure
    ) -> RetryInPlace | bool:
        """What a failure leads to; else whether the message is done with: skipped or sent back."""
        if not runner.counts(message):
            return False
        decision = self._policy.decide(message.attempts, failure.delay_ms)
        if isinstance(decision, RetryInPlace):
            self._count_again(message, dead=False)
            return decision
        if isinstance(decision, StopConsumer):
            self._on_stop(MessageFailed(f"{message!r} failed: {failure.error}"))
            return False
        if isinstance(decision, SkipMessage):
            log.error("given up %r attempts=%d %s", message, message.attempts, failure.error)
            return True
        delay_ms = decision.delay_ms if isinstance(decision, SendBack) else None
        sent = await self._send_back(runner, message, failure, delay_ms)
        if sent:
            self._count_again(message, dead=delay_ms is None)
        return sent

    def _count_again(self, message: ReceivedMessage, *, dead: bool) -> None:
        for counts in (self._metrics, self._tally):
            if counts is not None:
                (counts.dead if dead else counts.retried)(message.topic)

    async def _send_back(
        self,
        runner: AssignedQueue,
        message: ReceivedMessage,
        failure: HandlingFailure,
        delay_ms: int | None,
    ) -> bool:
        def ours() -> bool:  # else the next owner handles the message, perhaps better
            return runner.counts(message) and not runner.fenced

        progress = runner.progress
        reset_epoch = progress.reset_epoch if progress is not None else 0
        return await self._returns.send(RetryRequest(message, reset_epoch, failure, delay_ms, ours))

    async def _attempt(
        self, messages: Sequence[ReceivedMessage]
    ) -> Sequence[HandlingFailure | None] | None:
        """What speaks against each message being handled; None if nothing does.

        Gives a slot back that was acquired.
        """
        run = HandlerCall(self.deadlines)
        if self._tally is not None:
            stored = [message.store_unix_ms for message in messages]
            self._tally.begun(messages[0].topic, stored)
        failures = await self._called(messages, run)
        seconds = self.deadlines.loop.time() - run.begin_s
        if self._metrics is not None:
            self._metrics.handled(messages[0].topic, len(messages), failures or (), seconds)
        if self._tally is not None:
            self._tally.handled(messages[0].topic, len(messages), failures or (), seconds)
        return failures

    async def _called(
        self, messages: Sequence[ReceivedMessage], run: HandlerCall
    ) -> Sequence[HandlingFailure | None] | None:
        first, extend = messages[0], run.extend
        for message in messages:
            message.extender = extend
        try:
            with run:
                result = await self._call(messages)
            if not run.expired:
                return self._form.failures(result, messages)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and run.cancelled:
                raise
            if not run.expired:
                log.exception(
                    "handler failed %r attempts=%d messages=%d",
                    first,
                    first.attempts,
                    len(messages),
                )
                return [HandlingFailure("failed", f"{type(error).__name__}: {error}")] * len(
                    messages
                )
        finally:
            for message in messages:
                message.extender = None
        log.error(
            "handler timed out %r attempts=%d messages=%d", first, first.attempts, len(messages)
        )
        return [HandlingFailure("timeout", f"handled for more than {run.allowed_ms} ms")] * len(
            messages
        )

    async def _call(self, messages: Sequence[ReceivedMessage]) -> object:
        if self._threads is not None:
            future = self._threads.submit(partial(self._form.call, messages))
            loop = asyncio.get_running_loop()
            future.add_done_callback(lambda ended: self._thread_ended(loop, ended))
            result = await asyncio.wrap_future(future)
            # A plain function that has only made a coroutine, such as a lambda, is not done yet.
            return await result if inspect.isawaitable(result) else result
        try:
            return await self._form.call(messages)
        finally:
            self._slots.release()

    def _thread_ended(self, loop: asyncio.AbstractEventLoop, _: Future[Any]) -> None:
        """Only now the slot is free; called by the thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits for a slot any more
            loop.call_soon_threadsafe(self._slots.release)
