"""Goal: the verdict of a group is the reason of the queue to look at first, and its lag is the sum.

Method: summarize diagnoses of known queues.
"""

from __future__ import annotations

import pytest

from batonmq.admin.effective_settings import choose_node
from batonmq.admin.group_lag import summarize
from batonmq.admin.group_reports import QueueDiagnosis
from batonmq.admin.reports import Node
from batonmq.errors import InvalidArgument


def queue(reason: str, lag: int | None = 0, lag_ms: int | None = 0) -> QueueDiagnosis:
    return QueueDiagnosis(
        group="g",
        topic="t",
        broker="b",
        queue_id=0,
        reason=reason,
        message=f"the reason is {reason}",
        remedy="",
        evidence={},
        lag=lag,
        lag_ms=lag_ms,
        committed_offset=None,
        log_end_offset=None,
        client_id=None,
        unmoved_ms=None,
    )


@pytest.mark.parametrize(
    ("queues", "verdict"),
    [
        ([], "IDLE"),
        ([queue("IDLE"), queue("MOVING", 3, 20)], "MOVING"),
        ([queue("IDLE"), queue("FILTERED", 3, 20)], "FILTERED"),
        ([queue("MOVING", 9, 90), queue("NO_MEMBER", 1, 10)], "NO_MEMBER"),
        ([queue("HELD", 9, 10), queue("ACK_CAP", 1, 90)], "ACK_CAP"),
        ([queue("HELD", 9, 99), queue("STORAGE_UNREACHABLE", None, None)], "STORAGE_UNREACHABLE"),
    ],
)
def test_verdict_is_that_of_the_stuck_queue_that_has_waited_longest(
    queues: list[QueueDiagnosis], verdict: str
) -> None:
    found = summarize("g", queues)
    assert found.verdict == verdict
    assert found.stuck == any(one.stuck for one in queues)


def test_lag_is_the_sum_of_the_known_queues() -> None:
    found = summarize("g", [queue("HELD", 9, 99), queue("HELD", 2, 7), queue("HELD", None, None)])
    assert (found.lag, found.lag_ms, found.unknown_count) == (11, 99, 1)
    assert (found.queue_count, found.stuck_count) == (3, 3)


def test_lag_is_unknown_if_no_queue_is_known_and_zero_without_a_queue() -> None:
    assert summarize("g", [queue("OFFSETS_UNREACHABLE", None, None)]).lag is None
    assert (summarize("g", []).lag, summarize("g", []).lag_ms) == (0, 0)


def node(service: str, node_id: str) -> Node:
    return Node(service, node_id, node_id, "127.0.0.1:1", "", 0, 0, leader=True)


NODES = [node("storage", "a"), node("offsets", "a"), node("lockmgr", "b")]


@pytest.mark.parametrize(
    ("name", "service", "chosen"),
    [("b", "", "lockmgr"), ("storage/a", "", "storage"), ("a", "offsets", "offsets")],
)
def test_node_is_found_by_its_name(name: str, service: str, chosen: str) -> None:
    assert choose_node(NODES, name, service).service == chosen


@pytest.mark.parametrize(
    ("name", "service", "text"),
    [
        ("a", "", "storage/a, offsets/a"),
        ("c", "", "no node c"),
        ("b", "storage", "no node b"),
        ("storage/a", "offsets", "not a node of the service offsets"),
    ],
)
def test_name_of_no_single_node_is_refused(name: str, service: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        choose_node(NODES, name, service)
