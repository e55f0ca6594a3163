"""One subject with all its watches: what the state of one key of the alerts query is. Pure.

A subject is `queue|group|topic|broker|queue_id`, `group|group` or `latency|source|operation`. That
of `clock|source` has no rule: its signals only tell that time passes.
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
"""What each rule looks at. Of lock_granted only those are fed that were stolen."""
_GROUP_RULES = ("rebalance_storm", "steals", "subscription_conflict", "silent_client")


@dataclass(frozen=True, slots=True)
class Alert:
    """A change with the name and the weight of its rule."""

    rule: str
    severity: str
    change: AlertChange


class AlertSubject:
    """The watches of one key, as far as rules are on.

    Args:
        stored: What `stored` gave before; empty for a subject that is new.
    """

    def __init__(self, key: str, book: RuleBook, stored: str = "") -> None:
        told: dict[str, Any] = json.loads(stored) if stored else {"version": _STATE_VERSION}
        if told["version"] != _STATE_VERSION:
            raise ValueError(f"state of version {told['version']}, {_STATE_VERSION} is known")
        self._rules = dict(_rules(key, book))
        known = told.get("watches", {})
        self._watches: dict[str, RuleEvaluator[Any]] = {
            name: _WATCHES[_kind(name)].model_validate(known.get(name, {})) for name in self._rules
        }
        self._orphans = {
            name: FiringAlerts.model_validate(known[name]["alarm"])
            for name in sorted(known.keys() - self._rules.keys())
        }

    def feed(self, signals: Iterable[Signal]) -> Iterator[Alert]:
        """Take signals in, oldest first."""
        for signal in signals:
            yield from self.advance(signal.unix_ms)
            for name, watch in self._watches.items():
                if signal.kind in KINDS[_kind(name)]:
                    yield from self._alerts(name, watch.feed(self._rules[name], signal))

    def advance(self, unix_ms: int) -> Iterator[Alert]:
        """Event time has come so far: do what was to be done until then, each when it was due."""
        yield from self._orphaned(unix_ms)
        while (due := self.wake_unix_ms) is not None and due <= unix_ms:
            for name, watch in self._watches.items():
                if watch.wake_unix_ms(self._rules[name]) == due:
                    yield from self._alerts(name, watch.tick(self._rules[name], due))

    @property
    def wake_unix_ms(self) -> int | None:
        """When `advance` has something to do; None if nothing has to be remembered."""
        wakes = [watch.wake_unix_ms(self._rules[name]) for name, watch in self._watches.items()]
        return min((wake for wake in wakes if wake is not None), default=None)

    @property
    def stored(self) -> str:
        """The state, for the next life."""
        watches = {name: watch.model_dump() for name, watch in self._watches.items()}
        return json.dumps({"version": _STATE_VERSION, "watches": watches})

    def _orphaned(self, unix_ms: int) -> Iterator[Alert]:
        """Resolve what rules have raised that are off by now."""
        orphans, self._orphans = self._orphans, {}
        for name, alarm in orphans.items():
            changes = alarm.resolve_all(unix_ms, AlertText("the rule is off", "RULE_OFF"))
            yield from (Alert(name, "info", change) for change in changes)

    def _alerts(self, name: str, changes: Iterator[AlertChange]) -> Iterator[Alert]:
        severity = self._rules[name].severity
        return (Alert(name, severity, change) for change in changes)


def _kind(name: str) -> str:
    """`latency` of `latency_APPEND_p99`; else the name."""
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
