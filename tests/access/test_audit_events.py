"""Goal: refusals and changes by operators are events of the metrics stream, in a bounded number.

No count is lost, no caller can fill the stream, and every method with the role admin is either a
read or a change.
Method: the sink with a hub and a clock of the test; the edge with grants in a real etcd; a method
for every contract.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from baton.common.v1 import error_pb2 as error_pb
from baton.metrics.v1 import metrics_service_pb2 as pb
from baton.nameserver.v1 import access_service_pb2, stored_access_pb2
from batonmq._telemetry.event_hub import EventBuffer, EventHub
from batonmq.errors import PermissionDenied, Unauthenticated
from batonmq_server.runtime.access.audit_events import (
    CALLS_MAX,
    INTERVAL_MS,
    REFUSALS_MAX,
    AuditEvents,
    only_reads,
)
from batonmq_server.runtime.access.permissions import OPERATE, AccessRole
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.access.edge_scene import ALL, METHODS, request_of, scene
from tests.access.test_admission import APPEND, DESCRIBE, refusal
from tests.storage.schedule_scene import SetClock
from tests.support.conditions import until

GRANT = "/baton.nameserver.v1.AccessService/Grant"
DENIED = PermissionDenied("app lacks produce on topic:orders", facts={"identity": "app"})


class Stream:
    """A hub with a sink, and the events of one buffer."""

    def __init__(self) -> None:
        self.clock = SetClock()
        self.hub = EventHub("storage/a", 1, self.clock)
        self.audit = AuditEvents(self.hub, self.clock)

    @contextmanager
    def watched(self) -> Iterator[EventBuffer]:
        with self.hub.listen() as buffer:
            yield buffer

    def gathered(self) -> list[pb.MetricEvent]:
        return [event for gather in self.hub.gatherers for event in gather()]

    def after_interval(self) -> list[pb.MetricEvent]:
        self.clock.pass_ms(INTERVAL_MS)
        return self.gathered()


def test_refusals_of_one_kind_share_an_event_with_their_count() -> None:
    stream = Stream()
    with stream.watched():
        for _ in range(1_000):
            stream.audit.refused(APPEND, "app", DENIED)
        stream.audit.refused(APPEND, "", Unauthenticated("the call has no bearer token"))
        assert stream.gathered() == [], "the interval has not passed"
        events = [event.access_refused for event in stream.after_interval()]
        assert [(one.identity, one.count) for one in events] == [("app", 1_000), ("", 1)]
        assert events[0].call == APPEND
        assert events[0].reason == error_pb.REASON_PERMISSION_DENIED
        assert events[0].message == DENIED.message
        assert stream.after_interval() == []


def test_refusals_of_many_callers_are_bounded_and_all_are_counted() -> None:
    stream = Stream()
    with stream.watched():
        for number in range(5_000):
            stream.audit.refused(APPEND, f"app-{number}", DENIED)
        events = [event.access_refused for event in stream.after_interval()]
    assert len(events) == REFUSALS_MAX + 1
    assert sum(one.count for one in events) == 5_000
    assert (events[-1].call, events[-1].identity) == ("", "")


def test_each_change_is_an_event_at_once_and_the_number_of_events_is_bounded() -> None:
    stream = Stream()
    with stream.watched() as buffer:
        for number in range(CALLS_MAX + 50):
            request = access_service_pb2.GrantRequest(identity=f"app-{number}")
            stream.audit.operated(GRANT, "carol", [OPERATE], request, "OK")
        published = [event.operator_called for event in buffer.take(1 << 30)]
        assert len(published) == CALLS_MAX
        assert published[7].request == 'identity: "app-7"'
        first = published[0]
        assert (first.call, first.identity, first.outcome, first.count) == (GRANT, "carol", "OK", 1)
        assert list(first.needs) == ["admin on cluster"]
        (rest,) = stream.after_interval()
        assert rest.operator_called == pb.OperatorCalled(count=50)


def test_reads_of_an_operator_share_an_event() -> None:
    stream = Stream()
    with stream.watched() as buffer:
        for _ in range(500):
            stream.audit.operated(DESCRIBE, "carol", [OPERATE], None, "OK")
        assert not buffer.waiting
        (event,) = stream.after_interval()
        assert event.operator_called.count == 500


def test_nothing_is_kept_while_no_reader_watches() -> None:
    stream = Stream()
    stream.audit.refused(APPEND, "app", DENIED)
    stream.audit.operated(DESCRIBE, "carol", [OPERATE], None, "OK")
    with stream.watched():
        assert stream.after_interval() == []


@pytest.mark.parametrize("path", METHODS)
def test_method_that_needs_the_role_admin_is_a_read_or_a_change(path: str) -> None:
    """A new method of this role must begin with a verb of one of the two lists."""
    changing = (
        "Block", "Clone", "Create", "Delete", "Drain", "Elect", "Force", "Grant", "Move", "Purge",
        "Release", "Remove", "Reset", "Revoke", "Rotate", "Set", "Unblock", "Undrain", "Update",
        "Verify",
    )  # fmt: skip
    permissions = tuple(ALL[path].permissions(request_of(METHODS[path])))
    if any(one.roles == (AccessRole.ADMIN,) for one in permissions):
        assert only_reads(path) != METHODS[path].name.startswith(changing)


async def test_refusals_and_changes_at_the_edge_are_events(etcd: EtcdSession) -> None:
    stream = Stream()
    async with scene(etcd) as here:
        here.guard.audits.append(stream.audit)
        await here.know("carol", ("admin", "cluster"))
        await here.know("app", ("consume", "topic:orders"))
        grant = stored_access_pb2.AccessGrant(role=stored_access_pb2.ROLE_CONSUME)
        request = access_service_pb2.GrantRequest(identity="billing", grant=grant)
        with stream.watched() as buffer:
            await here.call(GRANT, request, "carol")
            await refusal(here.call(GRANT, request, "app"))
            await refusal(here.call(APPEND, request_of(METHODS[APPEND]), "app"))
            await refusal(here.call(GRANT, request, "unknown"))
            await until(lambda: buffer.waiting)
            (changed,) = buffer.take(1 << 30)
            refused = [event.access_refused for event in stream.after_interval()]
    assert (changed.operator_called.identity, changed.operator_called.outcome) == ("carol", "OK")
    assert "billing" in changed.operator_called.request
    assert [(one.call, one.identity) for one in refused] == [
        (GRANT, "app"), (APPEND, "app"), (GRANT, ""),
    ]  # fmt: skip
    shown = str([changed, *refused])
    assert not [token for token in here.tokens.values() if token in shown]


async def test_refusal_by_a_servicer_is_counted_and_published(etcd: EtcdSession) -> None:
    """The servicer of GetMessage checks the permission: only it knows the topic."""
    stream = Stream()
    path = "/baton.storage.v1.QueryService/GetMessage"
    async with scene(etcd) as here:
        here.guard.audits.append(stream.audit)
        here.fails[path] = DENIED
        await here.know("app", ("consume", "topic:orders"))
        with stream.watched():
            error = await refusal(here.call(path, request_of(METHODS[path]), "app"))
            assert isinstance(error, PermissionDenied)
            (event,) = stream.after_interval()
        assert event.access_refused.call == path
        assert here.refused_count("QueryService", "PERMISSION_DENIED") == 1
