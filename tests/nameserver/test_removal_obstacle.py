"""What keeps queues from being removed, without a server.

Goal: everything that is still needed is an obstacle, and nothing else.
Method: single cases.
"""

from __future__ import annotations

import pytest

from batonmq_server.nameserver.core.removal_obstacle import (
    HeldMessages,
    HeldOutputs,
    ObstacleKind,
    held_obstacles,
    kept_obstacle,
    output_obstacles,
    unread_obstacle,
)
from batonmq_server.nameserver.core.topic_resize import RetiringQueue
from tests.nameserver.test_topic_resize import group

QUEUE = RetiringQueue("a", 3, 10, 20)
DEAD = "%DLQ%readers"


def test_group_with_messages_to_read_is_an_obstacle() -> None:
    found = unread_obstacle(QUEUE, "t", "readers", group("c"), 15)
    assert found is not None
    assert (found.kind, found.group, found.count) == (ObstacleKind.UNREAD, "readers", 5)
    assert unread_obstacle(QUEUE, "t", "readers", group("c"), 20) is None


def test_remedy_is_named_if_no_member_could_read_the_messages() -> None:
    found = unread_obstacle(QUEUE, "t", "readers", group(), 15)
    assert found is not None
    assert "reset-offsets readers --topic t --to-latest" in found.message


@pytest.mark.parametrize("topic", [DEAD, "BATON_SYS_UNRESOLVED"])
def test_messages_that_need_an_operator_are_an_obstacle_until_they_are_redriven(topic: str) -> None:
    found = kept_obstacle(QUEUE, topic, 0)
    assert found is not None
    assert (found.kind, found.count) == (ObstacleKind.DEAD_LETTERS, 10)
    partly = kept_obstacle(QUEUE, topic, 18)
    assert partly is not None
    assert partly.count == 2
    assert kept_obstacle(QUEUE, topic, 20) is None


def test_dead_letters_that_were_redriven_after_retention_removed_others_are_no_obstacle() -> None:
    assert kept_obstacle(QUEUE, DEAD, 0, [(10, 20)]) is None
    found = kept_obstacle(QUEUE, DEAD, 12, [(5, 14), (16, 30)])
    assert found is not None
    assert found.count == 2


def test_remedy_of_unresolved_messages_is_to_read_them_as_the_group_of_the_same_name() -> None:
    unresolved = "BATON_SYS_UNRESOLVED"
    found = kept_obstacle(QUEUE, unresolved, 0)
    assert found is not None
    assert f"baton consume {unresolved} --group {unresolved} --from first" in found.message
    assert "redrive" not in found.message
    assert "delete" not in found.message, "a topic of the system can't be deleted"
    assert kept_obstacle(QUEUE, unresolved, 20) is None
    assert unread_obstacle(QUEUE, unresolved, unresolved, group("c"), 15) is None


def test_messages_that_no_group_reads_are_no_obstacle() -> None:
    assert kept_obstacle(QUEUE, "t", 0) is None


def test_record_of_redriven_messages_is_no_reader() -> None:
    assert unread_obstacle(QUEUE, DEAD, DEAD, group("c"), 15) is None


def test_messages_for_later_and_transactions_are_obstacles_with_their_times() -> None:
    held = HeldMessages(2, 100, 900, 1, 50)
    scheduled, transactions = held_obstacles("t", "a", held)
    assert (scheduled.count, scheduled.first_unix_ms, scheduled.last_unix_ms) == (2, 100, 900)
    assert (transactions.count, transactions.first_unix_ms) == (1, 50)
    assert held_obstacles("t", "a", HeldMessages()) == []


@pytest.mark.parametrize(
    ("committed", "count"),
    [({}, 1), ({("in", "b", 0): 7}, 1), ({("in", "b", 0): 8}, 0)],
)
def test_outputs_are_an_obstacle_until_their_inputs_are_acknowledged(
    committed: dict[tuple[str, str, int], int], count: int
) -> None:
    outputs = [HeldOutputs("t", "g", "in", "b", 0, last_offset=7)]
    assert len(output_obstacles("a", outputs, {"g": committed})) == count


def test_outputs_of_deleted_groups_and_topics_are_no_obstacle() -> None:
    outputs = [HeldOutputs("t", "g", "in", "b", 0, 7), HeldOutputs("t", "h", "", "b", 0, 7)]
    assert output_obstacles("a", outputs, {"h": {}}) == []
