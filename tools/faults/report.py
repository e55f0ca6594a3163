"""The report of a run as JSON-compatible values."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tools.faults.history import FirstCalls, History, HistoryProblem, Queue, Send, SendOutcome

TEXTS_MAX = 10
STEP_MS = 100
STALL_MS = 1_000
RECOVERIES = ("sends_resumed_after_ms", "handlings_resumed_after_ms", "in_sync_after_ms")
"""The first two count from the start of the fault, the last one from its end until all processes
serve and are in sync."""
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Stall:
    """The stall of the queue that a fault delayed longest.

    Attributes:
        longest_ms: Longest time without an event. A gap that lasts beyond `end_us` counts only if
            it exceeds `STALL_MS` by then; otherwise the next fault caused it.
        over_after_ms: From the fault to the end of the last gap longer than `STALL_MS`; 0 without
            a gap, None if it did not end.
    """

    longest_ms: int
    over_after_ms: int | None


def stall(done_us: Mapping[Queue, Sequence[int]], begin_us: int, end_us: int) -> Stall:
    """Return the stall that a fault caused.

    Args:
        done_us: Event times of each queue, ascending.
        begin_us: Start of the fault.
        end_us: Start of the next fault, or end of the load.
    """
    found = [_stall(times, begin_us, end_us) for times in done_us.values()]
    overs = [one.over_after_ms for one in found if one.over_after_ms is not None]
    return Stall(
        max((one.longest_ms for one in found), default=0),
        max(overs, default=0) if len(overs) == len(found) else None,
    )


def _stall(times: Sequence[int], begin_us: int, end_us: int) -> Stall:
    longest_ms = over_after_ms = 0
    last_us = begin_us
    for at_us in times[bisect_left(times, begin_us) :]:
        if last_us >= end_us or (at_us > end_us and end_us - last_us <= 1_000 * STALL_MS):
            return Stall(longest_ms, over_after_ms)
        gap_ms = (at_us - last_us) // 1000
        longest_ms = max(longest_ms, gap_ms)
        if gap_ms > STALL_MS:
            over_after_ms = (at_us - begin_us) // 1000
        last_us = at_us
    rest_ms = (end_us - last_us) // 1000
    if rest_ms > STALL_MS:
        return Stall(max(longest_ms, rest_ms), None)
    return Stall(longest_ms, over_after_ms)


def unseen(history: History) -> list[tuple[int, int]]:
    """Return the number of messages with a receipt and no finished handler call, every 100 ms.

    Each item is (ms since the start of the run, count). A message that is handled before its
    producer has the receipt never counts.
    """
    done = _done(history)
    ok = [send for send in history.sends if send.outcome is SendOutcome.OK]
    begins = sorted(send.end_us for send in ok)
    ends = sorted(max(done[send.number], send.end_us) for send in ok if send.number in done)
    return [
        (
            (at_us - history.begin_us) // 1000,
            bisect_left(begins, at_us) - bisect_left(ends, at_us),
        )
        for at_us in range(history.begin_us, history.end_us + 1, STEP_MS * 1000)
    ]


def describe(history: History, reasons: Sequence[HistoryProblem], name: str) -> dict[str, object]:
    """Return the report as JSON-compatible values; times count from the start of the run."""
    done, firsts = _done(history), FirstCalls.of(history.handler_calls)
    ok = [send for send in history.sends if send.outcome is SendOutcome.OK]
    lags = [done[send.number] - send.end_us for send in ok if send.number in done]
    rules = Counter(reason.rule for reason in reasons)
    return {
        "name": name,
        "valid": not reasons,
        "reasons": {
            rule: {"count": count, "texts": _texts(reasons, rule)} for rule, count in rules.items()
        },
        "duration_ms": (history.end_us - history.begin_us) // 1000,
        "sends": {one.value: _count(history.sends, one) for one in SendOutcome},
        "indeterminate_stored": _count(history.sends, SendOutcome.INDETERMINATE, done.__contains__),
        "failures": dict(Counter(send.reason for send in history.sends if send.reason)),
        "handled": len(done),
        "handled_again": len(firsts.repeats),
        "flags": _flags(firsts),
        "member_outages": len(history.outages),
        "remote": _remote(history),
        "committed_samples": len(history.samples),
        "unseen_max": max((count for _, count in unseen(history)), default=0),
        "unseen_at_end": unseen(history)[-1][1],
        "lag_ms_max": max(lags, default=0) // 1000,
        "log_messages": len(history.stored or ()),
        "diagnoses": dict(Counter(watch.reason for watch in history.stuck_reports)),
        "notes": list(history.notes),
        "recovery": _recovery(history, faults := _faults(history)),
        "faults": faults,
    }


def _remote(history: History) -> dict[str, int] | None:
    """Return what the remote clients did; None without gateways."""
    if not history.remote:
        return None
    sent = [one for one in history.sends if one.queue is None and one.outcome is SendOutcome.OK]
    return {
        "sent": len(sent),
        "deliveries": sum(len(one.deliveries) for one in history.remote),
        "delivered": sum(len({of.number for of in one.deliveries}) for one in history.remote),
        "acknowledged": sum(len(one.acks) for one in history.remote),
        "acknowledged_in_order": sum(len(one.acks) for one in history.remote if one.in_order),
        "gateway_outages": len(history.gateway_outages),
    }


def _flags(firsts: FirstCalls) -> dict[str, object]:
    """Return how many first handler calls were flagged `redelivered`, and how many came again.

    A first call is flagged falsely: no member had started its message before.
    """
    flagged = sum(one.redelivered for one in firsts.by_place.values())
    return {
        "first_calls": len(firsts.by_place),
        "flagged_first_calls": flagged,
        "repeated_calls": len(firsts.repeats),
        "false_percent": round(100 * flagged / max(1, len(firsts.by_place)), 2),
    }


def _recovery(
    history: History, faults: Sequence[Mapping[str, object]]
) -> dict[str, dict[str, dict[str, object]]]:
    """Return count and recovery times by service and kind of fault.

    A group of several faults counts for each of them.
    """
    times: dict[tuple[str, str], dict[str, list[int | None]]] = {}
    for struck, fault in zip(history.faults, faults, strict=True):
        healed_ms = None
        if struck.healed_us is not None and struck.end_us is not None:
            healed_ms = (struck.healed_us - struck.end_us) // 1000
        for kind, service in struck.kinds:
            of = times.setdefault((service, kind), {one: [] for one in RECOVERIES})
            for one in RECOVERIES[:2]:
                after_ms = fault[one]
                assert after_ms is None or isinstance(after_ms, int)
                of[one].append(after_ms)
            of[RECOVERIES[2]].append(healed_ms)
    described: dict[str, dict[str, dict[str, object]]] = defaultdict(dict)
    for (service, kind), of in sorted(times.items()):
        described[service][kind] = {
            "count": len(of[RECOVERIES[0]]), **{one: _spread(found) for one, found in of.items()}
        }  # fmt: skip
    return described


def _spread(times_ms: Sequence[int | None]) -> dict[str, int | None]:
    """Return median and maximum; None stands for "never"."""
    known = sorted(math.inf if one is None else one for one in times_ms)
    found = {"p50": known[(len(known) - 1) // 2], "max": known[-1]}
    return {name: None if one == math.inf else int(one) for name, one in found.items()}


def _faults(history: History) -> list[dict[str, object]]:
    sent: dict[Queue, list[int]] = defaultdict(list)
    for send in sorted(history.sends, key=lambda one: one.end_us):
        if send.queue is not None:
            sent[send.queue].append(send.end_us)
    handled: dict[Queue, list[int]] = defaultdict(list)
    for one in sorted(history.handler_calls, key=lambda one: one.done_us or 0):
        if one.done_us is not None:
            handled[one.queue].append(one.done_us)
    last_us = max((send.begin_us for send in history.sends), default=history.end_us)
    described: list[dict[str, object]] = []
    ends_us = [*(fault.begin_us for fault in history.faults[1:]), last_us]
    for fault, end_us in zip(history.faults, ends_us, strict=False):
        sends, handler_calls = (stall(done, fault.begin_us, end_us) for done in (sent, handled))
        described.append(
            {
                "what": fault.what,
                "begin_ms": _since(history, fault.begin_us),
                "end_ms": _since(history, fault.end_us),
                "healed_ms": _since(history, fault.healed_us),
                "sends_stalled_ms": sends.longest_ms,
                "sends_resumed_after_ms": sends.over_after_ms,
                "handlings_stalled_ms": handler_calls.longest_ms,
                "handlings_resumed_after_ms": handler_calls.over_after_ms,
            }
        )
    return described


def _done(history: History) -> dict[int, int]:
    """Return the time at which the first handler call of each message ended."""
    done: dict[int, int] = {}
    for one in history.handler_calls:
        if one.done_us is not None:
            _keep_first(done, one.number, one.done_us)
    return done


def _keep_first(times: dict[Key, int], key: Key, at_us: int) -> None:
    times[key] = min(at_us, times.get(key, at_us))


def _count(
    sends: Iterable[Send], outcome: SendOutcome, wanted: Callable[[int], bool] = lambda _: True
) -> int:
    return sum(send.outcome is outcome and wanted(send.number) for send in sends)


def _texts(reasons: Iterable[HistoryProblem], rule: str) -> list[str]:
    return [reason.text for reason in reasons if reason.rule == rule][:TEXTS_MAX]


def _since(history: History, at_us: int | None) -> int | None:
    return None if at_us is None else (at_us - history.begin_us) // 1000
