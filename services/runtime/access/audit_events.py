"""Refused calls and calls of operators as events in the metrics stream.

Their number is bounded: refusals, and calls that only read, are counted by identity, method and
outcome, and told every ten seconds; each change by an operator is an event of its own. What is
beyond a bound is counted in one event without a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.common.v1 import error_pb2 as error_pb
from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq._telemetry.event_hub import EventHub
from batonmq.errors import BatonError
from batonmq_server.runtime.access.audit import request_text
from batonmq_server.runtime.access.permissions import Permission

INTERVAL_MS = 10_000
REFUSALS_MAX, CALLS_MAX = 20, 200
"""Events in an interval, without the one that counts the others."""
MESSAGE_CHARACTERS_MAX = 500
_READING = (
    "Check", "Describe", "Digest", "Find", "Get", "List", "Locate", "Query", "Read", "Search",
    "Watch", "Why",
)  # fmt: skip
"""Beginnings of the names of methods that change nothing."""


def only_reads(call: str) -> bool:
    """Return whether the method with this full path changes nothing."""
    return call.rpartition("/")[2].startswith(_READING)


@dataclass(slots=True)
class _Tally:
    """Events of one kind in the present interval."""

    limit: int
    number: int = 0
    """Events, without the one of the others."""
    others: int = 0

    def admits(self) -> bool:
        """Count a new event; return False if it counts among the others."""
        if self.number >= self.limit:
            self.others += 1
            return False
        self.number += 1
        return True


class AuditEvents:
    """Publishes to the hub of the process; see AuditSink."""

    def __init__(self, hub: EventHub, clock: Clock) -> None:
        self._hub, self._clock = hub, clock
        self._begin_ms = clock.monotonic_ms()
        self._clear()
        hub.gatherers.append(self._gather)

    def refused(self, call: str, identity: str, error: BatonError) -> None:
        """See AuditSink."""
        if not self._hub.watched:
            return
        key = call, identity, error.reason
        event = self._refusals.get(key)
        if event is None:
            if not self._refused.admits():
                return
            event = self._refusals[key] = pb.AccessRefused(
                call=call,
                identity=identity,
                reason=error_pb.Reason.Value(f"REASON_{error.reason}"),
                message=error.message[:MESSAGE_CHARACTERS_MAX],
            )
        event.count += 1

    def operated(
        self, call: str, identity: str, needs: Sequence[Permission], request: object, reason: str
    ) -> None:
        """See AuditSink."""
        if not self._hub.watched:
            return
        key = call, identity, reason
        if (earlier := self._reads.get(key)) is not None:
            earlier.count += 1
            return
        if not self._called.admits():
            return
        event = pb.OperatorCalled(
            call=call,
            identity=identity,
            outcome=reason,
            needs=map(str, needs),
            request=request_text(request),
            count=1,
        )
        if only_reads(call):
            self._reads[key] = event
        else:
            self._hub.publish(pb.MetricEvent(operator_called=event))

    def _gather(self) -> Iterator[pb.MetricEvent]:
        """Yield the counts of an interval that has passed."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._begin_ms < INTERVAL_MS:
            return
        self._begin_ms = now_ms
        refusals, reads = list(self._refusals.values()), list(self._reads.values())
        if self._refused.others:
            refusals.append(pb.AccessRefused(count=self._refused.others))
        if self._called.others:
            reads.append(pb.OperatorCalled(count=self._called.others))
        self._clear()
        for refusal in refusals:
            yield pb.MetricEvent(access_refused=refusal)
        for called in reads:
            yield pb.MetricEvent(operator_called=called)

    def _clear(self) -> None:
        self._refused, self._called = _Tally(REFUSALS_MAX), _Tally(CALLS_MAX)
        self._refusals: dict[tuple[str, str, str], pb.AccessRefused] = {}
        self._reads: dict[tuple[str, str, str], pb.OperatorCalled] = {}
