"""The trigger of a ScaledObject: which group it scales, and what one member is to have.

Every user who may create a ScaledObject writes metadata, so an unknown name and a value that is no
plain number in range are refused, and an error shows at most the beginning of a value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from batonmq._core.names import check_group
from batonmq.errors import InvalidArgument

ENTRIES_MAX = 32
OF_KEDA = frozenset({"scalerAddress", "enableTLS", "unsafeSsl", "tlsCertFile"})
"""Metadata that KEDA reads itself, and passes on."""
_GROUP, _ACTIVATION = "group", "activationLagMessages"
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,3})?", re.ASCII)
_SHOWN_MAX = 40


class LagMetric(StrEnum):
    """A metric by the name that KEDA gets."""

    SECONDS = "lag-seconds"
    MESSAGES = "lag-messages"


_TARGETS = {"lagSeconds": LagMetric.SECONDS, "lagMessages": LagMetric.MESSAGES}


@dataclass(frozen=True, slots=True)
class Trigger:
    """What a ScaledObject asks for.

    Attributes:
        targets: The value of each metric that one member is to have; at least one, all positive.
        activation_messages: Up to this lag the group has nothing to do.
    """

    group: str
    targets: Mapping[LagMetric, float]
    activation_messages: int = 0


def trigger_of(metadata: Mapping[str, str]) -> Trigger:
    """Return the trigger with this metadata.

    Raises:
        InvalidArgument, InvalidName: The metadata is not valid; the message names the entry.
    """
    if len(metadata) > ENTRIES_MAX:
        raise _invalid("metadata", f"has {len(metadata)} entries", f"at most {ENTRIES_MAX}")
    known = {_GROUP, _ACTIVATION, *_TARGETS}
    unknown = sorted(metadata.keys() - known - OF_KEDA)
    if unknown:
        raise _invalid("metadata", f"has the unknown entry {_shown(unknown[0])}", ", ".join(known))
    group = metadata.get(_GROUP, "")
    if not group:
        raise _invalid(_GROUP, "is missing", "the name of a consumer group")
    targets = {
        metric: _number(entry, metadata[entry])
        for entry, metric in _TARGETS.items()
        if entry in metadata
    }
    if not targets:
        raise _invalid("metadata", "has no target", "lagSeconds, lagMessages or both")
    for entry, metric in _TARGETS.items():
        if targets.get(metric) == 0:
            raise _invalid(entry, "is 0", "a positive number")
    activation = metadata.get(_ACTIVATION, "0")
    return Trigger(check_group(group), targets, int(_number(_ACTIVATION, activation)))


def metric_of(trigger: Trigger, name: str) -> LagMetric:
    """Return the metric with this name.

    Raises:
        InvalidArgument: The trigger has no such metric.
    """
    for metric in trigger.targets:
        if metric == name:
            return metric
    raise _invalid("metricName", f"is {_shown(name)}", ", ".join(trigger.targets))


def _number(entry: str, text: str) -> float:
    if not _NUMBER.fullmatch(text):
        expected = "a number from 0 to 999999999, with at most three decimals"
        raise _invalid(entry, f"is {_shown(text)}", expected)
    return float(text)


def _invalid(entry: str, fact: str, expected: str) -> InvalidArgument:
    return InvalidArgument(
        f"{entry} {fact}; expected: {expected}",
        remedy="Correct the metadata of the trigger in the ScaledObject.",
        facts={"field": entry},
    )


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + "…")
