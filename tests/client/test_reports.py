"""Goal: reports have the values of the services by name, and None for unknown values.

Method: hand-made messages of the contracts are converted to reports.
"""

from __future__ import annotations

from dataclasses import asdict

import pytest

from baton.common.v1 import queue_pb2
from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from batonmq._common.rpc import error_to_pb
from batonmq._core.queues import QueueRef
from batonmq.admin.group_reports import (
    Assignment,
    Group,
    Member,
    Pause,
    QueueProgress,
    StagedSubscriptions,
    Subscription,
    diagnosis_from_pb,
    group_from_pb,
    join_progress,
    refused_from_pb,
)
from batonmq.admin.reports import lock_from_pb
from batonmq.cli.group import unacked
from batonmq.errors import Difference, SubscriptionConflict
from batonmq_server.nameserver.core.diagnosis import StuckReason

GROUP = Group(
    name="g",
    generation=2,
    members=(Member("c1", 1, "host-1", 5),),
    subscriptions=(Subscription("t", "*"),),
    subscription_generation=1,
    model="clustering",
    consume_from="last",
    order="none",
    policy="reject",
    ownership="on",
    strategy="sticky",
    assignments=(Assignment("t", "a", 0, "c1"), Assignment("t", "a", 1, None)),
    staged=None,
    pause=None,
)


def pb_queue(queue_id: int) -> queue_pb2.GroupQueue:
    queue = queue_pb2.QueueRef(topic="t", broker="a", queue_id=queue_id)
    return queue_pb2.GroupQueue(group="g", queue=queue)


def row(queue_id: int, **values: object) -> QueueProgress:
    nothing = dict.fromkeys(
        (
            "committed_offset",
            "log_end_offset",
            "lag",
            "unacked_count",
            "unacked_count_min",
            "client_id",
            "host",
            "token",
            "assigned",
        )
    )
    return QueueProgress("g", "t", "a", queue_id, **(nothing | values))


def test_progress_joins_the_values_of_three_services() -> None:
    queues = [QueueRef("t", "a", queue_id) for queue_id in (3, 2, 1, 0)]
    progress = [
        offsets_pb.Progress(
            queue=pb_queue(0), token=7, committed_offset=10, unacked_count=2, unacked_count_min=2
        ),
        offsets_pb.Progress(queue=pb_queue(1), token=3, committed_offset=5),
        offsets_pb.Progress(queue=pb_queue(2), token=4, committed_offset=6),
    ]
    owner = queue_pb2.Incarnation(client_id="c1", incarnation_id=1)
    removed_member = queue_pb2.Incarnation(client_id="gone", incarnation_id=9)
    held, free = lockmgr_pb.LOCK_STATE_HELD, lockmgr_pb.LOCK_STATE_FREE
    locks = [
        lockmgr_pb.LockEntry(queue=pb_queue(0), state=held, owner=owner, token=7),
        lockmgr_pb.LockEntry(queue=pb_queue(1), state=free, token=3),
        lockmgr_pb.LockEntry(queue=pb_queue(2), state=held, owner=removed_member, token=4),
    ]
    ends = {QueueRef("t", "a", 0): 15, QueueRef("t", "a", 1): 5, QueueRef("t", "a", 3): 9}
    rows = join_progress(GROUP, queues, progress, map(lock_from_pb, locks), ends)
    assert rows == (
        row(
            0,
            committed_offset=10,
            log_end_offset=15,
            lag=5,
            unacked_count=2,
            unacked_count_min=2,
            client_id="c1",
            host="host-1",
            token=7,
            assigned="c1",
        ),
        row(
            1,
            committed_offset=5,
            log_end_offset=5,
            lag=0,
            unacked_count=0,
            unacked_count_min=0,
            token=3,
        ),
        row(
            2,
            committed_offset=6,
            unacked_count=0,
            unacked_count_min=0,
            client_id="gone",
            token=4,
        ),
        row(3, log_end_offset=9),
    )


@pytest.mark.parametrize(
    ("log_end", "acked", "expected"),
    [(None, 0, (36, 4)), (100, 0, (36, 4)), (30, 0, (20, 4)), (30, 5, (15, 4)), (12, 0, (4, 4))],
)
def test_messages_in_flight_end_with_the_log(
    log_end: int | None, acked: int, expected: tuple[int, int]
) -> None:
    found = offsets_pb.Progress(
        queue=pb_queue(0),
        committed_offset=10,
        acked_count=acked,
        unacked_count=36,
        unacked_count_min=4,
    )
    ends = {} if log_end is None else {QueueRef("t", "a", 0): log_end}
    (found_row,) = join_progress(GROUP, [QueueRef("t", "a", 0)], [found], [], ends)
    assert (found_row.unacked_count, found_row.unacked_count_min) == expected
    assert unacked(asdict(found_row)) == (4 if expected == (4, 4) else f"4-{expected[0]}")


