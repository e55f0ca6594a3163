"""Goal: bodies, traces, time lines, alerts and targets are shown as they are, without a cluster.

Method: values as the library returns them, and the views that are made from them.
"""

from __future__ import annotations

from typing import Any

import pytest

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._core.message_trace import Hold
from batonmq._core.queues import QueueRef
from batonmq._core.reset_targets import ShiftBy, ToEarliest, ToLatest, ToOffset, ToTime
from batonmq.admin.group_lag import GroupLag
from batonmq.errors import InvalidArgument
from batonmq_server.console.core.alert_view import alerts_of_cluster, alerts_of_prometheus
from batonmq_server.console.core.change_plan import reset_target, unix_ms_of
from batonmq_server.console.core.handover_log import HandoverLog, QueueEvent
from batonmq_server.console.core.handover_view import WIDTH, handover_view
from batonmq_server.console.core.message_view import SHOWN_BYTES_MAX, body_view
from batonmq_server.console.event_reader import events_of
from batonmq_server.console.producing import body_of, properties_of
from tests.console.test_views import view_of

QUEUE = QueueRef("orders", "broker-0", 1)
NOW = 1_700_000_000_000


def hold(token: int, owner: str | None, begin_s: int, end_s: int, end: str, **more: Any) -> Hold:
    values: dict[str, Any] = {
        "committed_offset": 0, "acked": (), "acked_complete": True, "delivered_offset": 0, **more
    }  # fmt: skip
    values.setdefault("delivered_offset_max", values["delivered_offset"])
    return Hold(
        token=token, client_id=owner, begin_unix_ms=NOW + begin_s * 1000,
        end_unix_ms=NOW + end_s * 1000 if end else 0, end=end, **values,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("body", "form", "text"),
    [
        (b"", "empty", ""),
        (b'{"b":1,"a":[]}', "json", '{\n  "b": 1,\n  "a": []\n}'),
        (b"{no json", "text", "{no json"),
        ("Grüße\n".encode(), "text", "Grüße\n"),
        (b"a\x00b", "hex", "00000000  61 00 62                                         a.b"),
        (b"\xff\xfe", "hex", "00000000  ff fe                                            .."),
    ],
)
def test_body_is_shown_as_what_it_is(body: bytes, form: str, text: str) -> None:
    shown = body_view(body)
    assert (shown.form, shown.text) == (form, text)


def test_long_body_is_cut_between_characters() -> None:
    shown = body_view("ü".encode() * SHOWN_BYTES_MAX)
    assert shown.cut
    assert shown.form == "text"
    shown = body_view(b"a" + "ü".encode() * SHOWN_BYTES_MAX)
    assert (shown.form, shown.text[:2]) == ("text", "aü")


def test_owners_are_bars_in_proportion_to_their_time() -> None:
    holds = [
        hold(3, "b", -25, 0, ""),
        hold(2, "a", -50, -25, "passed"),
        hold(1, "a", -200, -50, "renewed"),
    ]
    view = handover_view({QUEUE: holds}, (), now_unix_ms=NOW, range_ms=100_000)
    (line,) = view.lines
    assert [(bar.client_id, bar.x, bar.width) for bar in line.bars] == [
        ("a", 0, WIDTH / 2), ("a", WIDTH / 2, WIDTH / 4), ("b", WIDTH * 3 / 4, WIDTH / 4)
    ]  # fmt: skip
    assert line.hand_over_count == 1
    assert [name for name, _ in view.owners] == ["a", "b"]
    assert len(view.ticks) == 6


def test_owner_before_the_range_is_left_out() -> None:
    holds = [hold(2, "b", -50, 0, ""), hold(1, "a", -200, -150, "passed")]
    view = handover_view({QUEUE: holds}, (), now_unix_ms=NOW, range_ms=100_000)
    assert [bar.client_id for bar in view.lines[0].bars] == ["b"]
    assert [name for name, _ in view.owners] == ["b"]


def test_messages_that_an_owner_left_unfinished_are_counted() -> None:
    holds = [
        hold(2, "b", -25, 0, "", committed_offset=10, acked=[(12, 15)]),
        hold(1, "a", -50, -25, "timed_out", committed_offset=5, delivered_offset=20),
    ]
    view = handover_view({QUEUE: holds}, (), now_unix_ms=NOW, range_ms=100_000)
    first = view.lines[0].bars[0]
    assert (first.delivered, first.unfinished) == (15, 7)
    assert first.ending.startswith("lease expired")


def test_events_are_marks_of_their_queue_and_their_time() -> None:
    log = HandoverLog(events_max=3)
    log.add(QueueEvent(NOW - 1_000 * n, "g", QUEUE, "fenced", f"event {n}") for n in range(5))
    assert [event.text for event in log.of("g")] == ["event 4", "event 3", "event 2"]
    assert log.of("another") == []
    view = handover_view({QUEUE: []}, log.of("g"), now_unix_ms=NOW, range_ms=100_000)
    assert [mark.x for mark in view.lines[0].marks] == [960, 970, 980]
    assert [event.text for event in view.events] == ["event 2", "event 3", "event 4"]


