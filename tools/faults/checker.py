"""Holds the merged history of a run against what a broker that keeps its promises can produce.

The model is small: a queue is a list of messages that only grows; a group goes through it in order;
a message passes from hand to hand only when its owner was killed or stood still before it was
committed. The ids are those of the invariants that are checked.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from tools.faults.history import (
    FirstCalls,
    HandlerCall,
    History,
    MemberOutage,
    OwnershipChange,
    ProgressSample,
    Queue,
    Send,
    SendOutcome,
)

CAUGHT_US = 250_000
"""Who stood still between looking at its deadline and starting the handler starts it so soon after
it goes on, under its old token: one message of a queue at most."""

STUCK_MS = 25_000
"""Somebody who looked 15 s ago, and then now, may believe for 5 s more that a queue has moved."""
NO_REASON = ("", "IDLE", "MOVING", "FILTERED")
"""Diagnoses that say that nothing is wrong."""


class HistoryProblem(NamedTuple):
    """Why a history is not valid."""

    rule: str
    text: str


def check(history: History, span_max: int) -> list[HistoryProblem]:
    """Everything that should not be; a run is valid if that is nothing.

    Args:
        span_max: Of the consumers: no owner has more offsets than this in hand.
    """
    firsts = FirstCalls.of(history.handler_calls)
    found = [HistoryProblem("run", problem) for problem in history.problems]
    found += _check_handled(history)
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
    """Ok: handled to the end. Failed: never. Indeterminate: either. T2, T4."""
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
        yield HistoryProblem("unknown", f"{number} was handled, and nobody has sent it")


def _check_log(history: History) -> Iterator[HistoryProblem]:
    """The log has what has a receipt, and where; nothing that failed; no holes. T1, T2, T4."""
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
    """One message at a place, one place for a message; receipts say where. T1, T4, T5."""
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
    """What was sent after a receipt was there stands behind it in its queue. T1."""
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
                text = f"{send.number} is at {queue}@{send.offset}, sent when {highest} was told"
                yield HistoryProblem("real time", text)


def _check_lanes(history: History) -> Iterator[HistoryProblem]:
    """Messages of one ordering key stand in their queue in the order of their sending. T1."""
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
    """One owner at a time: a grant ends what was under older tokens, whoever had it. T8, T9."""
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
                    "owners", f"token {own.token} of {own.queue} was granted to two"
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
    """Twice only what a killed or paused owner had in hand, and flagged. T6, T7, T9."""
    outages = _by_member(history.outages)
    committed = _Committed(history.samples)
    in_hand: dict[tuple[MemberOutage, Queue], set[int]] = defaultdict(set)
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
        fall = _reason_to_repeat(outages.get(before.member, []), before, after)
        if fall is None or after.token == before.token:
            yield HistoryProblem("handled twice", what)
        elif committed.below(after.queue, after.start_us) > after.offset:
            yield HistoryProblem("handled twice", f"{what}; it was committed by then")
        else:
            in_hand[fall, before.queue].add(before.offset)
    for (crash, queue), offsets in in_hand.items():
        if max(offsets) - min(offsets) >= span_max:
            text = f"{crash.member} had {min(offsets)} to {max(offsets)} of {queue} in hand"
            yield HistoryProblem("more than in hand", text)
    for (crash, queue), count in caught.items():
        if count > 1:
            text = f"{crash.member} started {count} messages of {queue} after its pause"
            yield HistoryProblem("zombie", text)


def _reason_to_repeat(
    outages: list[MemberOutage], before: HandlerCall, after: HandlerCall
) -> MemberOutage | None:
    """The fall of the owner that left the message in its hand."""
    for crash in outages:
        until_us = crash.begin_us if crash.end_us is None else crash.end_us + CAUGHT_US
        if before.start_us <= until_us and after.start_us > crash.begin_us:
            return crash
    return None


def _caught(outages: dict[str, list[MemberOutage]], handling: HandlerCall) -> MemberOutage | None:
    """The pause in whose first moment afterwards a handler was started that somebody else had."""
    for crash in outages.get(handling.member, ()):
        if (
            crash.paused
            and crash.end_us is not None
            and 0 <= handling.start_us - crash.end_us <= CAUGHT_US
        ):
            return crash
    return None


def _check_order(firsts: FirstCalls) -> Iterator[HistoryProblem]:
    """First handlings of a queue ascend. T17."""
    for queue, handler_calls in firsts.by_queue():
        highest = -1
        for one in handler_calls:
            if one.offset < highest:
                text = f"{queue}@{one.offset} was first handled after {highest}, by {one.member}"
                yield HistoryProblem("order", text)
            highest = max(highest, one.offset)


def _check_committed(history: History, firsts: FirstCalls) -> Iterator[HistoryProblem]:
    """Committed offsets never fall, and pass nothing that nobody has handled. T13, T14."""
    highest: dict[Queue, int] = {}
    done = _Done(history.handler_calls)
    for sample in history.samples:
        for queue, offset in sample.committed.items():
            if offset < highest.get(queue, 0):
                yield HistoryProblem("rewound", f"{queue} went from {highest[queue]} to {offset}")
            if (gap := done.gap(queue, offset, sample.end_us)) is not None:
                text = f"{queue} was committed up to {offset}, and {gap} was not handled by then"
                yield HistoryProblem("passed over", text)
            highest[queue] = max(offset, highest.get(queue, 0))
    committed = _Committed(history.samples)
    for one in firsts.by_place.values():
        if committed.below(one.queue, one.start_us) > one.offset:
            text = f"{one.queue}@{one.offset} was first handled when it was committed already"
            yield HistoryProblem("passed over", text)


def _check_stuck_queues(history: History) -> Iterator[HistoryProblem]:
    """A queue with a backlog moves, or something says why not. T40."""
    for watch in history.stuck_reports:
        if watch.unmoved_ms >= STUCK_MS and watch.reason in NO_REASON:
            text = f"{watch.queue} stood at {watch.committed} for {watch.unmoved_ms} ms"
            yield HistoryProblem("stuck", f"{text}: {watch.reason or 'nothing was said'}")


class _Committed:
    """Up to where queues were known to be committed at a time."""

    def __init__(self, samples: Sequence[ProgressSample]) -> None:
        self._times: dict[Queue, list[int]] = defaultdict(list)
        self._offsets: dict[Queue, list[int]] = defaultdict(list)
        for sample in samples:
            for queue, offset in sample.committed.items():
                self._times[queue].append(sample.end_us)
                self._offsets[queue].append(offset)

    def below(self, queue: Queue, at_us: int) -> int:
        """Every offset below was known to be committed before `at_us`."""
        index = bisect_left(self._times[queue], at_us)
        return self._offsets[queue][index - 1] if index else 0


class _Done:
    """By when every offset of a queue up to some one was handled to the end."""

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
        """The lowest offset below `offset` that was not handled by `at_us`; None if all were."""
        lowest = bisect_right(self._by_us.get(queue, []), at_us)
        return lowest if lowest < offset else None
