"""Diagnosis of a queue from its evidence.

Goal: every reason of the contract is found, with the values that the contract lists for it; of
several reasons the one to fix first is returned. Method: a table with a row per reason, in the
order in which they have to be fixed; each row is a stuck queue with one more fault.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._core.queues import QueueRef
from batonmq_server.nameserver.core.diagnosis import (
    LATELY_MS,
    SILENT_MS,
    StuckReason,
    diagnose,
    span,
)
from batonmq_server.nameserver.core.evidence import (
    DamagedMessage,
    ExcludedClient,
    FilterScan,
    GatewayEvidence,
    GroupEvidence,
    HandlerEvidence,
    HeldState,
    LockEvidence,
    LogExtent,
    OldestMessage,
    PauseEvidence,
    ProgressEvidence,
    QueueEvidence,
    RemoteMessage,
    SubscriptionChangeEvidence,
    SubscriptionMismatch,
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/explanation/ownership.md"
PROTO = ROOT / "protos/baton/nameserver/v1/nameserver_service.proto"

GROUP = GroupEvidence(name="planners", generation=7, member_count=2)
CALL = HandlerEvidence(QueueRef("flights", "broker-a", 3), 2_101, 80_000)
LOCK = LockEvidence(owner="c1", token=5, held_ms=60_000, lease_age_ms=1_000, running=CALL)
IN_HAND = ProgressEvidence(
    token=5, committed_offset=2_101, unacked_count=1, acked_count=99, idle_ms=800
)
MAYBE_IN_HAND = ProgressEvidence(
    token=5, committed_offset=2_101, unacked_count=16, unsure_count=16, idle_ms=9_000
)
NOTHING_IN_HAND = ProgressEvidence(token=5, committed_offset=2_101, idle_ms=9_000)
HEAD = OldestMessage(2_101, "broker-a-1f40-3", 83_000)
STUCK = QueueEvidence(
    group=GROUP,
    topic="flights",
    broker="broker-a",
    queue_id=3,
    expression="JFK||LGA",
    assigned="c1",
    lock=LOCK,
    progress=IN_HAND,
    log=LogExtent(100, 2_201),
    head=HEAD,
    unmoved_ms=80_000,
)
REFUSED = ExcludedClient(
    "c3",
    "c1",
    (
        SubscriptionMismatch("flights", "EWR", "JFK||LGA"),
        SubscriptionMismatch("order", "KEY", "NONE"),
    ),
)
NOT_ASSIGNED = replace(STUCK, assigned="", lock=None)
FREE = LockEvidence(token=5, denial="UNACKED: 1 message is not acked")
OF_SILENT_OWNER = replace(LOCK, lease_age_ms=SILENT_MS, lease_left_ms=18_000)

ROWS: dict[StuckReason, QueueEvidence] = {
    StuckReason.OFFSETS_UNREACHABLE: replace(
        STUCK, progress=None, progress_error="UNREACHABLE: no"
    ),
    StuckReason.STORAGE_UNREACHABLE: replace(STUCK, log=None, log_error="UNREACHABLE: away"),
    StuckReason.OFFSET_AHEAD_OF_LOG: replace(STUCK, log=LogExtent(100, 2_100)),
    StuckReason.IDLE: replace(STUCK, log=LogExtent(100, 2_101), head=None),
    StuckReason.NOT_READABLE: replace(STUCK, permission="WRITE"),
    StuckReason.PAUSED: replace(
        STUCK, group=replace(GROUP, paused=PauseEvidence("ops", "deploy", 90_000))
    ),
    StuckReason.SUBSCRIPTION_DRAINING: replace(
        NOT_ASSIGNED,
        group=replace(GROUP, change=SubscriptionChangeEvidence(4_000, 3), excluded=(REFUSED,)),
    ),
    StuckReason.REFUSED_SUBSCRIPTION: replace(
        NOT_ASSIGNED, group=replace(GROUP, excluded=(REFUSED,))
    ),
    StuckReason.NO_MEMBER: replace(NOT_ASSIGNED, group=replace(GROUP, member_count=0)),
    StuckReason.NOT_ASSIGNED: NOT_ASSIGNED,
    StuckReason.DATA_LOSS: replace(
        STUCK, head=None, damage=DamagedMessage("8000", "DATA_LOSS: bad checksum")
    ),
    StuckReason.MOVING: replace(STUCK, moved=True, unmoved_ms=LATELY_MS),
    StuckReason.LOCKMGR_UNREACHABLE: replace(
        STUCK, lock=None, lock_error="NOT_LEADER: there is no leader"
    ),
    StuckReason.HANDOVER_PENDING: replace(STUCK, lock=replace(LOCK, step="persist", attempt="9-1")),
    StuckReason.NOT_ACQUIRED: replace(STUCK, lock=FREE),
    StuckReason.OWNER_SILENT: replace(
        STUCK, lock=OF_SILENT_OWNER, progress=replace(IN_HAND, idle_ms=SILENT_MS)
    ),
    StuckReason.PHANTOM_TOKEN: replace(STUCK, progress=replace(IN_HAND, token=6)),
    StuckReason.HELD: replace(STUCK, assigned="c2", lock=replace(LOCK, waiters=("c2",))),
    StuckReason.ACK_CAP: replace(
        STUCK, progress=replace(IN_HAND, capped=True, acked_range_count=100_000)
    ),
    StuckReason.HEAD_OF_LINE: STUCK,
    StuckReason.OUTPUTS_REFUSED: replace(
        STUCK,
        lock=replace(LOCK, running=replace(CALL, failed_count=2, failed_reason="OUTPUT_MISMATCH")),
    ),
    StuckReason.FILTERED: replace(STUCK, progress=NOTHING_IN_HAND, filtered=FilterScan(100)),
    StuckReason.OUTDATED_NODE: replace(
        STUCK,
        progress=replace(NOTHING_IN_HAND, waiting_at="broker-a-0"),
        leader="broker-a-1",
    ),
    StuckReason.NOT_PULLING: replace(STUCK, progress=NOTHING_IN_HAND),
}


def promised(reason: StuckReason) -> set[str]:
    """Names of the values that the contract lists for a reason."""
    comment = re.search(
        rf"((?:\s*//[^\n]*\n)+)\s*STUCK_REASON_{reason.value} = ", PROTO.read_text()
    )
    assert comment is not None
    text = " ".join(comment[1].replace("//", "").split())
    named = set(re.findall(r"`(\w+)`", text.partition("Evidence:")[2]))
    if "as HEAD_OF_LINE" in text:
        named |= promised(StuckReason.HEAD_OF_LINE)
    return named


def test_reasons_are_those_of_the_contract() -> None:
    names = {
        name.removeprefix("STUCK_REASON_") for name in pb.StuckReason.DESCRIPTOR.values_by_name
    }
    assert set(StuckReason) == names - {"UNSPECIFIED"} == set(ROWS)


def test_page_on_ownership_lists_the_reasons_in_the_order_of_these_rows() -> None:
    section = PAGE.read_text().partition("### Why is this queue not moving")[2].partition("## ")[0]
    assert re.findall(r"^\| `([A-Z_]+)` \|", section, re.MULTILINE) == list(ROWS)


@pytest.mark.parametrize("reason", StuckReason)
def test_each_reason_is_found(reason: StuckReason) -> None:
    assert diagnose(ROWS[reason]).reason is reason


@pytest.mark.parametrize("reason", StuckReason)
def test_values_are_those_that_the_contract_lists(reason: StuckReason) -> None:
    assert promised(reason) <= set(diagnose(ROWS[reason]).values)


@pytest.mark.parametrize("reason", StuckReason)
def test_only_stuck_reasons_have_a_remedy(reason: StuckReason) -> None:
    finding = diagnose(ROWS[reason])
    assert finding.message
    assert bool(finding.remedy) == reason.stuck


@pytest.mark.parametrize(
    ("reason", "values"),
    [
        (
            StuckReason.HEAD_OF_LINE,
            {
                "owner": "c1",
                "unacked": 1,
                "offset": 2_101,
                "message_id": "broker-a-1f40-3",
                "age_ms": 83_000,
                "running_queue": "flights/broker-a/3",
                "running_offset": 2_101,
                "running_ms": 80_000,
                "running_abandoned": "false",
                "running_ordering_key": "",
                "running_failed_count": 0,
            },
        ),
        (StuckReason.HELD, {"owner": "c1", "held_ms": 60_000, "token": 5, "waiters": "c2"}),
        (
            StuckReason.REFUSED_SUBSCRIPTION,
            {
                "client_id": "c3",
                "member_client_id": "c1",
                "topic": "flights",
                "wants": "EWR",
                "has": "JFK||LGA",
                "topic_2": "order",
                "wants_2": "KEY",
                "has_2": "NONE",
            },
        ),
        (StuckReason.FILTERED, {"expression": "JFK||LGA", "scanned": 100}),
        (StuckReason.NO_MEMBER, {"generation": 7}),
    ],
)
def test_values_are_those_of_the_evidence(reason: StuckReason, values: dict[str, object]) -> None:
    assert diagnose(ROWS[reason]).values == values


def with_running(call: HandlerEvidence | None) -> QueueEvidence:
    return replace(STUCK, lock=replace(LOCK, running=call))


def test_message_names_the_owner_the_message_its_age_and_its_handling_time() -> None:
    assert diagnose(STUCK).message == (
        "c1 has been handling offset 2101 (message broker-a-1f40-3, 83 s old) for 80 s; "
        "1 message in flight; 99 after offset 2101 are acknowledged"
    )


def test_message_names_the_ordering_key_of_a_handler_that_hangs() -> None:
    finding = diagnose(with_running(replace(CALL, ordering_key="account 7")))
    assert finding.message == (
        "c1 has been handling offset 2101 (message broker-a-1f40-3, 83 s old) of ordering key "
        "'account 7' for 80 s; 1 message in flight; 99 after offset 2101 are acknowledged"
    )
    assert finding.values["running_ordering_key"] == "account 7"


@pytest.mark.parametrize(("failed_count", "times"), [(1, "once"), (5, "5 times")])
def test_message_names_the_ordering_key_that_waits_for_a_retry(
    failed_count: int, times: str
) -> None:
    call = replace(CALL, running_ms=12_000, ordering_key="account 7", failed_count=failed_count)
    finding = diagnose(with_running(call))
    assert finding.reason is StuckReason.HEAD_OF_LINE
    assert finding.message == (
        f"the handler of c1 has failed {times} with offset 2101 (message broker-a-1f40-3, 83 s "
        "old) of ordering key 'account 7', the last time 12 s ago, and is called again after a "
        "delay; 1 message in flight; 99 after offset 2101 are acknowledged"
    )
    assert "retries_max" in finding.remedy
    assert finding.values["running_failed_count"] == failed_count


@pytest.mark.parametrize(
    ("reason", "what"),
    [
        ("OUTPUT_MISMATCH", "makes other outputs of offset 2101 (message broker-a-1f40-3, 83 s "
         "old) than those that are stored"),
        ("OUTPUTS_FORGOTTEN", "makes outputs of offset 2101 (message broker-a-1f40-3, 83 s old), "
         "and it is not known whether they are stored"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("capped", [False, True])
def test_refused_outputs_are_the_reason_and_name_their_message(
    reason: str, what: str, *, capped: bool
) -> None:
    call = replace(CALL, running_ms=12_000, failed_count=3, failed_reason=reason)
    progress = replace(IN_HAND, capped=capped, acked_range_count=100_000)
    finding = diagnose(replace(with_running(call), progress=progress))
    assert finding.reason is StuckReason.OUTPUTS_REFUSED
    assert finding.message == (
        f"the handler of c1 {what} ({reason}): refused 3 times, the last time 12 s ago; "
        "1 message in flight"
    )
    assert "baton group reset-offsets" in finding.remedy
    assert finding.values["failed_reason"] == reason
    assert finding.values["offset"] == 2_101


def test_refused_outputs_of_a_later_message_are_not_the_reason() -> None:
    call = replace(CALL, offset=2_102, failed_count=3, failed_reason="OUTPUT_MISMATCH")
    assert diagnose(with_running(call)).reason is StuckReason.HEAD_OF_LINE


def test_cap_of_ranges_names_the_ordering_key() -> None:
    evidence = with_running(replace(CALL, ordering_key="account 7"))
    capped = replace(IN_HAND, capped=True, acked_range_count=100_000)
    assert "of ordering key 'account 7'" in diagnose(replace(evidence, progress=capped)).message


def test_message_makes_no_claim_about_the_handler_if_its_call_is_unknown() -> None:
    calls = (None, HandlerEvidence(STUCK.queue, 2_102, 9_000))
    for call in calls:
        assert diagnose(with_running(call)).message == (
            "c1 has 1 message in flight and does not acknowledge offset 2101 "
            "(message broker-a-1f40-3, 83 s old); 99 after it are acknowledged"
        ), "a call of a later message does not delay the oldest one"


def test_message_names_the_call_of_another_queue_that_takes_the_last_slot() -> None:
    other = replace(STUCK.queue, queue_id=7)
    finding = diagnose(with_running(HandlerEvidence(other, 44, 60_000)))
    assert finding.message.startswith(
        "c1 has been handling offset 44 of flights/broker-a/7 for 60 s, and has no handler free; "
    )
    assert "concurrency" in finding.remedy


def test_message_names_an_abandoned_call_that_takes_the_last_slot() -> None:
    call = HandlerEvidence(STUCK.queue, 2_000, 900_000, abandoned=True)
    finding = diagnose(with_running(call))
    assert finding.message.startswith(
        "c1 has been handling offset 2000 of flights/broker-a/3 for 15 min (abandoned: its result "
        "is discarded, but a thread can't be cancelled), and has no handler free; "
    )
    assert "Restart c1" in finding.remedy


# ---- queues of a gateway

AT_CLIENT = RemoteMessage(
    offset=2_101,
    state=HeldState.LEASED,
    attempt=3,
    client_id="shop@1",
    client=" (JAVA 5.2.0 on shop-7)",
    held_ms=18_000,
    lease_left_ms=12_000,
)


def at_gateway(oldest: RemoteMessage | None, waiting: int = 0) -> QueueEvidence:
    return replace(STUCK, gateway=GatewayEvidence("gateway-0", waiting, oldest))


def test_message_names_the_remote_client_its_attempt_and_the_end_of_its_lease() -> None:
    finding = diagnose(at_gateway(AT_CLIENT))
    assert finding.reason is StuckReason.HEAD_OF_LINE
    assert finding.message == (
        "offset 2101 (message broker-a-1f40-3, 83 s old) has been at client shop@1 (JAVA 5.2.0 on "
        "shop-7) for 18 s, attempt 3; its lease expires in 12 s; 1 message in flight at c1; 99 "
        "after offset 2101 are acknowledged"
    )
    assert "client shop@1" in finding.remedy
    assert finding.values["remote_client_id"] == "shop@1"
    assert "running_offset" not in finding.values, "what the gateway says is newer"


def test_message_says_that_a_lease_is_renewed() -> None:
    finding = diagnose(at_gateway(replace(AT_CLIENT, renewed=True)))
    assert "its lease is renewed in 12 s" in finding.message
    assert "renewed while the client is alive" in finding.remedy


@pytest.mark.parametrize(
    ("oldest", "waiting", "text"),
    [
        (None, 0, "is ready at gateway-0, and no receive call waits"),
        (replace(AT_CLIENT, offset=2_102), 0, "is ready at gateway-0, and no receive call waits"),
        (replace(AT_CLIENT, state=HeldState.READY), 2, "2 receive calls of the group wait"),
        (replace(AT_CLIENT, state=HeldState.WAITING), 0, "an earlier message of its message group"),
        (replace(AT_CLIENT, state=HeldState.ENDING), 0, "is being stored by gateway-0"),
    ],
)
def test_message_says_where_the_oldest_message_is_at_the_gateway(
    oldest: RemoteMessage | None, waiting: int, text: str
) -> None:
    finding = diagnose(at_gateway(oldest, waiting))
    assert finding.reason is StuckReason.HEAD_OF_LINE
    assert text in finding.message
    assert finding.remedy
    assert "remote_client_id" not in finding.values


def test_hand_over_that_waits_for_a_remote_client_names_it() -> None:
    finding = diagnose(replace(at_gateway(AT_CLIENT), assigned="c2"))
    assert finding.reason is StuckReason.HELD
    assert "has been at client shop@1" in finding.message


def test_cap_of_ranges_names_the_remote_client() -> None:
    capped = replace(IN_HAND, capped=True, acked_range_count=100_000)
    finding = diagnose(replace(at_gateway(AT_CLIENT), progress=capped))
    assert finding.reason is StuckReason.ACK_CAP
    assert "has been at client shop@1" in finding.message
    assert finding.values["ranges"] == 100_000


# ---- the order of the reasons


SILENT = ROWS[StuckReason.OWNER_SILENT]
PENDING_FREE = LockEvidence(token=5, step="fence", attempt="9-1")
TWO_AT_ONCE: list[tuple[StuckReason, QueueEvidence]] = [
    (StuckReason.IDLE, replace(ROWS[StuckReason.IDLE], permission="WRITE")),
    (StuckReason.NOT_READABLE, replace(ROWS[StuckReason.PAUSED], permission="WRITE")),
    (
        StuckReason.PAUSED,
        replace(
            NOT_ASSIGNED,
            group=replace(
                GROUP,
                paused=PauseEvidence("ops", "", 1),
                change=SubscriptionChangeEvidence(4_000, 3),
            ),
        ),
    ),
    (
        StuckReason.REFUSED_SUBSCRIPTION,
        replace(NOT_ASSIGNED, group=replace(GROUP, member_count=0, excluded=(REFUSED,))),
    ),
    (StuckReason.NOT_ASSIGNED, replace(ROWS[StuckReason.DATA_LOSS], assigned="")),
    (StuckReason.DATA_LOSS, replace(ROWS[StuckReason.DATA_LOSS], moved=True, unmoved_ms=0)),
    (StuckReason.HANDOVER_PENDING, replace(STUCK, lock=PENDING_FREE)),
    (StuckReason.OWNER_SILENT, replace(SILENT, lock=replace(OF_SILENT_OWNER, token=4))),
    (StuckReason.PHANTOM_TOKEN, replace(ROWS[StuckReason.PHANTOM_TOKEN], assigned="c2")),
    (StuckReason.HELD, replace(ROWS[StuckReason.ACK_CAP], assigned="c2")),
]


@pytest.mark.parametrize(("first", "evidence"), TWO_AT_ONCE)
def test_reason_to_fix_first_is_reported(first: StuckReason, evidence: QueueEvidence) -> None:
    assert diagnose(evidence).reason is first


def test_queue_without_lag_is_idle_whatever_else_is_wrong() -> None:
    without_member = replace(ROWS[StuckReason.NO_MEMBER], log=LogExtent(100, 2_101), head=None)
    assert diagnose(without_member).reason is StuckReason.IDLE
    paused = replace(ROWS[StuckReason.PAUSED], log=LogExtent(100, 2_101), head=None)
    assert diagnose(paused).reason is StuckReason.IDLE


def test_unreachable_service_is_reported_before_reasons_from_its_data() -> None:
    evidence = replace(
        ROWS[StuckReason.STORAGE_UNREACHABLE], progress=None, progress_error="UNREACHABLE: x"
    )
    assert diagnose(evidence).reason is StuckReason.OFFSETS_UNREACHABLE


def test_moving_queue_is_reported_without_the_lock_manager() -> None:
    moving = replace(ROWS[StuckReason.LOCKMGR_UNREACHABLE], moved=True, unmoved_ms=0)
    assert diagnose(moving).reason is StuckReason.MOVING


def test_committed_offset_seen_once_is_not_moving() -> None:
    assert diagnose(replace(STUCK, moved=False, unmoved_ms=0)).reason is StuckReason.HEAD_OF_LINE


def test_queue_that_moved_too_long_ago_is_not_moving() -> None:
    evidence = replace(STUCK, moved=True, unmoved_ms=LATELY_MS + 1)
    assert diagnose(evidence).reason is StuckReason.HEAD_OF_LINE


def test_queue_with_only_recent_messages_is_moving() -> None:
    evidence = replace(STUCK, head=replace(HEAD, age_ms=LATELY_MS - 1))
    assert diagnose(evidence).reason is StuckReason.MOVING


def test_pause_is_reported_while_handlers_still_finish_messages() -> None:
    assert (
        diagnose(replace(ROWS[StuckReason.PAUSED], moved=True, unmoved_ms=0)).reason
        is StuckReason.PAUSED
    )


def test_owner_that_pulls_is_not_silent_although_its_lease_is_not_renewed() -> None:
    evidence = replace(ROWS[StuckReason.OWNER_SILENT], progress=IN_HAND)
    assert diagnose(evidence).reason is StuckReason.HEAD_OF_LINE


def test_silent_owner_is_reported_before_the_waiting_member() -> None:
    evidence = replace(ROWS[StuckReason.OWNER_SILENT], assigned="c2")
    assert diagnose(evidence).reason is StuckReason.OWNER_SILENT


def test_idle_owner_is_reported_although_the_filter_drops_all_messages() -> None:
    idle = replace(NOTHING_IN_HAND, idle_ms=SILENT_MS)
    assert (
        diagnose(replace(ROWS[StuckReason.FILTERED], progress=idle)).reason
        is StuckReason.NOT_PULLING
    )


def test_owner_that_waits_at_the_leader_or_no_longer_waits_is_not_at_an_outdated_node() -> None:
    outdated = ROWS[StuckReason.OUTDATED_NODE]
    assert outdated.progress is not None
    timed_out = replace(outdated, progress=replace(outdated.progress, idle_ms=SILENT_MS))
    for other in (replace(outdated, leader="broker-a-0"), replace(outdated, leader=""), timed_out):
        assert diagnose(other).reason is StuckReason.NOT_PULLING


def test_outdated_node_is_named_and_not_the_member() -> None:
    finding = diagnose(ROWS[StuckReason.OUTDATED_NODE])
    assert "at storage node broker-a-0, which has none for it" in finding.message
    assert "broker-a-0 is cut off" in finding.remedy


def test_message_states_that_the_subscription_of_a_member_is_staged() -> None:
    staged = replace(GROUP, excluded=(replace(REFUSED, staged=True),))
    finding = diagnose(replace(NOT_ASSIGNED, group=staged))
    assert finding.reason is StuckReason.REFUSED_SUBSCRIPTION
    assert "has a staged subscription" in finding.message


def test_refused_client_is_not_the_reason_while_the_queue_is_assigned() -> None:
    evidence = replace(STUCK, group=replace(GROUP, excluded=(REFUSED,)))
    assert diagnose(evidence).reason is StuckReason.HEAD_OF_LINE


def test_refused_client_with_a_mismatch_on_the_topic_is_reported_first() -> None:
    other = ExcludedClient("c2", "c1", (SubscriptionMismatch("orders", "*", ""),))
    evidence = replace(NOT_ASSIGNED, group=replace(GROUP, excluded=(other, REFUSED)))
    assert diagnose(evidence).values["client_id"] == "c3"
    assert diagnose(replace(evidence, topic="orders")).values["client_id"] == "c2"
    unsubscribed = replace(evidence, topic="payments", expression=None)
    assert diagnose(unsubscribed).reason is StuckReason.NOT_ASSIGNED


def test_topic_without_subscription_is_reported_as_such() -> None:
    finding = diagnose(replace(NOT_ASSIGNED, expression=None))
    assert finding.reason is StuckReason.NOT_ASSIGNED
    assert finding.message == "group planners does not subscribe to flights"


# ---- groups without ownership, broadcasting groups


def test_without_ownership_the_lock_manager_is_not_needed() -> None:
    unowned = replace(ROWS[StuckReason.LOCKMGR_UNREACHABLE], group=replace(GROUP, owned=False))
    finding = diagnose(unowned)
    assert finding.reason is StuckReason.HEAD_OF_LINE
    assert finding.values["owner"] == "c1"


def test_head_of_line_is_found_from_acks_without_ownership() -> None:
    unowned = replace(STUCK, group=replace(GROUP, owned=False), lock=None)
    acked = replace(unowned, progress=replace(NOTHING_IN_HAND, acked_count=5))
    assert diagnose(acked).reason is StuckReason.HEAD_OF_LINE
    without_acks = replace(unowned, progress=NOTHING_IN_HAND)
    assert diagnose(without_acks).reason is StuckReason.NOT_PULLING


def test_broadcasting_group_is_never_stuck() -> None:
    group = replace(GROUP, owned=False, broadcasting=True)
    evidence = replace(STUCK, group=group, assigned="", lock=None, progress=None, head=None)
    assert diagnose(evidence).reason is StuckReason.MOVING
    assert (
        diagnose(replace(evidence, group=replace(group, member_count=0))).reason
        is StuckReason.NO_MEMBER
    )


# ---- lag


@pytest.mark.parametrize(
    ("evidence", "lag_count", "head_offset"),
    [
        (STUCK, 100, 2_101),
        (replace(STUCK, log=LogExtent(2_150, 2_201)), 51, 2_150),  # retention has removed messages
        (replace(STUCK, log=LogExtent(100, 2_101)), 0, -1),
        (replace(STUCK, log=None, log_error="away"), -1, -1),
        (replace(STUCK, progress=None, progress_error="away"), -1, -1),
        (replace(STUCK, progress=None, group=replace(GROUP, from_first=True)), 2_101, 100),
        (replace(STUCK, progress=None), -1, -1),  # the start is not known yet
        (replace(STUCK, progress=None, log=LogExtent(0, 0)), 0, -1),
    ],
)
def test_lag_is_the_number_of_messages_not_handled(
    evidence: QueueEvidence, lag_count: int, head_offset: int
) -> None:
    assert (evidence.lag_count, evidence.head_offset) == (lag_count, head_offset)


def test_lag_in_time_is_the_age_of_the_head() -> None:
    assert STUCK.lag_ms == 83_000
    assert ROWS[StuckReason.IDLE].lag_ms == 0
    assert replace(STUCK, head=None).lag_ms == -1


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0.0 s"),
        (9_999, "10.0 s"),
        (83_000, "83 s"),
        (120_000, "2 min"),
        (7_300_000, "2 h"),
        (400_000_000, "4 d"),
    ],
)
def test_time_spans_are_rounded_for_display(ms: int, text: str) -> None:
    assert span(ms) == text


def test_message_that_may_not_have_been_delivered_is_not_blamed() -> None:
    """A handler call that is known to run is still the reason."""
    running = diagnose(replace(STUCK, progress=MAYBE_IN_HAND))
    assert running.reason is StuckReason.HEAD_OF_LINE
    assert "up to 16 messages in flight" in running.message
    unknown = diagnose(replace(STUCK, progress=MAYBE_IN_HAND, lock=replace(LOCK, running=None)))
    assert unknown.reason is StuckReason.NOT_PULLING
    assert "c1 has up to 16 messages in flight and has not pulled" in unknown.message


def test_bounds_of_the_messages_in_flight_are_shown_while_they_differ() -> None:
    some = replace(MAYBE_IN_HAND, unsure_count=14)
    finding = diagnose(replace(STUCK, progress=some, lock=replace(LOCK, running=None)))
    assert finding.reason is StuckReason.HEAD_OF_LINE
    assert "c1 has 2 to 16 messages in flight" in finding.message
    held = diagnose(replace(STUCK, progress=some, assigned="c2"))
    assert held.reason is StuckReason.HELD
    assert "with 2 to 16 messages in flight" in held.message
