"""The rules of the alerts: one validated YAML file in which every value has a default.

An override selects groups and topics by patterns (`billing-*`) and has only the values that differ
there. If several overrides match, the later one wins.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from batonmq._process.config import ConfigError, ConfigProblem

Severity = Literal["info", "warning", "critical"]


class RulesPart(BaseModel):
    """Base of each part of the file. An unknown name is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Rule(RulesPart):
    """Fields of every rule."""

    enabled: bool = True
    severity: Severity = "warning"


class LagRule(Rule):
    """Fires if the verdict on a queue is not `ok`; docs/reference/spark.md has the verdicts."""

    samples: int = Field(default=6, ge=2, le=100)
    """Length of the window in samples; there is one about every 10 s."""
    clear_samples: int = Field(default=2, ge=1, le=100)
    """Consecutive samples with the verdict `ok` before the alert is resolved."""
    lag_min: int = Field(default=1, ge=1)
    """Lag below this many messages counts as none."""
    age_ms_max: int = Field(default=300_000, ge=0)
    """The queue is slow if its oldest message is older than this; 0 for no limit."""
    ignored_reasons: tuple[str, ...] = ("PAUSED",)
    """Names of StuckReason for which a blocked queue raises no alert."""
    gone_ms: int = Field(default=300_000, ge=30_000)
    """After this time without a sample the queue is forgotten and its alert resolved."""


class CountRule(Rule):
    """Fires if a window has more events than allowed."""

    count_max: int = Field(ge=0)
    """The alert fires above this number of events."""
    window_ms: int = Field(default=300_000, ge=1_000)
    """Length of the window."""


class ConflictRule(Rule):
    """Fires if a member is rejected for its subscription, or joins with a different one."""

    clear_ms: int = Field(default=120_000, ge=1_000)
    """After this time without another conflict the alert is resolved."""


class SilenceRule(Rule):
    """Fires if a member expires because its heartbeats stopped."""

    forget_ms: int = Field(default=600_000, ge=1_000)
    """The alert is resolved if the member does not rejoin within this time."""
    clients_max: int = Field(default=100, ge=1, le=10_000)
    """Maximum members of a group with a firing alert."""


class LatencyRule(Rule):
    """Fires if a latency percentile of an operation of one process is above a limit."""

    operation: str = Field(pattern=r"^[A-Z][A-Z_]*$")
    """Name of a Latency.Operation without its prefix, such as APPEND."""
    percentile: float = Field(default=99.0, gt=0, lt=100)
    """The percentile that is compared with the limit."""
    limit_ms: float = Field(gt=0)
    """The alert fires above this latency."""
    window_ms: int = Field(default=60_000, ge=10_000)
    """Length of the window of the percentile."""
    count_min: int = Field(default=20, ge=1)
    """Minimum of values in the window for the alert to fire."""


STORM = CountRule(count_max=5)
STEALS = CountRule(count_max=0)
LATENCIES = (
    LatencyRule(operation="APPEND", limit_ms=250),
    LatencyRule(operation="FSYNC", limit_ms=250),
)


class GroupRules(RulesPart):
    """The rules of a consumer group."""

    lag: LagRule = LagRule()
    rebalance_storm: CountRule = STORM
    """The group was rebalanced too often."""
    steals: CountRule = STEALS
    """Queues were taken over because their owner's lease expired."""
    subscription_conflict: ConflictRule = ConflictRule(severity="critical")
    silent_client: SilenceRule = SilenceRule()


class Override(RulesPart):
    """Values that differ for some groups and topics."""

    group: str = "*"
    """Pattern of the group's name."""
    topic: str = "*"
    """Pattern of the topic's name. Must be `*` for all rules but `lag`."""
    lag: dict[str, Any] = {}
    rebalance_storm: dict[str, Any] = {}
    steals: dict[str, Any] = {}
    subscription_conflict: dict[str, Any] = {}
    silent_client: dict[str, Any] = {}

    @model_validator(mode="after")
    def _fits(self) -> Override:
        if self.topic != "*" and any(getattr(self, name) for name in _NAMES if name != "lag"):
            raise ValueError("only lag can be overridden for a topic")
        _overridden(GroupRules(), self)  # validates the values
        return self


class RuleBook(GroupRules):
    """The whole file of rules."""

    version: Literal[1] = 1
    latency: tuple[LatencyRule, ...] = LATENCIES
    overrides: tuple[Override, ...] = ()

    def of(self, group: str, topic: str = "") -> GroupRules:
        """Return the rules of a group, or of its queues of one topic."""
        rules = GroupRules(**{name: getattr(self, name) for name in _NAMES})
        for override in self.overrides:
            topics = override.topic == "*" or (topic and fnmatchcase(topic, override.topic))
            if topics and fnmatchcase(group, override.group):
                rules = _overridden(rules, override)
        return rules


_NAMES = tuple(GroupRules.model_fields)


def load_rules(path: Path | None) -> RuleBook:
    """Return the rules of a file, or the defaults if `path` is None.

    Raises:
        ConfigError: the file can't be read or is not valid; the error lists every problem.
    """
    if path is None:
        return RuleBook()
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(ConfigProblem(str(path), f"{path}: {error}")) from error
    try:
        return RuleBook.model_validate(content)
    except ValidationError as error:
        problems = []
        for wrong in error.errors():
            place = ".".join(map(str, wrong["loc"]))
            problems.append(ConfigProblem(f"{path}: {place}", f"{path}: {place}: {wrong['msg']}"))
        raise ConfigError(*problems) from error


def _overridden(rules: GroupRules, override: Override) -> GroupRules:
    changed = {}
    for name in _NAMES:
        rule, values = getattr(rules, name), getattr(override, name)
        changed[name] = type(rule).model_validate({**rule.model_dump(), **values})
    return GroupRules(**changed)
