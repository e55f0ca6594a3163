"""Hands messages to the user's function, and sees to what comes of it.

A queue has one task for each of its messages that may be handled at once. A slot, of which the
whole consumer has so many, is held while the function runs, and no longer.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, cast

from batonmq.common.aio import unless
from batonmq.consuming.deadlines import Deadlines, Run
from batonmq.consuming.message import ReceivedMessage
from batonmq.consuming.results import MessageFailed, failure_of
from batonmq.consuming.retrying import Return, Returns, restore
from batonmq.consuming.runner import QueueRunner
from batonmq.consuming.session import Session
from batonmq.core.retries import Failure, HandleAgain, SendBack, Skip, Stop
from batonmq.core.route import QueueId

log = logging.getLogger(__name__)

Handler = Callable[[ReceivedMessage], Awaitable[object] | object]


class Handling:
    """Handles the messages of the runners it is told of.

    Args:
        tasks: Where what runs, runs.
        on_stop: Called when a message has failed too often, and the settings say to stop.

    Attributes:
        deadlines: How long a handler may take.
    """

    def __init__(
        self,
        session: Session,
        handler: Handler,
        returns: Returns,
        tasks: asyncio.TaskGroup,
        on_stop: Callable[[MessageFailed], None],
    ) -> None:
        settings = session.settings
        self._session, self._handler, self._returns = session, handler, returns
        self._tasks, self._on_stop = tasks, on_stop
        self._policy = settings.policy
        self._threads: ThreadPoolExecutor | None = None
        if not inspect.iscoroutinefunction(handler):
            self._threads = ThreadPoolExecutor(settings.concurrency, "handler")
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._by_queue: dict[QueueId, list[asyncio.Task[None]]] = {}
        self._ended = False
        self.deadlines = Deadlines(settings.handle_timeout_ms)

    def begin(self, runner: QueueRunner) -> None:
        """Handle the messages of a queue until `leave`."""
        settings = self._session.settings
        self._by_queue[runner.queue] = [
            self._tasks.create_task(self._handle(runner))
            for _ in range(1 if settings.orderly else settings.queue_concurrency)
        ]

    def leave(self, queue: QueueId) -> None:
        """The queue is given back: whatever of it still runs, counts no more."""
        for task in self._by_queue.pop(queue, ()):
            task.cancel()

    def end(self) -> None:
        """Start no more messages."""
        self._ended = True

    def close(self) -> None:
        """Let the threads go; one that hangs is not waited for."""
        self.deadlines.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _handle(self, runner: QueueRunner) -> None:
        """Handle one queue's messages one by one, until cancelled."""
        while True:
            await runner.arrived.wait()
            await self._slots.acquire()
            message = None if self._ended else runner.take()
            if message is None:
                self._slots.release()
                if self._ended:
                    return
                continue
            restore(message, self._session.group)
            if await self._settle(runner, message):
                runner.finish(message)
            else:
                runner.give_up(message)

    async def _settle(self, runner: QueueRunner, message: ReceivedMessage) -> bool:
        """Whether the message is done with: handled, or sent back. A slot is held at the start."""
        while True:
            failure = await self._attempt(message)
            if failure is None:
                return True
            if not runner.counts(message):
                return False
            decision = self._policy.decide(message.attempts, failure.delay_ms)
            if isinstance(decision, Stop):
                self._on_stop(MessageFailed(f"{message!r} failed: {failure.error}"))
                return False
            if isinstance(decision, Skip):
                log.error("given up %r attempts=%d %s", message, message.attempts, failure.error)
                return True
            if not isinstance(decision, HandleAgain):
                delay_ms = decision.delay_ms if isinstance(decision, SendBack) else None
                return await self._send_back(runner, message, failure, delay_ms)
            await unless(runner.stopping, asyncio.sleep(decision.delay_ms / 1000))
            await self._slots.acquire()
            if self._ended or runner.draining or not runner.counts(message):
                self._slots.release()
                return False
            message.attempts += 1

    async def _send_back(
        self, runner: QueueRunner, message: ReceivedMessage, failure: Failure, delay_ms: int | None
    ) -> bool:
        def ours() -> bool:  # else the next owner handles the message, perhaps better
            return runner.counts(message) and not runner.fenced

        progress = runner.progress
        reset_epoch = progress.reset_epoch if progress is not None else 0
        return await self._returns.send(Return(message, reset_epoch, failure, delay_ms, ours))

    async def _attempt(self, message: ReceivedMessage) -> Failure | None:
        """What speaks against the message being handled. Gives a slot back that was acquired."""
        run = Run(self.deadlines)
        message.extender = run.extend
        try:
            with run:
                result = await self._call(message)
        except Exception as error:
            if not run.expired:
                log.exception("handler failed %r attempts=%d", message, message.attempts)
                return Failure("failed", f"{type(error).__name__}: {error}")
        finally:
            message.extender = None
        if run.expired:
            log.error("handler timed out %r attempts=%d", message, message.attempts)
            return Failure("timeout", f"handled for more than {run.allowed_ms} ms")
        return failure_of(result)

    async def _call(self, message: ReceivedMessage) -> object:
        if self._threads is not None:
            future = self._threads.submit(self._handler, message)
            loop = asyncio.get_running_loop()
            future.add_done_callback(lambda ended: self._thread_ended(loop, ended))
            result = await asyncio.wrap_future(future)
            # A plain function that has only made a coroutine, such as a lambda, is not done yet.
            return await result if inspect.isawaitable(result) else result
        try:
            return await cast(Awaitable[object], self._handler(message))
        finally:
            self._slots.release()

    def _thread_ended(self, loop: asyncio.AbstractEventLoop, _: Future[Any]) -> None:
        """Only now the slot is free; called by the thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits for a slot any more
            loop.call_soon_threadsafe(self._slots.release)
