"""Calls a handler with one message after the other, as long as no call waits for anything.

Such calls cost little: nothing else runs between them, so slot, time limit, progress and metrics
are kept for all of them together. A call that waits is the last one of its run, and it continues
in the same task: `asyncio.current_task`, `asyncio.timeout` and context variables are those of a
call that is awaited there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator
from inspect import isawaitable
from typing import Any, Final

from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.handler_deadlines import HandlerCall, HandlerDeadlines
from batonmq._consumer.handler_results import RetryLater, Suspend
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.session import Session
from batonmq._consumer.transformer import RunOutputs, Transformer
from batonmq._core.requests import Reply

RUN_MESSAGES_MAX: Final = 64
"""Messages of a run, at most: then other tasks run."""
RUN_S_MAX: Final = 0.005
"""No message of a run begins later than this after the first."""
_WITH_EFFECT = (RetryLater, Suspend, Reply, bytes)
"""Results that are more than a success."""
SINGLES_MAX: Final = 31
"""Calls that are made singly between two attempts of a run, at most."""


class RunPace:
    """Decides for one task whether its next calls are a run.

    A run costs more than a single call if its first call waits. If handlers wait again and again,
    more and more calls are made singly before the next attempt.
    """

    def __init__(self) -> None:
        self._singles_left = self._singles = 0

    def is_run_due(self) -> bool:
        """Whether the next call should begin a run; else it is made singly."""
        if self._singles_left:
            self._singles_left -= 1
            return False
        return True

    def note(self, last: StartedCall | bool) -> None:
        """Note the outcome of a run."""
        if isinstance(last, StartedCall) and last.waits_first:
            self._singles = min(2 * self._singles + 1, SINGLES_MAX)
        elif last:
            self._singles = 0
        self._singles_left = self._singles


class StartedCall:
    """A handler call that was started and waits, or has an outcome that is not a plain success.

    Await it once, in the same task, for the outcome: the handler's result or its error.

    Attributes:
        waits_first: Whether it waits, and is the first call of its run.
    """

    __slots__ = ("_awaited", "_coroutine", "_error", "_result", "call", "message", "waits_first")

    def __init__(self, message: ReceivedMessage, call: HandlerCall) -> None:
        self.message, self.call, self.waits_first = message, call, False
        self._coroutine: Any = None
        self._awaited: object = None
        self._error: BaseException | None = None
        self._result: object = None

    def wait_for(self, coroutine: object, awaited: object) -> StartedCall:
        """Note that the coroutine of the call has yielded `awaited` to the event loop."""
        self._coroutine, self._awaited = coroutine, awaited
        return self

    def fail(self, error: BaseException) -> StartedCall:
        """Note that the handler has raised."""
        self._error = error
        return self

    def end(self, result: object) -> StartedCall:
        """Note that the handler has returned."""
        self._result = result
        return self

    def __await__(self) -> Generator[Any, Any, object]:
        if self._error is not None:
            raise self._error
        if self._coroutine is None:
            result = self._result
            return (yield from result.__await__()) if isawaitable(result) else result
        coroutine, awaited = self._coroutine, self._awaited
        while True:
            try:
                sent = yield awaited
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as error:  # noqa: BLE001  the coroutine handles it
                step, value = coroutine.throw, error
            else:
                step, value = coroutine.send, sent
            try:
                awaited = step(value)
            except StopIteration as ended:
                return ended.value


class HandlerRuns:
    """Runs of handler calls for the queues of one consumer.

    Args:
        handler: Takes one message: a coroutine function, or a plain one if `inline`.
        transformer: Stores the outputs in the results; None if results have none.

    Attributes:
        ended: Whether the consumer starts no more messages.
    """

    def __init__(
        self,
        session: Session,
        handler: Callable[[ReceivedMessage], Any],
        deadlines: HandlerDeadlines,
        *,
        inline: bool,
        transformer: Transformer | None = None,
    ) -> None:
        self._session, self._handler, self._inline = session, handler, inline
        self._transformer = transformer
        self._deadlines, self._time_s = deadlines, deadlines.loop.time
        self._counts = [one for one in (session.metrics, session.event_counter) if one is not None]
        self.ended = False

    def run(self, queue: AssignedQueue) -> StartedCall | bool:
        """Handle messages of a queue that wait.

        Returns:
            The call that waits or is not a plain success; without one, whether the queue had a
            message that may be started.
        """
        messages = queue.peek(RUN_MESSAGES_MAX)
        if messages is None:
            return False
        transformer = self._transformer
        outputs = None if transformer is None else transformer.collect(queue)
        run = _Run(HandlerCall(self._deadlines), outputs)
        calls = self._call_each(queue, run, messages)
        last: StartedCall | None = None
        try:
            awaited = calls.send(None)
        except StopIteration as ended:
            if run.message is not None:
                last = StartedCall(run.message, run.call).end(ended.value)
        except (Exception, asyncio.CancelledError) as error:
            if run.message is None:
                raise
            last = StartedCall(run.message, run.call).fail(error)
        else:
            assert run.message is not None
            run.has_waited = True
            last = StartedCall(run.message, run.call).wait_for(calls, awaited)
            last.waits_first = not run.handled_count
        finally:  # also when a handler ends the program
            ranges = queue.note_run(
                run.handled_count, started=run.message is not None, finished=transformer is None
            )
            if outputs is not None:
                outputs.end(ranges)
            self._count(run)
        return last or True

    async def _call_each(
        self, queue: AssignedQueue, run: _Run, messages: Iterator[ReceivedMessage]
    ) -> object:
        """Call the handler until no message may be started, or a result is no plain success.

        Returns:
            The result of the call of `run.message`, if that is set.
        """
        handler, inline, time_s = self._handler, self._inline, self._time_s
        outputs, has_outputs = run.outputs, self._transformer is not None
        call, extend, counted = run.call, run.call.extend, bool(self._counts)
        boot_s, deadline_boot_s = self._session.clock.boot_s, self._deadline_boot_s(queue)
        begin_s, count = call.begin_s, 0
        last_begin_s = begin_s + RUN_S_MAX
        for message in messages:
            if count and (
                queue.paused or self.ended or begin_s > last_begin_s or boot_s() >= deadline_boot_s
            ):
                break
            run.message = call.message = message
            call.begin_s = begin_s
            message.attempts += 1
            message.extender = extend
            result = handler(message) if inline else await handler(message)
            if run.has_waited:
                return result
            if has_outputs:
                if outputs is None or not outputs.add(message, result):
                    return result
            elif result is not None and (
                isinstance(result, _WITH_EFFECT) or (inline and isawaitable(result))
            ):
                return result
            message.extender = None
            run.message = None
            run.handled_count = count = count + 1
            begin_s = time_s()
            if counted:
                run.handled.append((message, begin_s))
        return None

    def _deadline_boot_s(self, queue: AssignedQueue) -> float:
        """Return the time by `Clock.boot_s` before which the queue's own deadline can't pass."""
        if not queue.with_ownership:
            return float("inf")
        clock = self._session.clock
        return clock.boot_s() + (queue.lease.deadline_ms - clock.monotonic_ms()) / 1000

    def _count(self, run: _Run) -> None:
        """Count the calls that were plain successes."""
        if not run.handled:
            return
        topic, end_s = run.handled[0][0].topic, self._time_s()
        begins_s = [run.begin_s, *(end for _, end in run.handled[:-1])]
        seconds = [end - begin for begin, (_, end) in zip(begins_s, run.handled, strict=True)]
        for counts in self._counts:
            counts.handled_each(topic, seconds)
        if (events := self._session.event_counter) is not None:
            stored = [message.store_unix_ms for message, _ in run.handled]
            events.begun(topic, stored, [end_s - begin for begin in begins_s])


class _Run:
    """One run.

    Attributes:
        call: Used for one call after the other.
        begin_s: When it began, by the clock of the event loop.
        message: The message whose call has not succeeded yet; None between two calls.
        handled_count: Calls that were plain successes.
        handled: Their messages and when their calls ended, if they are counted.
        has_waited: Whether the call of `message` waits, or has waited.
        outputs: Takes the outputs in results; None if results have none, or must wait.
    """

    __slots__ = (
        "begin_s", "call", "handled", "handled_count", "has_waited", "message", "outputs",
    )  # fmt: skip

    def __init__(self, call: HandlerCall, outputs: RunOutputs | None) -> None:
        self.call, self.begin_s, self.outputs = call, call.begin_s, outputs
        self.message: ReceivedMessage | None = None
        self.handled_count = 0
        self.handled: list[tuple[ReceivedMessage, float]] = []
        self.has_waited = False