def test_lock_has_the_name_of_its_state() -> None:
    entry = lockmgr_pb.LockEntry(queue=pb_queue(0), state=lockmgr_pb.LOCK_STATE_FREE, token=3)
    entry.waiters.append("c2")
    lock = lock_from_pb(entry)
    assert (lock.state, lock.client_id, lock.token, lock.waiters) == ("free", None, 3, ("c2",))
    entry.state = 99  # type: ignore[assignment]
    assert lock_from_pb(entry).state == "99"


def pb_group() -> pb.Group:
    return pb.Group(
        name="g",
        generation=2,
        members=[
            pb.Member(incarnation=queue_pb2.Incarnation(client_id="c1", incarnation_id=1)),
            pb.Member(
                incarnation=queue_pb2.Incarnation(client_id="c2", incarnation_id=2),
                differs=True,
                room="r",
            ),
        ],
    )


def test_unset_settings_are_reported_as_their_defaults() -> None:
    group = group_from_pb(pb.Group(name="g"))
    assert (group.model, group.consume_from) == ("clustering", "last")
    assert (group.policy, group.ownership, group.strategy) == ("reject", "on", "sticky")
    assert (group.assignments, group.staged, group.pause) == ((), None, None)


def test_group_has_the_names_of_its_settings() -> None:
    message = pb_group()
    message.policy = pb.SUBSCRIPTION_POLICY_STAGED_LATEST
    message.ownership = pb.OWNERSHIP_OFF
    message.strategy = pb.STRATEGY_AVERAGE_BY_CIRCLE
    group = group_from_pb(message)
    assert (group.policy, group.ownership) == ("staged_latest", "off")
    assert group.strategy == "average_by_circle"
    assert [(m.client_id, m.differs, m.room) for m in group.members] == [
        ("c1", False, ""),
        ("c2", True, "r"),
    ]


def test_member_numbers_become_client_ids() -> None:
    message = pb_group()
    brokers = [
        pb.BrokerAssignment(broker="a", member_numbers=[2, 0]),
        pb.BrokerAssignment(broker="b", member_numbers=[1]),
    ]
    message.assignments.append(pb.TopicAssignment(topic="t", brokers=brokers))
    assert group_from_pb(message).assignments == (
        Assignment("t", "a", 0, "c2"),
        Assignment("t", "a", 1, None),
        Assignment("t", "b", 0, "c1"),
    )


def test_group_has_staged_subscriptions_and_pause() -> None:
    message = pb_group()
    message.staged.subscriptions.append(pb.Subscription(topic="t", expression="A"))
    message.staged.draining, message.staged.since_unix_ms = True, 7
    message.pause.by, message.pause.reason, message.pause.since_unix_ms = "me", "why", 8
    group = group_from_pb(message)
    assert group.staged == StagedSubscriptions(
        (Subscription("t", "A"),), draining=True, since_unix_ms=7
    )
    assert group.pause == Pause("me", "why", 8)


def test_refused_client_has_every_difference() -> None:
    difference = Difference("t", "expression", "c9", "B", "c1", "A")
    error = SubscriptionConflict("no", differences=(difference,))
    owner = queue_pb2.Incarnation(client_id="c9", incarnation_id=9)
    refused = refused_from_pb(
        pb.RefusedClient(incarnation=owner, host="h", error=error_to_pb(error), since_unix_ms=5)
    )
    assert (refused.client_id, refused.host, refused.since_unix_ms) == ("c9", "h", 5)
    assert isinstance(refused.error, SubscriptionConflict)
    assert refused.error.differences == (difference,)


def test_diagnosis_has_none_for_unknown_values() -> None:
    message = pb.Diagnosis(
        queue=pb_queue(0),
        reason=pb.STUCK_REASON_NO_MEMBER,
        lag_count=-1,
        lag_ms=-1,
        committed_offset=-1,
        next_offset=0,
        unmoved_ms=-1,
    )
    diagnosis = diagnosis_from_pb(message)
    assert (diagnosis.topic, diagnosis.broker, diagnosis.queue_id) == ("t", "a", 0)
    assert (diagnosis.lag, diagnosis.lag_ms, diagnosis.committed_offset, diagnosis.unmoved_ms) == (
        None,
    ) * 4
    assert (diagnosis.log_end_offset, diagnosis.client_id) == (0, None)
    assert (diagnosis.reason, diagnosis.stuck) == ("NO_MEMBER", True)


@pytest.mark.parametrize("reason", StuckReason)
def test_diagnosis_is_stuck_for_the_stuck_reasons_of_the_nameserver(reason: StuckReason) -> None:
    message = pb.Diagnosis(
        queue=pb_queue(0), reason=pb.StuckReason.Value(f"STUCK_REASON_{reason.value}")
    )
    diagnosis = diagnosis_from_pb(message)
    assert (diagnosis.reason, diagnosis.stuck) == (reason.value, reason.stuck)
