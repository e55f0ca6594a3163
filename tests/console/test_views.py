"""Goal: what the pages show follows from the reports, without a cluster.

Method: reports as plain values, and the views that are made from them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from batonmq._core.queues import QueueRef
from batonmq.admin.group_reports import (
    Assignment,
    Group,
    GroupProgress,
    Member,
    QueueDiagnosis,
    QueueProgress,
    RefusedClient,
    StagedSubscriptions,
    Subscription,
)
from batonmq.admin.replication import Replica
from batonmq.admin.reports import ClusterNodes, DrainedNode, Node, Topic
from batonmq.errors import Difference, SubscriptionConflict
from batonmq_server.console.core import formats
from batonmq_server.console.core.cluster_view import cluster_view
from batonmq_server.console.core.group_view import group_view
from batonmq_server.console.core.paging import page_of
from batonmq_server.console.core.remedies import remedies_of
from batonmq_server.console.core.topic_view import kind_of, rates_between, topic_row, visible
from batonmq_server.console.visit import make_templates, render_block
from tests.console.scene import words_of

QUEUE = QueueRef("orders", "broker-0", 1)
GROUP = Group(
    name="billing", generation=3,
    members=(Member("m-1", 1, "host", 0), Member("m-2", 2, "host", 0)),
    subscriptions=(Subscription("orders", "a"),), subscription_generation=1, model="clustering",
    consume_from="last", order="none", policy="reject", ownership="on", strategy="sticky",
    assignments=(Assignment("orders", "broker-0", 1, "m-1"),), staged=None, pause=None,
)  # fmt: skip


def diagnosis(reason: str, queue_id: int = 1) -> QueueDiagnosis:
    return QueueDiagnosis(
        "billing", "orders", "broker-0", queue_id, reason, "in words", "do this", {}, 5, 7_000, 10,
        15, "m-1", 60_000,
    )  # fmt: skip


def progress(queue_id: int = 1, **values: Any) -> QueueProgress:
    known = QueueProgress(
        "billing", "orders", "broker-0", queue_id, 10, 15, 5, 16, 0, "m-1", "host", 4, "m-1"
    )
    return replace(known, **values)


def node(service: str, node_id: str, *, leader: bool, replica_set: str = "") -> Node:
    return Node(service, node_id, replica_set or node_id, "a:1", "a:2", 1_000, 7, leader)


def copy(node_id: str, *, leader: bool, in_sync: bool, lag: int = 0) -> Replica:
    return Replica("storage", "broker-0", node_id, 7, leader, in_sync, 100, lag, 0, "")


NODES = (
    node("storage", "a", leader=True, replica_set="broker-0"),
    node("storage", "b", leader=False, replica_set="broker-0"),
    node("offsets", "offsets-0", leader=True),
    node("lockmgr", "lockmgr-0", leader=True),
    node("nameserver", "nameserver-0", leader=True),
)


def view_of(
    nodes: tuple[Node, ...] = NODES,
    *,
    in_sync: bool = True,
    drained: tuple[DrainedNode, ...] = (),
    **broker: Any,
) -> Any:
    copies = {
        ("storage", "a"): copy("a", leader=True, in_sync=True),
        ("storage", "b"): copy("b", leader=False, in_sync=in_sync, lag=0 if in_sync else 1_234),
    }
    disk = {
        "broker": "broker-0", "disk_state": "ok", "disk_used_percent": 42.0,
        "disk_seconds_until_full": 0, "first_position": 100, "next_position": 1_100,
        "queue_count": 4, "scheduled_count": 0, "damaged_batch_count": 0, **broker,
    }  # fmt: skip
    cluster = ClusterNodes("baton", 3, nodes, drained=drained)
    return cluster_view(cluster, copies, [disk], (), (), now_unix_ms=61_000)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (formats.count(1_234_567), "1,234,567"),
        (formats.count(None), formats.UNKNOWN),
        (formats.size(1_023), "1023 B"),
        (formats.size(1_536), "1.5 KiB"),
        (formats.span(850), "850 ms"),
        (formats.span(4_200), "4.2 s"),
        (formats.span(65_000), "1 min 5 s"),
        (formats.span(3 * 3_600_000 + 300_000), "3 h 5 min"),
        (formats.span(40 * 86_400_000), "40 d"),
        (formats.rate(0.52), "0.5"),
        (formats.rate(1_234.4), "1,234"),
        (formats.time(1_700_000_000_250), "2023-11-14 22:13:20.250"),
        (formats.counted(1, "queue"), "1 queue"),
        (formats.counted(2_000, "queue"), "2,000 queues"),
    ],
)
def test_value_is_shown_with_its_unit(text: str, wanted: str) -> None:
    assert text == wanted


def test_page_beyond_the_end_is_the_last_page() -> None:
    page = page_of(range(120), str, number=9, page_size=50)
    assert (list(page.items), page.number, page.pages) == (list(range(100, 120)), 3, 3)
    assert (page.before, page.after) == (2, None)


def test_search_finds_items_with_every_word_in_any_case() -> None:
    page = page_of(["Orders EU", "orders us", "emails eu"], str, search="eu ORDERS")
    assert (list(page.items), page.found, page.total) == (["Orders EU"], 1, 3)


def test_leader_is_drawn_with_an_arrow_to_each_follower() -> None:
    view = view_of()
    drawing = next(one for one in view.sets if one.name == "broker-0")
    assert [(box.name, box.kind) for box in drawing.boxes] == [("a", "leader"), ("b", "in-sync")]
    assert len(drawing.arrows) == 1
    assert drawing.words == "a leads; followers: b (in sync)"
    assert view.healthy


def test_follower_that_is_behind_is_drawn_so_and_the_cluster_needs_attention() -> None:
    view = view_of(in_sync=False)
    drawing = next(one for one in view.sets if one.name == "broker-0")
    assert [(a.kind, a.text) for a in drawing.arrows] == [("behind", "behind by 1,234")]
    assert not view.healthy


def test_service_and_set_without_a_leader_are_missing() -> None:
    nodes = tuple(replace(n, leader=False) if n.node_id in ("a", "lockmgr-0") else n for n in NODES)
    assert view_of(nodes).missing == ("lockmgr", "storage", "storage broker-0")


def test_drained_node_is_named_with_the_command_that_brings_it_back() -> None:
    mark = DrainedNode("storage", "gone", "broker-0", 1_700_000_000_250, "ann")
    view = view_of(drained=(mark,))
    assert view.healthy, "an operator wants it so"
    shown = render_block(make_templates(), "cluster.html", {"cluster": view})
    assert "is drained for maintenance since 2023-11-14 22:13:20.250, by ann" in words_of(shown)
    assert "baton cluster undrain gone" in shown
    assert "drained" not in render_block(make_templates(), "cluster.html", {"cluster": view_of()})


def test_contracts_that_differ_are_an_upgrade_and_one_that_is_too_old_is_a_problem() -> None:
    templates = make_templates()
    newer = tuple(replace(one, contract=2, contract_min=1) for one in NODES)
    view = view_of((*newer[1:], replace(newer[0], contract=1)))
    assert view.healthy
    shown = words_of(render_block(templates, "cluster.html", {"cluster": view}))
    assert "Nodes with the contracts 1 and 2 run side by side: an upgrade is not finished" in shown
    same = render_block(templates, "cluster.html", {"cluster": view_of(newer)})
    assert "side by side" not in words_of(same)
    refused = view_of((newer[0], *NODES[1:]))
    assert not refused.healthy
    assert refused.problems[0] == (
        "storage b has contract 0, and storage a works with 1 or later: upgrade it"
    )


def test_full_disk_and_damage_need_attention() -> None:
    assert view_of(disk_state="warn").healthy
    assert not view_of(disk_state="full").healthy
    assert not view_of(damaged_batch_count=1).healthy
    assert view_of().disks[0].log_bytes == 1_000


def test_topics_of_groups_and_of_the_system_are_hidden_by_default() -> None:
    names = ("orders", "%RETRY%g", "%DLQ%g", "BATON_SYS_METRICS")
    topics = [Topic(name, 1, 0, {"broker-0": 1}, "read_write", {"broker-0": 1}) for name in names]
    assert [kind_of(name) for name in names] == ["topic", "retry", "dead", "system"]
    assert [topic.name for topic in visible(topics, show_all=False)] == ["orders"]
    assert len(visible(topics, show_all=True)) == 4


def test_messages_of_a_topic_are_unknown_if_one_broker_does_not_answer() -> None:
    topic = Topic("orders", 1, 0, {"broker-0": 2}, "read_write", {"broker-0": 2})
    first, second = topic.queues
    assert topic_row(topic, {first: (2, 10)}, {}, {}).messages is None
    row = topic_row(topic, {first: (2, 10), second: (0, 5)}, {first: 1.5}, {first: 10, second: 5})
    assert (row.messages, row.per_s, row.stored_bytes) == (13, 1.5, 15)


def test_rate_is_that_between_two_looks_and_never_negative() -> None:
    rates = rates_between({QUEUE: 10}, {QUEUE: (0, 30)}, 2.0)
    assert rates == {QUEUE: 10.0}
    assert rates_between({QUEUE: 40}, {QUEUE: (0, 30)}, 2.0) == {QUEUE: 0.0}
    assert rates_between({QUEUE: 10}, {QUEUE: (0, 30)}, 0) == {}


def test_stuck_queues_come_first_with_their_bounds_in_flight() -> None:
    queues = (progress(0, unacked_count_min=16), progress(1))
    found = (diagnosis("MOVING", 0), diagnosis("HELD", 1))
    view = group_view(GroupProgress(GROUP, queues, (), ()), found)
    assert [(row.queue.queue_id, row.stuck) for row in view.queues] == [(1, True), (0, False)]
    assert [row.in_flight for row in view.queues] == ["0-16", "16"]
    assert (view.lag, view.lag_ms) == (10, 7_000)
    assert [(m.assigned_count, m.owned_count) for m in view.members] == [(1, 2), (0, 0)]


def test_conflict_of_subscriptions_is_shown_side_by_side() -> None:
    difference = Difference("orders", "expression", "new", "b", "m-1", "a")
    error = SubscriptionConflict("it differs", differences=(difference,))
    refused = RefusedClient("new", 9, "elsewhere", 5, error)
    view = group_view(GroupProgress(GROUP, (), (refused,), ()), ())
    (row,) = view.conflicts[0].rows
    assert (row.topic, row.group_value, row.client_value) == ("orders", "a", "b")


def test_staged_subscription_is_shown_beside_the_current_one() -> None:
    staged = StagedSubscriptions((Subscription("emails", ""),), draining=False, since_unix_ms=1)
    group = replace(GROUP, staged=staged)
    view = group_view(GroupProgress(group, (), (), ()), ())
    assert view.state == "staged"
    rows = [(row.topic, row.group_value, row.client_value) for row in view.staged]
    assert rows == [("emails", "", "*"), ("orders", "a", "")]


@pytest.mark.parametrize(
    ("reason", "kinds"),
    [
        ("PAUSED", ["resume"]),
        ("HELD", ["release"]),
        ("HEAD_OF_LINE", ["skip", "release"]),
        ("OFFSET_AHEAD_OF_LOG", ["reset"]),
        ("NO_MEMBER", []),
        ("MOVING", []),
    ],
)
def test_remedy_is_offered_only_where_the_console_can_carry_it_out(
    reason: str, kinds: list[str]
) -> None:
    remedies = remedies_of("billing", diagnosis(reason))
    assert [one.kind for one in remedies] == kinds
    assert all(one.path.startswith(f"/change/{one.kind}?group=billing") for one in remedies)
