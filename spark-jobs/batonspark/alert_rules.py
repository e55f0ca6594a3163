"""When to raise an alert: one validated YAML, whose every value has a default.

An override names groups and topics by patterns (`billing-*`) and says only what is different
there; of several that match the later wins.
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
    """One part of the file. A name that is not known is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Rule(RulesPart):
    """What every rule has."""

    enabled: bool = True
    severity: Severity = "warning"


class LagRule(Rule):
    """A queue of a group is not `ok` (see docs/reference/spark.md for the verdicts)."""

    samples: int = Field(default=6, ge=2, le=100)
    """Length of the window, in samples of about 10 s each."""
    clear_samples: int = Field(default=2, ge=1, le=100)
    """So many samples in a row must be fine before the alert is resolved."""
    lag_min: int = Field(default=1, ge=1)
    """Less lag counts as none, in messages."""
    age_ms_max: int = Field(default=300_000, ge=0)
    """An older message makes the queue slow; 0 for no limit."""
    ignored_reasons: tuple[str, ...] = ("PAUSED",)
    """Names of StuckReason for which a blocked queue raises nothing."""
    gone_ms: int = Field(default=300_000, ge=30_000)
    """Without a sample for so long the queue is forgotten, and its alert resolved."""


class CountRule(Rule):
    """More events than allowed within a window."""

    count_max: int = Field(ge=0)
    """More than this raises the alert."""
    window_ms: int = Field(default=300_000, ge=1_000)
    """The window."""


class ConflictRule(Rule):
    """A member was refused for its subscription, or let in with a differing one."""

    clear_ms: int = Field(default=120_000, ge=1_000)
    """Without another for so long the alert is resolved."""


class SilenceRule(Rule):
    """A member was expelled for its silence."""

    forget_ms: int = Field(default=600_000, ge=1_000)
    """One that is not seen again within this is taken for gone, and the alert resolved."""
    clients_max: int = Field(default=100, ge=1, le=10_000)
    """Of one group at most so many are watched at a time."""


class LatencyRule(Rule):
    """An operation of one process takes too long."""

    operation: str = Field(pattern=r"^[A-Z][A-Z_]*$")
    """Name of a Latency.Operation without its prefix, such as APPEND."""
    percentile: float = Field(default=99.0, gt=0, lt=100)
    """Which percentile is held against the limit."""
    limit_ms: float = Field(gt=0)
    """More than this raises the alert."""
    window_ms: int = Field(default=60_000, ge=10_000)
    """Over which the percentile is taken."""
    count_min: int = Field(default=20, ge=1)
    """Fewer values in the window say nothing."""


STORM = CountRule(count_max=5)
STEALS = CountRule(count_max=0)
LATENCIES = (
    LatencyRule(operation="APPEND", limit_ms=250),
    LatencyRule(operation="FSYNC", limit_ms=250),
)


class GroupRules(RulesPart):
    """Rules that hold for groups, each as a whole."""

    lag: LagRule = LagRule()
    rebalance_storm: CountRule = STORM
    """Queues were dealt anew too often."""
    steals: CountRule = STEALS
    """Queues were taken over because the owner's lease ran out."""
    subscription_conflict: ConflictRule = ConflictRule(severity="critical")
    silent_client: SilenceRule = SilenceRule()


class Override(RulesPart):
    """What is different for some groups and topics."""

    group: str = "*"
    """Pattern of the group's name."""
    topic: str = "*"
    """Pattern of the topic's name; only `lag` knows a topic, other rules ask for `*`."""
    lag: dict[str, Any] = {}
    rebalance_storm: dict[str, Any] = {}
    steals: dict[str, Any] = {}
    subscription_conflict: dict[str, Any] = {}
    silent_client: dict[str, Any] = {}

    @model_validator(mode="after")
    def _fits(self) -> Override:
        if self.topic != "*" and any(getattr(self, name) for name in _NAMES if name != "lag"):
            raise ValueError("only lag can be overridden for a topic")
        _overridden(GroupRules(), self)  # its values, against the defaults
        return self


class RuleBook(GroupRules):
    """The file."""

    version: Literal[1] = 1
    latency: tuple[LatencyRule, ...] = LATENCIES
    overrides: tuple[Override, ...] = ()

    def of(self, group: str, topic: str = "") -> GroupRules:
        """Rules that hold for a group, or for its queues of one topic."""
        rules = GroupRules(**{name: getattr(self, name) for name in _NAMES})
        for override in self.overrides:
            topics = override.topic == "*" or (topic and fnmatchcase(topic, override.topic))
            if topics and fnmatchcase(group, override.group):
                rules = _overridden(rules, override)
        return rules


_NAMES = tuple(GroupRules.model_fields)


def load_rules(path: Path | None) -> RuleBook:
    """The rules of a file, or the defaults without one.

    Raises:
        ConfigError: the file can't be read, or does not describe valid rules; every problem is
            named.
    """
    if path is None:
        return RuleBook()
    try:
        told = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(ConfigProblem(str(path), f"{path}: {error}")) from error
    try:
        return RuleBook.model_validate(told)
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
