"""The state of one key of the query `alerts`: a subject with the evaluators of its rules. Pure.

A subject is `queue|group|topic|broker|queue_id`, `group|group` or `latency|source|operation`. The
subject `clock|source` has no rule: its signals only advance the event time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from batonspark.alert_changes import AlertChange, AlertText, FiringAlerts, Signal
from batonspark.alert_rules import Rule, RuleBook
from batonspark.rule_evaluators import (
    ConflictEvaluator,
    CountEvaluator,
    LagEvaluator,
    LatencyEvaluator,
    RuleEvaluator,
    SilenceEvaluator,
)

_STATE_VERSION = 1
_WATCHES: Mapping[str, type[RuleEvaluator[Any]]] = {
    "lag": LagEvaluator,
    "rebalance_storm": CountEvaluator,
    "steals": CountEvaluator,
    "subscription_conflict": ConflictEvaluator,
    "silent_client": SilenceEvaluator,
    "latency": LatencyEvaluator,
}
KINDS: Mapping[str, tuple[str, ...]] = {
    "lag": ("queue_lag", "stuck_changed", "progress_reset"),
    "rebalance_storm": ("rebalanced",),
    "steals": ("lock_granted",),
    "subscription_conflict": ("subscription_refused", "subscription_changed"),
    "silent_client": ("member_seen", "member_expired"),
    "latency": ("latency",),
}
"""Kinds of events that each rule reads; of lock_granted only takeovers (`stolen`)."""
_GROUP_RULES = ("rebalance_storm", "steals", "subscription_conflict", "silent_client")


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert change with the name and the severity of its rule."""

    rule: str
    severity: str
    change: AlertChange


class AlertSubject:
    """The evaluators of the enabled rules of one subject.

    Args:
        stored: The state, as `stored` returned it; empty for a new subject.
    """

    def __init__(self, key: str, book: RuleBook, stored: str = "") -> None:
        state: dict[str, Any] = json.loads(stored) if stored else {"version": _STATE_VERSION}
        if state["version"] != _STATE_VERSION:
            raise ValueError(f"state has version {state['version']}, expected {_STATE_VERSION}")
        self._rules = dict(_rules(key, book))
        known = state.get("watches", {})
        self._watches: dict[str, RuleEvaluator[Any]] = {
            name: _WATCHES[_kind(name)].model_validate(known.get(name, {})) for name in self._rules
        }
        self._orphans = {
            name: FiringAlerts.model_validate(known[name]["alarm"])
            for name in sorted(known.keys() - self._rules.keys())
        }

    def feed(self, signals: Iterable[Signal]) -> Iterator[Alert]:
        """Process signals, oldest first."""
        for signal in signals:
            yield from self.advance(signal.unix_ms)
            for name, watch in self._watches.items():
                if signal.kind in KINDS[_kind(name)]:
                    yield from self._alerts(name, watch.feed(self._rules[name], signal))

    def advance(self, unix_ms: int) -> Iterator[Alert]:
        """Advance the event time: run each tick that is due, in order of its time."""
        yield from self._orphaned(unix_ms)
        while (due := self.wake_unix_ms) is not None and due <= unix_ms:
            for name, watch in self._watches.items():
                if watch.wake_unix_ms(self._rules[name]) == due:
                    yield from self._alerts(name, watch.tick(self._rules[name], due))

    @property
    def wake_unix_ms(self) -> int | None:
        """When `advance` has to be called; None if there is no state to keep."""
        wakes = [watch.wake_unix_ms(self._rules[name]) for name, watch in self._watches.items()]
        return min((wake for wake in wakes if wake is not None), default=None)

    @property
    def stored(self) -> str:
        """The state as JSON."""
        watches = {name: watch.model_dump() for name, watch in self._watches.items()}
        return json.dumps({"version": _STATE_VERSION, "watches": watches})

    def _orphaned(self, unix_ms: int) -> Iterator[Alert]:
        """Resolve the alerts of rules that are now disabled."""
        orphans, self._orphans = self._orphans, {}
        for name, alarm in orphans.items():
            changes = alarm.resolve_all(unix_ms, AlertText("the rule is disabled", "RULE_OFF"))
            yield from (Alert(name, "info", change) for change in changes)

    def _alerts(self, name: str, changes: Iterator[AlertChange]) -> Iterator[Alert]:
        severity = self._rules[name].severity
        return (Alert(name, severity, change) for change in changes)


def _kind(name: str) -> str:
    """Return `latency` for `latency_APPEND_p99`; else the name itself."""
    return "latency" if name.startswith("latency_") else name


def _rules(key: str, book: RuleBook) -> Iterator[tuple[str, Rule]]:
    kind, *parts = key.split("|")
    if kind == "queue":
        found: dict[str, Rule] = {"lag": book.of(parts[0], parts[1]).lag}
    elif kind == "group":
        rules = book.of(parts[0])
        found = {name: getattr(rules, name) for name in _GROUP_RULES}
    elif kind == "clock":
        found = {}
    else:
        of_operation = (rule for rule in book.latency if rule.operation == parts[-1])
        found = {f"latency_{r.operation}_p{r.percentile:g}": r for r in of_operation}
    return ((name, rule) for name, rule in found.items() if rule.enabled)
