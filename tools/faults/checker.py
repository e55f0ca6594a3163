"""Checks whether a correct broker could have produced the merged history of a run.

The model is small: a queue is a list of messages that only grows; a group handles it in order; a
message is handled by a second member only if its owner was killed or paused before it was
committed. Ids such as T1 are those of the checked invariants.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from tools.faults.history import (
    FirstCalls,
    HandlerCall,
    History,
    HistoryProblem,
    MemberOutage,
    OwnershipChange,
    ProgressSample,
    Queue,
    Send,
    SendOutcome,
)
from tools.faults.remote_checker import check_remote_clients

CAUGHT_US = 250_000
"""A member that is paused between the check of its lease and the start of a handler starts that
handler at most this long after the pause, under its old token: at most one message per queue."""

STUCK_MS = 25_000
"""The nameserver inspects queues every 15 s, and reports for another 5 s that a queue has moved;
the rest is for delays of a busy machine."""
NO_REASON = ("", "IDLE", "MOVING", "FILTERED")
"""Diagnoses that report no problem."""


def check(history: History, span_max: int) -> list[HistoryProblem]:
    """Return all problems of a history; the run is valid without any.

    Args:
        span_max: Setting of the consumers: an owner has at most this many offsets in flight.
    """
    firsts = FirstCalls.of(history.handler_calls)
    found = [HistoryProblem("run", problem) for problem in history.problems]
    found += _check_handled(history)
    found += check_remote_clients(history)
    found += _check_log(history)
    found += _check_places(history)
    found += _check_real_time(history)
    found += _check_lanes(history)
    found += _check_owners(history)
    found += _check_repeats(history, firsts, span_max)
    found += _check_order(firsts)
    found += _check_committed(history, firsts)
    found += _check_stuck_queues(history)
    return found


def _check_handled(history: History) -> Iterator[HistoryProblem]:
    """Acknowledged messages are handled, failed ones never, indeterminate ones may be. T2, T4."""
    done = {one.number for one in history.handler_calls if one.done_us is not None}
    started = {one.number for one in history.handler_calls}
    for send in history.sends:
        if send.outcome is SendOutcome.OK and send.number not in done:
            yield HistoryProblem(
                "lost", f"{send.number} at {send.queue}@{send.offset} was never handled"
            )
        if send.outcome is SendOutcome.FAIL and send.number in started:
            yield HistoryProblem(
                "failed", f"{send.number} was handled, though it failed: {send.reason}"
            )
    for number in sorted(started - {send.number for send in history.sends}):
        yield HistoryProblem("unknown", f"{number} was handled and never sent")


def _check_log(history: History) -> Iterator[HistoryProblem]:
    """The log has each message at the offset of its receipt, no failed one, no hole. T1, T2, T4."""
    if history.stored is None:
        return
    at = {(one.queue, one.offset): one.number for one in history.stored}
    offsets: dict[Queue, list[int]] = defaultdict(list)
    for one in history.stored:
        offsets[one.queue].append(one.offset)
    for queue, found in offsets.items():
        if len(set(found)) < len(found):
            yield HistoryProblem("log", f"an offset of {queue} was read twice")
        if found != sorted(found) or max(found) - min(found) + 1 > len(found):
            yield HistoryProblem("log", f"{queue} has holes between {min(found)} and {max(found)}")
    for send in history.sends:
        if send.queue is None:
            continue
        kept = offsets.get(send.queue)
        # Retention may have removed what is below the first message.
        if kept is None or (send.offset >= kept[0] and (send.queue, send.offset) not in at):
            yield HistoryProblem(
                "lost", f"{send.number} is not at {send.queue}@{send.offset} of the log"
            )
    failed = {send.number for send in history.sends if send.outcome is SendOutcome.FAIL}
    for number in sorted(failed & set(at.values())):
        yield HistoryProblem("failed", f"{number} is in the log, though it failed")


def _check_places(history: History) -> Iterator[HistoryProblem]:
    """Each message has one offset, each offset one message, as in the receipts. T1, T4, T5."""
    seen: set[tuple[int, Queue, int]] = {
        (send.number, send.queue, send.offset) for send in history.sends if send.queue is not None
    }
    receipts = Counter((queue, offset) for _, queue, offset in seen)
    for (queue, offset), count in receipts.items():
        if count > 1:
            yield HistoryProblem(
                "receipts", f"{count} messages have a receipt for {queue}@{offset}"
            )
    seen |= {(one.number, one.queue, one.offset) for one in history.handler_calls}
    seen |= {(one.number, one.queue, one.offset) for one in history.stored or ()}
    places, numbers = defaultdict(set), defaultdict(set)
    for number, queue, offset in seen:
        places[number].add((queue, offset))
        numbers[queue, offset].add(number)
    for number, at in places.items():
        if len(at) > 1:
            yield HistoryProblem("stored twice", f"{number} is at {sorted(at)}")
    for (queue, offset), those in numbers.items():
        if len(those) > 1:
            yield HistoryProblem("inconsistent", f"{queue}@{offset} was {sorted(those)}")


def _check_real_time(history: History) -> Iterator[HistoryProblem]:
    """A message sent after a receipt has a higher offset in the queue. T1."""
    by_queue: dict[Queue, list[Send]] = defaultdict(list)
    for send in history.sends:
        if send.queue is not None:
            by_queue[send.queue].append(send)
    for queue, sends in by_queue.items():
        ended = sorted(sends, key=lambda one: one.end_us)
        index, highest = 0, -1
        for send in sorted(sends, key=lambda one: one.begin_us):
            while ended[index].end_us < send.begin_us:
                highest = max(highest, ended[index].offset)
                index += 1
            if send.offset < highest:
                text = (
                    f"{send.number} is at {queue}@{send.offset}, sent after {highest} had a receipt"
                )
                yield HistoryProblem("real time", text)


def _check_lanes(history: History) -> Iterator[HistoryProblem]:
    """Messages of one ordering key are in one queue, in send order. T1."""
    last: dict[str, tuple[int, Queue, int]] = {}
    for send in sorted(history.sends, key=lambda one: one.number):
        if not send.lane or send.queue is None:
            continue
        number, queue, offset = last.get(send.lane, (-1, send.queue, -1))
        if queue != send.queue:
            text = f"{send.lane}: {number} is in {queue}, {send.number} in {send.queue}"
            yield HistoryProblem("key order", text)
        elif offset >= send.offset:
            text = f"{send.lane}: {number} is at {queue}@{offset}, {send.number} at {send.offset}"
            yield HistoryProblem("key order", text)
        last[send.lane] = send.number, send.queue, send.offset


def _check_owners(history: History) -> Iterator[HistoryProblem]:
    """A queue has one owner at a time: a grant ends handling under older tokens. T8, T9."""
    outages = _by_member(history.outages)
    starts: dict[Queue, list[HandlerCall]] = defaultdict(list)
    for handling in history.handler_calls:
        starts[handling.queue].append(handling)
    holders: dict[tuple[Queue, int], str] = {}
    grants: dict[Queue, list[OwnershipChange]] = defaultdict(list)
    for own in history.ownership_changes:
        if own.kind == "granted":
            if holders.setdefault((own.queue, own.token), own.member) != own.member:
                yield HistoryProblem(
                    "owners", f"token {own.token} of {own.queue} was granted to two members"
                )
            grants[own.queue].append(own)
    for queue, granted in grants.items():
        granted.sort(key=lambda own: own.at_us)
        times = [own.at_us for own in granted]
        newest = list(accumulate((own.token for own in granted), max))
        for handling in starts[queue]:
            index = bisect_right(times, handling.start_us)
            token = newest[index - 1] if index else 0
            if handling.token < token and _caught(outages, handling) is None:
                text = f"{handling.member} started {queue}@{handling.offset} under token "
                yield HistoryProblem("owners", f"{text}{handling.token} when {token} was granted")
            if holders.get((queue, handling.token), handling.member) != handling.member:
                text = f"{handling.member} started {queue}@{handling.offset} under the token of "
                yield HistoryProblem("owners", text + holders[queue, handling.token])


def _by_member(outages: Sequence[MemberOutage]) -> dict[str, list[MemberOutage]]:
    found: dict[str, list[MemberOutage]] = defaultdict(list)
    for crash in outages:
        found[crash.member].append(crash)
    return found


def _check_repeats(history: History, firsts: FirstCalls, span_max: int) -> Iterator[HistoryProblem]:
    """Only messages in flight at a killed or paused owner repeat, and are flagged. T6, T7, T9."""
    outages = _by_member(history.outages)
    committed = _Committed(history.samples)
    in_flight: dict[tuple[MemberOutage, Queue], set[int]] = defaultdict(set)
    caught: Counter[tuple[MemberOutage, Queue]] = Counter()
    for before, after in firsts.repeats:
        what = (
            f"{before.queue}@{before.offset} by {before.member} under token {before.token} and "
            f"{after.member} under {after.token}, {(after.start_us - before.start_us) // 1000} ms "
            "later"
        )
        if after.token < before.token and (late := _caught(outages, after)) is not None:
            caught[late, after.queue] += 1
            continue
        if not after.redelivered:
            yield HistoryProblem("not flagged", what)
        outage = _reason_to_repeat(outages.get(before.member, []), before, after)
        if outage is None or after.token == before.token:
            yield HistoryProblem("handled twice", what)
        elif committed.below(after.queue, after.start_us) > after.offset:
            yield HistoryProblem("handled twice", f"{what}; it was committed by then")
        else:
            in_flight[outage, before.queue].add(before.offset)
    for (crash, queue), offsets in in_flight.items():
        if max(offsets) - min(offsets) >= span_max:
            text = f"{crash.member} had {min(offsets)} to {max(offsets)} of {queue} in flight"
            yield HistoryProblem("more than in flight", text)
    for (crash, queue), count in caught.items():
        if count > 1:
            text = f"{crash.member} started {count} messages of {queue} after its pause"
            yield HistoryProblem("zombie", text)


def _reason_to_repeat(
    outages: list[MemberOutage], before: HandlerCall, after: HandlerCall
) -> MemberOutage | None:
    """Return the outage during which the owner had the message in flight."""
    for crash in outages:
        until_us = crash.begin_us if crash.end_us is None else crash.end_us + CAUGHT_US
        if before.start_us <= until_us and after.start_us > crash.begin_us:
            return crash
    return None


def _caught(outages: dict[str, list[MemberOutage]], handling: HandlerCall) -> MemberOutage | None:
    """Return the pause that ended less than `CAUGHT_US` before the start of the handler call."""
    for crash in outages.get(handling.member, ()):
        if (
            crash.paused
            and crash.end_us is not None
            and 0 <= handling.start_us - crash.end_us <= CAUGHT_US
        ):
            return crash
    return None


def _check_order(firsts: FirstCalls) -> Iterator[HistoryProblem]:
    """First handler calls of a queue have ascending offsets. T17."""
    for queue, handler_calls in firsts.by_queue():
        highest = -1
        for one in handler_calls:
            if one.offset < highest:
                text = f"{queue}@{one.offset} was first handled after {highest}, by {one.member}"
                yield HistoryProblem("order", text)
            highest = max(highest, one.offset)


def _check_committed(history: History, firsts: FirstCalls) -> Iterator[HistoryProblem]:
    """Committed offsets never go back and never pass an unhandled message. T13, T14."""
    highest: dict[Queue, int] = {}
    done = _Done(history.handler_calls)
    for sample in history.samples:
        for queue, offset in sample.committed.items():
            if offset < highest.get(queue, 0):
                yield HistoryProblem("went back", f"{queue} went from {highest[queue]} to {offset}")
            if (gap := done.gap(queue, offset, sample.end_us)) is not None:
                text = f"{queue} was committed up to {offset}, and {gap} was not handled by then"
                yield HistoryProblem("passed over", text)
            highest[queue] = max(offset, highest.get(queue, 0))
    committed = _Committed(history.samples)
    for one in firsts.by_place.values():
        if committed.below(one.queue, one.start_us) > one.offset:
            text = f"{one.queue}@{one.offset} was first handled after it was committed"
            yield HistoryProblem("passed over", text)


def _check_stuck_queues(history: History) -> Iterator[HistoryProblem]:
    """A queue with a backlog moves, or the diagnosis has a reason. T40."""
    for watch in history.stuck_reports:
        if watch.unmoved_ms >= STUCK_MS and watch.reason in NO_REASON:
            text = f"{watch.queue} stalled at {watch.committed} for {watch.unmoved_ms} ms"
            yield HistoryProblem("stuck", f"{text}: {watch.reason or 'no diagnosis'}")


class _Committed:
    """The committed offsets that were known at a given time."""

    def __init__(self, samples: Sequence[ProgressSample]) -> None:
        self._times: dict[Queue, list[int]] = defaultdict(list)
        self._offsets: dict[Queue, list[int]] = defaultdict(list)
        for sample in samples:
            for queue, offset in sample.committed.items():
                self._times[queue].append(sample.end_us)
                self._offsets[queue].append(offset)

    def below(self, queue: Queue, at_us: int) -> int:
        """Return the highest committed offset that was known before `at_us`."""
        index = bisect_left(self._times[queue], at_us)
        return self._offsets[queue][index - 1] if index else 0


class _Done:
    """The time by which all offsets of a queue up to a given one were handled."""

    def __init__(self, handler_calls: Sequence[HandlerCall]) -> None:
        done: dict[Queue, dict[int, int]] = defaultdict(dict)
        for one in handler_calls:
            if one.done_us is not None:
                earlier_us = done[one.queue].get(one.offset, one.done_us)
                done[one.queue][one.offset] = min(earlier_us, one.done_us)
        self._by_us: dict[Queue, list[int]] = {}
        for queue, times in done.items():
            by_us = self._by_us[queue] = []
            while (at_us := times.get(len(by_us))) is not None:
                by_us.append(max(at_us, by_us[-1] if by_us else 0))

    def gap(self, queue: Queue, offset: int, at_us: int) -> int | None:
        """Return the lowest offset below `offset` not handled by `at_us`; None if all were."""
        lowest = bisect_right(self._by_us.get(queue, []), at_us)
        return lowest if lowest < offset else None
