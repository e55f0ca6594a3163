"""Hands messages to the application's handler, and retries, sends back or skips those that fail.

Each queue has one task for each handler call that may run at once. A slot, of which the consumer
has `concurrency`, is held only while a handler runs. Calls of one message each that do not wait
for anything are made in runs (`handler_runs`).

When results of running handlers do not count any more, as after a reset, the queue's tasks are
cancelled and new ones begin: a handler that hangs delays no message behind the reset. A plain
function runs on in its thread and keeps its slot; its result is discarded.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from batonmq._common.aio import unless
from batonmq._common.threads import DaemonThreads
from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.consumer_settings import retry_policy
from batonmq._consumer.handler_adapters import HandlerAdapter, SingleMessageAdapter
from batonmq._consumer.handler_deadlines import HandlerCall, HandlerDeadlines
from batonmq._consumer.handler_results import MessageFailed, failure_by
from batonmq._consumer.handler_runs import HandlerRuns, RunPace, StartedCall
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.message_batch import MessageBatch
from batonmq._consumer.output_encoder import dead_letter_of
from batonmq._consumer.pending_inputs import PendingInputs
from batonmq._consumer.reply_sender import ReplySender
from batonmq._consumer.retry_sender import RetryRequest, RetrySender
from batonmq._consumer.running_calls import FailedCall, RunningCall
from batonmq._consumer.session import Session
from batonmq._consumer.transform_adapter import TransformAdapter
from batonmq._consumer.transformer import Transformer
from batonmq._core.queues import QueueRef
from batonmq._core.retries import HandlingFailure, RetryInPlace, SendBack, SkipMessage, StopConsumer

log = logging.getLogger(__name__)


class MessageDispatcher:
    """Handles the messages of the queues that `begin` names.

    Args:
        adapter: The application's handler.
        retry_sender: Sends failed messages to the retry topic.
        reply_sender: Sends the replies that handlers return.
        tasks: Runs the tasks of the queues.
        transformer: Stores the outputs of inputs; None if the handler makes none.
        on_stop: Called when a message has failed too often and the settings say to stop then.
        tasks_end: Whether all tasks of `tasks` are being cancelled.

    Attributes:
        deadlines: Ends handler calls that take too long.
    """

    def __init__(  # noqa: PLR0913, PLR0917  the parts of a consumer
        self,
        session: Session,
        adapter: HandlerAdapter,
        retry_sender: RetrySender,
        reply_sender: ReplySender,
        tasks: asyncio.TaskGroup,
        on_stop: Callable[[MessageFailed], None],
        transformer: Transformer | None = None,
        tasks_end: Callable[[], bool] = lambda: False,
    ) -> None:
        settings = session.settings
        self._session, self._adapter, self._retry_sender = session, adapter, retry_sender
        self._reply_sender, self._transformer = reply_sender, transformer
        self._tasks, self._on_stop, self._tasks_end = tasks, on_stop, tasks_end
        self._policy, self._metrics = retry_policy(settings), session.metrics
        self._event_counter, self._by_key = session.event_counter, settings.order == "key"
        self._threads: DaemonThreads | None = None
        plain = not inspect.iscoroutinefunction(adapter.handler)
        if plain and not adapter.inline:
            self._threads = DaemonThreads("handler")
        self._slots = asyncio.Semaphore(settings.concurrency)
        session.running.slots = settings.concurrency
        self._by_queue: dict[QueueRef, list[asyncio.Task[None]]] = {}
        self._ended = False
        self.deadlines = HandlerDeadlines(settings.handle_timeout_ms)
        self._runs: HandlerRuns | None = None
        if self._threads is None and isinstance(adapter, SingleMessageAdapter):
            self._runs = HandlerRuns(
                session, adapter.handler, self.deadlines, inline=plain, transformer=transformer
            )

    def begin(self, queue: AssignedQueue) -> None:
        """Handle the messages of a queue until `cancel`."""
        queue.on_work_dropped = partial(self._begin_anew, queue)
        self._create_tasks(queue)

    def cancel(self, ref: QueueRef) -> None:
        """Cancel the handlers of a queue that is released; their results do not count any more."""
        if self._transformer is not None:
            self._transformer.drop(ref)
        self._session.running.forget_failed(ref)
        for task in self._by_queue.pop(ref, ()):
            task.cancel()

    def end(self) -> None:
        """Start no more messages."""
        self._ended = True
        if self._runs is not None:
            self._runs.ended = True

    def close(self) -> None:
        """Stop the timer and the threads, without waiting for a thread with a hanging handler."""
        self.deadlines.close()
        if self._threads is not None:
            self._threads.close()

    def _create_tasks(self, queue: AssignedQueue) -> None:
        settings = self._session.settings
        self._by_queue[queue.ref] = [
            self._tasks.create_task(self._run_queue(queue, queue.lineage))
            for _ in range(1 if settings.order == "queue" else settings.queue_concurrency)
        ]

    def _begin_anew(self, queue: AssignedQueue) -> None:
        """Cancel the handlers of a queue: their results do not count any more.

        If the queue stays assigned, new tasks handle its next messages.
        """
        if count := self._session.running.abandon(queue.ref):
            log.warning("handlers cancelled, results dropped queue=%s count=%d", queue.ref, count)
        self.cancel(queue.ref)
        if queue.assigned and not self._ended:
            self._create_tasks(queue)

    async def _run_queue(self, queue: AssignedQueue, lineage: int) -> None:
        """Handle one queue's messages of one lineage, call by call, until cancelled or ended."""
        pace = RunPace()
        while queue.lineage == lineage:
            await queue.buffer.arrived.wait()
            await self._slots.acquire()
            ended = self._ended or queue.lineage != lineage
            started: StartedCall | bool = False
            if self._runs is not None and not ended and pace.is_run_due():
                started = self._runs.run(queue)
                pace.note(started)
            if started is True:
                self._slots.release()
                if queue.buffer.ready:
                    await asyncio.sleep(0)
                continue
            messages: Sequence[ReceivedMessage] | None = None
            if isinstance(started, StartedCall):
                messages = (started.message,)
            elif not ended:
                messages = self._adapter.take(queue)
            if messages:
                failures = await self._attempt(messages, started or None)
                if failures is None and self._transformer is not None:
                    failures = await self._send_outputs(queue, messages)
                elif failures is None:
                    queue.finish(messages)
                if failures is not None:
                    await self._resolve(queue, messages, failures)
            else:
                self._slots.release()
                if ended:
                    return

    async def _send_outputs(
        self, queue: AssignedQueue, messages: Sequence[ReceivedMessage]
    ) -> Sequence[HandlingFailure] | None:
        """Send the outputs of a handled message, which is finished when they are stored."""
        assert self._transformer is not None and isinstance(self._adapter, TransformAdapter)
        (message,) = messages
        outputs = self._adapter.take_outputs(message)
        result = await self._transformer.accept(queue, message, outputs)
        if isinstance(result, HandlingFailure):
            return [result]
        if result is None:
            queue.finish(messages)
        return None

    async def _store_outputs(
        self, queue: AssignedQueue, message: ReceivedMessage
    ) -> HandlingFailure | bool:
        """Store the outputs of a message that was handled again; True if that succeeded."""
        assert self._transformer is not None and isinstance(self._adapter, TransformAdapter)
        outputs = self._adapter.take_outputs(message)
        result = await self._transformer.accept(queue, message, outputs)
        if isinstance(result, HandlingFailure):
            return result
        failure = None if result is None else await result.stored()
        return failure or True

    async def _resolve(
        self,
        queue: AssignedQueue,
        messages: Sequence[ReceivedMessage],
        failures: Sequence[HandlingFailure | None],
    ) -> None:
        """Finish the messages that are handled; resolve each failed one alone.

        Messages that are handled again here delay their queue, in order; messages that are sent
        back are sent together. With the order of the queue the messages behind the first failure
        count as not handled: they are handled again after it. With the order of keys a failed
        message waits in the buffer with its key, and this task continues.
        """
        if self._by_key:
            ((message, failure),) = zip(messages, failures, strict=True)
            assert failure is not None
            await self._resolve_keyed(queue, message, failure)
            return
        if self._session.settings.order == "queue":
            first = next(index for index, failure in enumerate(failures) if failure is not None)
            queue.finish(messages[:first])
            await self._resolve_one(queue, messages[first], failures[first])
            for message in messages[first + 1 :]:
                await self._resolve_one(queue, message, None)
            return
        results = list(zip(messages, failures, strict=True))
        queue.finish([message for message, failure in results if failure is None])
        failed = [(message, failure) for message, failure in results if failure is not None]
        if self._policy.sends_back:
            async with asyncio.TaskGroup() as tasks:
                for message, failure in failed:
                    tasks.create_task(self._resolve_one(queue, message, failure))
        else:
            for message, failure in failed:
                await self._resolve_one(queue, message, failure)

    async def _resolve_keyed(
        self, queue: AssignedQueue, message: ReceivedMessage, failure: HandlingFailure
    ) -> None:
        step = await self._decide(queue, message, failure)
        if isinstance(step, RetryInPlace):
            queue.retry_later(message, step.delay_ms)
        elif step:
            queue.finish([message])
        else:
            queue.give_up(message)

    async def _resolve_one(
        self, queue: AssignedQueue, message: ReceivedMessage, failure: HandlingFailure | None
    ) -> None:
        """Retry a message until it is finished or given up; without a failure, handle it first."""
        step: RetryInPlace | bool = RetryInPlace(0)
        if failure is not None:
            step = await self._decide(queue, message, failure)
        while isinstance(step, RetryInPlace):
            result = await self._retry(queue, message, step.delay_ms)
            step = (
                result if isinstance(result, bool) else await self._decide(queue, message, result)
            )
        if step:
            queue.finish([message])
        else:
            queue.give_up(message)

    async def _retry(
        self, queue: AssignedQueue, message: ReceivedMessage, delay_ms: int
    ) -> HandlingFailure | bool:
        """Handle a message again; True if that succeeded, False if it may not be started."""
        await unless(queue.stopped, asyncio.sleep(delay_ms / 1000))
        if queue.paused:
            await unless(queue.stopped, queue.resumed.wait())
        await self._slots.acquire()
        if self._ended or queue.stopped or not queue.counts(message):
            self._slots.release()
            self._session.running.forget_failed(queue.ref, message.offset)
            return False
        message.attempts += 1
        message.token = queue.token  # it may be from an earlier grant
        failures = await self._attempt([message])
        if failures is None and self._transformer is not None:
            return await self._store_outputs(queue, message)
        return (failures and failures[0]) or True

    async def _decide(
        self, queue: AssignedQueue, message: ReceivedMessage, failure: HandlingFailure
    ) -> RetryInPlace | bool:
        """Return how to handle the message again; else whether it is finished.

        A message is finished when it was sent back or skipped, or if another owner has handled it
        since it was started here.
        """
        if not queue.counts(message):
            return False
        if queue.is_acknowledged(message):
            return True
        decision = self._policy.decide(message.attempts, failure.delay_ms, final=failure.final)
        if isinstance(decision, RetryInPlace):
            self._count_failed(message, dead=False)
            now_ms = self._session.clock.monotonic_ms()
            call = FailedCall(message.offset, message.attempts, now_ms, failure.refused)
            self._session.running.fail(queue.ref, call)
            return decision
        if isinstance(decision, StopConsumer):
            self._on_stop(MessageFailed(f"{message!r} failed: {failure.error}"))
            return False
        if isinstance(decision, SkipMessage):
            log.error(
                "message skipped after its last attempt %r attempts=%d %s",
                message,
                message.attempts,
                failure.error,
            )
            self._reply_sender.fail(message, failure.error)
            return True
        delay_ms = decision.delay_ms if isinstance(decision, SendBack) else None
        sent = await self._send_back(queue, message, failure, delay_ms)
        if sent:
            self._count_failed(message, dead=delay_ms is None)
            if delay_ms is None:
                self._reply_sender.fail(message, failure.error)
        return sent

    def _count_failed(self, message: ReceivedMessage, *, dead: bool) -> None:
        for counts in (self._metrics, self._event_counter):
            if counts is not None:
                (counts.dead if dead else counts.retried)(message.topic)

    async def _send_back(
        self,
        queue: AssignedQueue,
        message: ReceivedMessage,
        failure: HandlingFailure,
        delay_ms: int | None,
    ) -> bool:
        def still_owned() -> bool:  # otherwise the next owner handles the message
            return queue.counts(message) and queue.held

        if self._transformer is not None:
            # As an output, so the message has either outputs or one dead letter.
            client_id = self._session.incarnation.client_id
            letter = dead_letter_of(message, failure, self._transformer.dead_letters, client_id)
            result = await self._transformer.accept(queue, message, [letter])
            if isinstance(result, PendingInputs):
                return await result.stored() is None
            return result is None
        progress = queue.progress
        reset_epoch = progress.reset_epoch if progress is not None else 0
        return await self._retry_sender.send(
            RetryRequest(message, reset_epoch, failure, delay_ms, still_owned)
        )

    async def _attempt(
        self, messages: Sequence[ReceivedMessage], started: StartedCall | None = None
    ) -> Sequence[HandlingFailure | None] | None:
        """Call the handler; return the failure of each message, or None if all are handled.

        The caller has acquired a slot, which is released here.

        Args:
            started: The call, if it was started already.
        """
        call = HandlerCall(self.deadlines) if started is None else started.call
        if self._event_counter is not None:
            stored = [message.store_unix_ms for message in messages]
            ago_s = [] if started is None else [self.deadlines.loop.time() - call.begin_s]
            self._event_counter.begun(messages[0].topic, stored, ago_s)
        failures = await self._call_within(call, messages, started)
        seconds = self.deadlines.loop.time() - call.begin_s
        if self._metrics is not None:
            self._metrics.handled(messages[0].topic, len(messages), failures or (), seconds)
        if self._event_counter is not None:
            self._event_counter.handled(messages[0].topic, len(messages), failures or (), seconds)
        return failures

    async def _call_within(
        self,
        call: HandlerCall,
        messages: Sequence[ReceivedMessage],
        started: StartedCall | None,
    ) -> Sequence[HandlingFailure | None] | None:
        first, extend = messages[0], call.extend
        now_ms = self._session.clock.monotonic_ms()
        running = self._session.running.begin(first.queue, first.offset, now_ms)
        if self._by_key:
            running.ordering_key = first.ordering_key
        extended = [messages] if isinstance(messages, MessageBatch) else messages
        for one in extended:
            one.extender = extend
        try:
            with call:
                result = await self._call_handler(messages, running, started)
            if not call.expired:
                failures = self._adapter.failures(result, messages)
                if result is not None:
                    for message, reply in self._adapter.replies(result, messages):
                        self._reply_sender.send(message, reply)
                return failures
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and call.cancelled:
                if self._is_cancelled(first.queue):
                    raise
                call.uncancel()
            if not call.expired:
                log.exception(
                    "handler failed %r attempts=%d messages=%d",
                    first,
                    first.attempts,
                    len(messages),
                )
                return [failure_by(error, len(messages))] * len(messages)
        finally:
            for one in extended:
                one.extender = None
        running.abandoned = True
        log.error(
            "handler timed out %r attempts=%d messages=%d", first, first.attempts, len(messages)
        )
        return [HandlingFailure("timeout", f"handled for more than {call.allowed_ms} ms")] * len(
            messages
        )

    def _is_cancelled(self, ref: QueueRef) -> bool:
        """Whether the current task, which handles messages of a queue, is to end.

        The task's own count of cancellations does not tell: a handler may have cancelled its task,
        and before Python 3.13 a task group that has failed leaves such a count behind. A task that
        ended by that would leave its queue without one.
        """
        return asyncio.current_task() not in self._by_queue.get(ref, ()) or self._tasks_end()

    async def _call_handler(
        self,
        messages: Sequence[ReceivedMessage],
        running: RunningCall,
        started: StartedCall | None,
    ) -> object:
        if self._threads is not None:
            future = self._threads.submit(partial(self._adapter.call, messages))
            loop = asyncio.get_running_loop()
            future.add_done_callback(lambda _: self._thread_ended(loop, running))
            result = await asyncio.wrap_future(future)
            # A plain function, such as a lambda, may return a coroutine that is still to be run.
            return await result if inspect.isawaitable(result) else result
        try:
            result = self._adapter.call(messages) if started is None else started
            return await result if inspect.isawaitable(result) else result
        finally:
            self._call_ended(running)

    def _thread_ended(self, loop: asyncio.AbstractEventLoop, running: RunningCall) -> None:
        """Release the slot, only now; called in the thread."""
        with suppress(RuntimeError):  # the loop is closed, and no task waits for a slot
            loop.call_soon_threadsafe(self._call_ended, running)

    def _call_ended(self, running: RunningCall) -> None:
        self._session.running.end(running)
        self._slots.release()
