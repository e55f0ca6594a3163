"""Evaluate the alert rules: one state machine for each kind of rule. Pure.

An evaluator keeps the state of one rule for one subject. `feed` takes signals, oldest first, and
`tick` takes the event time; `wake_unix_ms` is the time of the next tick. The state is kept as JSON.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, Protocol, Self, TypeVar

from pydantic import BaseModel

from batonmq._core.log_buckets import percentile
from batonspark.alert_changes import AlertChange, AlertText, FiringAlerts, Signal
from batonspark.alert_rules import ConflictRule, CountRule, LagRule, LatencyRule, SilenceRule
from batonspark.lag_verdict import LagLimits, LagSample, LagVerdict, judge

SLOTS = 30
"""Slots of a window: a counted event leaves the window at most a 30th of its length late."""


R_contra = TypeVar("R_contra", contravariant=True)


class RuleEvaluator(Protocol[R_contra]):
    """Interface of the evaluators."""

    alarm: FiringAlerts

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        """Return the evaluator with this state; a new one for an empty mapping."""

    def model_dump(self) -> dict[str, Any]:
        """Return the state as a JSON object."""

    def feed(self, rule: R_contra, signal: Signal) -> Iterator[AlertChange]:
        """Process a signal."""

    def tick(self, rule: R_contra, unix_ms: int) -> Iterator[AlertChange]:
        """Advance the event time."""

    def wake_unix_ms(self, rule: R_contra) -> int | None:
        """Return when `tick` has to be called; None if there is no state to keep."""


class LagEvaluator(BaseModel):
    """Fires while the verdict on a queue is not `ok`; the verdict is the detail of the alert."""

    alarm: FiringAlerts = FiringAlerts()
    samples: list[LagSample] = []
    reason: str = ""
    text: str = ""
    fine_count: int = 0
    last_unix_ms: int = 0

    def feed(self, rule: LagRule, signal: Signal) -> Iterator[AlertChange]:
        """See RuleEvaluator."""
        if signal.kind == "stuck_changed":
            self.reason, self.text = signal.reason, signal.text
            self.last_unix_ms = max(self.last_unix_ms, signal.unix_ms)
        elif signal.kind == "progress_reset":
            self.samples = []
        elif not self.samples or signal.unix_ms > self.samples[-1].unix_ms:
            self.samples = [*self.samples[-rule.samples :], _sample(signal)]
            self.last_unix_ms = max(self.last_unix_ms, signal.unix_ms)
            yield from self._judge(rule, signal.unix_ms)

    def tick(self, rule: LagRule, unix_ms: int) -> Iterator[AlertChange]:
        """See RuleEvaluator."""
        if unix_ms >= self.last_unix_ms + rule.gone_ms:
            telling = AlertText("no samples of the queue any more", "GONE")
            yield from self.alarm.resolve_all(unix_ms, telling)
            self.samples, self.last_unix_ms = [], 0

    def wake_unix_ms(self, rule: LagRule) -> int | None:
        """See RuleEvaluator."""
        return self.last_unix_ms + rule.gone_ms if self.last_unix_ms else None

    def _judge(self, rule: LagRule, unix_ms: int) -> Iterator[AlertChange]:
        limits = LagLimits(rule.samples, rule.lag_min, rule.age_ms_max)
        verdict = judge(self.samples, self.reason, limits)
        if verdict is LagVerdict.BLOCKED and self.reason in rule.ignored_reasons:
            verdict = LagVerdict.OK
        self.fine_count = self.fine_count + 1 if verdict is LagVerdict.OK else 0
        telling = self._telling(verdict)
        if verdict is not LagVerdict.OK:
            for other in sorted(self.alarm.since.keys() - {verdict}):
                yield from self.alarm.resolve(other, unix_ms, telling)
            yield from self.alarm.fire(verdict, unix_ms, telling)
        elif self.fine_count >= rule.clear_samples:
            yield from self.alarm.resolve_all(unix_ms, telling)

    def _telling(self, verdict: LagVerdict) -> AlertText:
        last = self.samples[-1]
        age = f", the oldest for {last.oldest_unacked_ms / 1000:g} s" if last.lag else ""
        summary = f"{verdict}: {last.lag} messages wait{age if last.oldest_unacked_ms > 0 else ''}"
        cause = (
            self.text if verdict not in (LagVerdict.OK, LagVerdict.REWOUND, LagVerdict.SLOW) else ""
        )
        return AlertText(f"{summary}; {cause}" if cause else summary, self.reason, float(last.lag))


class CountEvaluator(BaseModel):
    """Fires while a window has too many events; the events of one rebalance count as one."""

    alarm: FiringAlerts = FiringAlerts()
    slots: dict[int, int] = {}
    generation: int = 0

    def feed(self, rule: CountRule, signal: Signal) -> Iterator[AlertChange]:
        """See RuleEvaluator."""
        if signal.generation and signal.generation == self.generation:
            return
        self.generation = signal.generation
        width_ms = max(1, rule.window_ms // SLOTS)
        slot_ms = signal.unix_ms - signal.unix_ms % width_ms
        self.slots[slot_ms] = self.slots.get(slot_ms, 0) + 1
        yield from self.tick(rule, signal.unix_ms)

    def tick(self, rule: CountRule, unix_ms: int) -> Iterator[AlertChange]:
        """See RuleEvaluator."""
        self.slots = {at: n for at, n in self.slots.items() if self._leaves(rule, at) > unix_ms}
        count = sum(self.slots.values())
        summary = f"{count} within {rule.window_ms / 1000:g} s"
        telling = AlertText(summary, value=float(count), limit=float(rule.count_max))
        if count > rule.count_max:
            yield from self.alarm.fire("", unix_ms, telling)
        else:
            yield from self.alarm.resolve_all(unix_ms, telling)

    def wake_unix_ms(self, rule: CountRule) -> int | None:
        """See RuleEvaluator."""
        return min((self._leaves(rule, at) for at in self.slots), default=None)

    def _leaves(self, rule: CountRule, slot_ms: int) -> int:
        return slot_ms + max(1, rule.window_ms // SLOTS) + rule.window_ms


class ConflictEvaluator(BaseModel):
    """Fires if members of a group have different subscriptions."""

    alarm: FiringAlerts = FiringAlerts()
    last_unix_ms: int = 0

    def feed(self, rule: ConflictRule, signal: Signal) -> Iterator[AlertChange]:
        """See RuleEvaluator."""
        if signal.kind == "subscription_changed" and not signal.text:
            return  # the subscriptions agree
        self.last_unix_ms = max(self.last_unix_ms, signal.unix_ms)
        summary = f"{signal.client_id} has a different subscription: {_words(signal.text)}"
        yield from self.alarm.fire("", signal.unix_ms, AlertText(summary))

    def tick(self, rule: ConflictRule, unix_ms: int) -> Iterator[AlertChange]:
        """See RuleEvaluator."""
        if unix_ms >= self.last_unix_ms + rule.clear_ms:
            self.last_unix_ms = 0
            telling = AlertText(f"no conflict for {rule.clear_ms / 1000:g} s")
            yield from self.alarm.resolve_all(unix_ms, telling)

    def wake_unix_ms(self, rule: ConflictRule) -> int | None:
        """See RuleEvaluator."""
        return self.last_unix_ms + rule.clear_ms if self.last_unix_ms else None


class SilenceEvaluator(BaseModel):
    """Fires for each member that expired, until it rejoins or is forgotten."""

    alarm: FiringAlerts = FiringAlerts()

    def feed(self, rule: SilenceRule, signal: Signal) -> Iterator[AlertChange]:
        """See RuleEvaluator."""
        if signal.kind == "member_seen":
            telling = AlertText("the member rejoined", "BACK")
            yield from self.alarm.resolve(signal.client_id, signal.unix_ms, telling)
        elif len(self.alarm.since) < rule.clients_max:
            silent = f" for {signal.silent_ms / 1000:g} s" if signal.silent_ms else ""
            telling = AlertText(f"no heartbeat{silent}; the member expired")
            yield from self.alarm.fire(signal.client_id, signal.unix_ms, telling)

    def tick(self, rule: SilenceRule, unix_ms: int) -> Iterator[AlertChange]:
        """See RuleEvaluator."""
        telling = AlertText("the member did not rejoin", "GONE")
        for client_id, since in sorted(self.alarm.since.items()):
            if unix_ms >= since + rule.forget_ms:
                yield from self.alarm.resolve(client_id, unix_ms, telling)

    def wake_unix_ms(self, rule: SilenceRule) -> int | None:
        """See RuleEvaluator."""
        return min((at + rule.forget_ms for at in self.alarm.since.values()), default=None)


class LatencyEvaluator(BaseModel):
    """Fires while a latency percentile, merged from sketches, is above its limit."""

    alarm: FiringAlerts = FiringAlerts()
    slots: dict[int, dict[int, int]] = {}

    def feed(self, rule: LatencyRule, signal: Signal) -> Iterator[AlertChange]:
        """See RuleEvaluator."""
        width_ms = rule.window_ms // SLOTS
        slot = self.slots.setdefault(signal.unix_ms - signal.unix_ms % width_ms, {})
        for bucket, count in enumerate(signal.buckets, signal.first_bucket):
            if count:
                slot[bucket] = slot.get(bucket, 0) + count
        yield from self.tick(rule, signal.unix_ms)

    def tick(self, rule: LatencyRule, unix_ms: int) -> Iterator[AlertChange]:
        """See RuleEvaluator."""
        self.slots = {at: n for at, n in self.slots.items() if self._leaves(rule, at) > unix_ms}
        merged: Counter[int] = Counter()
        for slot in self.slots.values():
            merged.update(slot)
        total = merged.total()
        counts = [merged[bucket] for bucket in range(max(merged, default=-1) + 1)]
        value_ms = percentile(0, counts, rule.percentile / 100) / 1000
        summary = (
            f"p{rule.percentile:g} of {rule.operation} is {value_ms:.3g} ms over"
            f" {rule.window_ms / 1000:g} s"
        )
        telling = AlertText(summary, value=value_ms, limit=rule.limit_ms)
        if total >= rule.count_min and value_ms > rule.limit_ms:
            yield from self.alarm.fire("", unix_ms, telling)
        else:
            yield from self.alarm.resolve_all(unix_ms, telling)

    def wake_unix_ms(self, rule: LatencyRule) -> int | None:
        """See RuleEvaluator."""
        return min((self._leaves(rule, at) for at in self.slots), default=None)

    def _leaves(self, rule: LatencyRule, slot_ms: int) -> int:
        return slot_ms + rule.window_ms // SLOTS + rule.window_ms


def _words(differences: str) -> str:
    """Return differences of subscriptions (a JSON array) as text."""
    return "; ".join(
        f"{each['topic'] or 'group'}: {each['setting']} {each['newcomer_value'] or 'nothing'},"
        f" {each['member_client_id']} has {each['member_value'] or 'nothing'}"
        for each in json.loads(differences or "[]")
    )


def _sample(signal: Signal) -> LagSample:
    lag = signal.next_offset - signal.committed_offset - signal.acked_beyond_count
    return LagSample(
        signal.unix_ms,
        signal.committed_offset,
        signal.delivered_offset,
        max(0, lag),
        signal.oldest_unacked_ms,
    )
