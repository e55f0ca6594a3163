"""How many members a group can use: its lag, without what more members can't change.

A queue has one owner at a time, so members beyond the number of queues are idle. The value of a
metric is therefore at most the number of queues times the target of one member, and the number of
replicas that KEDA derives from it is at most the number of queues.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from batonmq._core.retries import group_of
from batonmq.admin.group_reports import QueueDiagnosis
from batonmq.errors import Unreachable
from batonmq_server.scaler.core.trigger import LagMetric, Trigger

NOTHING_TO_DO = frozenset({"IDLE", "FILTERED", "PAUSED", "NOT_READABLE", "OFFSET_AHEAD_OF_LOG"})
"""Reasons of queues that no member, old or new, gets a message of: all are handled or filtered, or
an operator has to act first."""
NO_HELP = frozenset(
    {"REFUSED_SUBSCRIPTION", "PHANTOM_TOKEN", "OUTDATED_NODE", "DATA_LOSS", "OUTPUTS_REFUSED"}
)
"""Reasons of queues that need an operator: the members stay, and no more are started."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a group has to do at the moment.

    Attributes:
        queue_count: Queues that members can own, without those of the retry topic.
        lag_by_metric: Lag that more members can lower: the age of the oldest message in seconds,
            and the number of messages.
        waiting_messages: Messages that need a member.
        stuck: The first stuck queue of each reason.
        stuck_counts: Number of stuck queues by reason.
    """

    queue_count: int
    lag_by_metric: Mapping[LagMetric, float]
    waiting_messages: int
    stuck: Mapping[str, QueueDiagnosis] = field(default_factory=dict)
    stuck_counts: Mapping[str, int] = field(default_factory=dict)

    def active(self, trigger: Trigger) -> bool:
        """Return whether the group needs a member at all."""
        return self.waiting_messages > trigger.activation_messages

    def value(self, trigger: Trigger, metric: LagMetric) -> float:
        """Return the value of a metric, within what the queues can use."""
        return min(self.lag_by_metric[metric], self.queue_count * trigger.targets[metric])


def demand_of(group: str, queues: Sequence[QueueDiagnosis]) -> Demand:
    """Return the demand of a group from the diagnoses of its queues.

    Raises:
        Unreachable: The lag of a queue is unknown. A value without it could stop members that are
            needed; without a value the number of replicas stays.
    """
    messages, waiting, oldest_ms = 0, 0, 0
    for queue in queues:
        if queue.reason in NOTHING_TO_DO:
            continue
        if queue.lag is None or queue.lag_ms is None:
            raise Unreachable(
                f"the lag of group {group} is unknown for queue {queue.topic}/{queue.broker}/"
                f"{queue.queue_id}: {queue.reason}: {queue.message}",
                remedy=queue.remedy,
            )
        waiting += queue.lag
        if queue.reason not in NO_HELP:
            messages += queue.lag
            oldest_ms = max(oldest_ms, queue.lag_ms)
    stuck = [queue for queue in queues if queue.stuck]
    first: dict[str, QueueDiagnosis] = {}
    for queue in stuck:
        first.setdefault(queue.reason, queue)
    return Demand(
        queue_count=sum(not group_of(queue.topic) for queue in queues),
        lag_by_metric={LagMetric.SECONDS: oldest_ms / 1_000, LagMetric.MESSAGES: float(messages)},
        waiting_messages=waiting,
        stuck=first,
        stuck_counts=Counter(queue.reason for queue in stuck),
    )
