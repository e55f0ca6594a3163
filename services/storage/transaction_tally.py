"""Counts what becomes of transactions, for the metrics stream: one event a second.

An event is of one producer group and one topic.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Literal

from baton.common.v1 import queue_pb2
from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._telemetry.event_hub import EventHub

Step = Literal["opened", "committed", "rolled_back", "checked", "discarded", "damaged"]


class TransactionTally:
    """The counts since the last events.

    Attributes:
        open_count: Returns the number of open transactions.
    """

    def __init__(self, hub: EventHub) -> None:
        self._hub = hub
        self.open_count: Callable[[], int] = lambda: 0
        self._counts: defaultdict[tuple[str, str], Counter[Step]] = defaultdict(Counter)

    def add(self, step: Step, group: str, topic: str) -> None:
        """Count one transaction of a producer group with a message for a topic."""
        if self._hub.watched:
            self._counts[group, topic][step] += 1

    def events(self, broker: str) -> Iterator[pb.MetricEvent]:
        """Yield the events of a broker, and begin anew."""
        counts, self._counts = self._counts, defaultdict(Counter)
        for (group, topic), steps in counts.items():
            queue = queue_pb2.QueueRef(topic=topic, broker=broker)
            yield pb.MetricEvent(
                queue=queue_pb2.GroupQueue(queue=queue),
                transactions=pb.TransactionCounts(
                    group=group,
                    opened_count=steps["opened"],
                    committed_count=steps["committed"],
                    rolled_back_count=steps["rolled_back"],
                    checked_count=steps["checked"],
                    discarded_count=steps["discarded"],
                    damaged_count=steps["damaged"],
                    open_count=self.open_count(),
                ),
            )