def test_events_of_the_services_are_told_in_words() -> None:
    batch = pb.MetricBatch()
    for kind in ("handed_over", "fenced", "delivered", "appended"):
        event = batch.events.add(unix_ms=5)
        event.queue.group = "g"
        event.queue.queue.topic = "orders"
        getattr(event, kind).SetInParent()
    handed, fenced, delivered = (getattr(batch.events[n], k) for n, k in enumerate(
        ("handed_over", "fenced", "delivered")))  # fmt: skip
    handed.previous_client_id, handed.client_id = "a", "b"
    handed.manner, handed.drain_ms, handed.fence_ms = handed.MANNER_DRAIN_TIMED_OUT, 30, 4
    fenced.client_id, fenced.token, fenced.current_token, fenced.call = "a", 1, 2, "Commit"
    delivered.client_id, delivered.redelivered_count = "b", 3
    told = list(events_of(batch))
    assert [event.kind for event in told] == ["drain", "fenced", "duplicate"]
    assert "a → b, the previous owner did not drain in time; 34 ms" in told[0].text
    assert told[1].text.startswith("Commit of a under token 1 rejected 1 times")
    assert told[2].text.startswith("3 messages delivered again to b")


def test_delivery_without_redelivered_messages_is_no_event() -> None:
    batch = pb.MetricBatch()
    batch.events.add(unix_ms=5).delivered.message_count = 9
    assert list(events_of(batch)) == []


def test_alerts_of_prometheus_are_those_that_fire_worst_first() -> None:
    def alert(name: str, severity: str, state: str) -> dict[str, Any]:
        return {
            "labels": {"alertname": name, "severity": severity, "group": "billing"},
            "annotations": {"summary": "in words", "runbook_url": "docs/x.md"},
            "state": state, "activeAt": "2023-11-14T22:13:20.123456789Z",
        }  # fmt: skip

    given = [alert("B", "warning", "firing"), alert("C", "critical", "firing")]
    answer = {"data": {"alerts": [*given, alert("A", "critical", "pending")]}}
    found = alerts_of_prometheus(answer)
    assert [(one.name, one.level, one.path) for one in found] == [
        ("C", "bad", "/groups/billing"), ("B", "warn", "/groups/billing")
    ]  # fmt: skip
    assert found[0].since_unix_ms == 1_700_000_000_000
    with pytest.raises(ValueError, match="no list of alerts"):
        alerts_of_prometheus({"status": "error"})


def test_without_prometheus_stuck_groups_and_the_nodes_are_alerts() -> None:
    stuck = GroupLag("billing", 4, 1, 10, 5_000, 0, "HELD", "in words", "do this")
    calm = GroupLag("mail", 4, 0, 0, 0, 0, "IDLE", "in words", "")
    found = alerts_of_cluster(view_of(in_sync=False), [stuck, calm])
    assert [(one.name, one.level) for one in found] == [("HELD", "bad"), ("ReplicaBehind", "warn")]
    assert found[0].remedy == "do this"
    assert alerts_of_cluster(view_of(), [calm]) == ()


@pytest.mark.parametrize(
    ("kind", "value", "target"),
    [
        ("earliest", "", ToEarliest()),
        ("latest", "", ToLatest()),
        ("offset", "12", ToOffset(12)),
        ("shift", "-10", ShiftBy(-10)),
        ("time", "2023-11-14T22:13:20Z", ToTime(NOW)),
        ("time", "2023-11-14 22:13:20", ToTime(NOW)),
        ("time", str(NOW), ToTime(NOW)),
    ],
)
def test_target_of_a_reset_is_read_from_the_form(kind: str, value: str, target: object) -> None:
    assert reset_target(kind, value) == target


@pytest.mark.parametrize(
    ("kind", "value"),
    [("offset", "-1"), ("offset", ""), ("shift", "x"), ("time", "soon"), ("nothing", "1")],
)
def test_target_that_is_none_is_refused(kind: str, value: str) -> None:
    with pytest.raises(InvalidArgument):
        reset_target(kind, value)


def test_message_of_a_form_is_text_or_hex_with_properties() -> None:
    assert body_of({"body": "a\r\nb"}) == b"a\nb"
    assert body_of({"body": "00 ff", "form": "hex"}) == b"\x00\xff"
    assert properties_of("a=1\n\n b = x=y \n") == {"a": "1", "b": "x=y"}
    with pytest.raises(InvalidArgument):
        properties_of("a")
    assert unix_ms_of("2023-11-14T23:13:20+01:00") == NOW
