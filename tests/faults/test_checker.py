"""Goal: each rule of the checker can fail, and a correct history passes.

Method: a small correct history: three messages in one queue, all handled; a member is killed with
the second one in flight, and another member continues. Each test breaks it in one way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tools.faults.checker import check
from tools.faults.history import (
    REMOTE_LANE,
    HandlerCall,
    History,
    LoggedMessage,
    MemberOutage,
    OwnershipChange,
    ProgressSample,
    RemoteDelivery,
    RemoteLedger,
    Send,
    SendOutcome,
    StuckReport,
)

SPAN_MAX = 10
Q = ("broker-0", 0)
OTHER = ("broker-1", 0)


def ok(number: int, offset: int, lane: str = "key") -> Send:
    return Send(number, lane, number * 10, number * 10 + 5, SendOutcome.OK, Q, offset)


def handled(number: int, offset: int, start_us: int, member: str = "a") -> HandlerCall:
    return HandlerCall(member, Q, offset, 1, False, number, start_us, start_us + 1)


def committed(at_us: int, offset: int) -> ProgressSample:
    return ProgressSample(at_us - 1, at_us, {Q: offset})


AGAIN = HandlerCall("b", Q, 1, 2, True, 1, 1_000, 1_001)
LOG = [LoggedMessage(Q, offset, offset) for offset in range(3)]
CORRECT = History(
    sends=[ok(0, 0), ok(1, 1), ok(2, 2)],
    handler_calls=[
        handled(0, 0, 100),
        handled(1, 1, 110),
        AGAIN,
        handled(2, 2, 1_010, "b")._replace(token=2),
    ],
    outages=[MemberOutage("a", 120, None)],
    ownership_changes=[
        OwnershipChange("a", "granted", Q, 1, 90),
        OwnershipChange("b", "granted", Q, 2, 900),
    ],
    samples=[committed(105, 1), committed(1_020, 3)],
    stored=LOG,
    end_us=2_000,
)


def rules(history: History) -> set[str]:
    return {reason.rule for reason in check(history, SPAN_MAX)}


def test_correct_history_is_valid() -> None:
    assert rules(CORRECT) == set()


def test_empty_history_is_valid() -> None:
    assert rules(History()) == set()


def test_problem_of_the_run_makes_the_history_invalid() -> None:
    assert rules(replace(CORRECT, problems=["not healed"])) == {"run"}


# ---- sends


def test_message_with_a_receipt_and_no_handler_call_is_lost() -> None:
    assert rules(replace(CORRECT, sends=[*CORRECT.sends, ok(3, 3)])) == {"lost"}


def test_unfinished_handler_call_has_not_handled_the_message() -> None:
    cut = CORRECT.handler_calls[3]._replace(done_us=None)
    history = replace(
        CORRECT, handler_calls=[*CORRECT.handler_calls[:3], cut], samples=[committed(105, 1)]
    )
    assert rules(history) == {"lost"}


def test_failed_message_must_not_be_handled() -> None:
    failed = Send(2, "key", 20, 25, SendOutcome.FAIL, reason="NotSent")
    assert rules(replace(CORRECT, sends=[*CORRECT.sends[:2], failed])) == {"failed"}
    history = replace(CORRECT, sends=[*CORRECT.sends, failed._replace(number=3)])
    assert rules(history) == set(), "not handled"


def test_indeterminate_message_may_be_handled_or_not() -> None:
    doubtful = Send(2, "key", 20, 25, SendOutcome.INDETERMINATE, reason="Unreachable")
    assert rules(replace(CORRECT, sends=[*CORRECT.sends[:2], doubtful])) == set()
    assert rules(replace(CORRECT, sends=[*CORRECT.sends, doubtful._replace(number=3)])) == set()


def test_indeterminate_message_must_not_be_stored_twice() -> None:
    doubtful = Send(2, "key", 20, 25, SendOutcome.INDETERMINATE, reason="Unreachable")
    copy = handled(2, 3, 1_030, "b")._replace(token=2)
    history = replace(
        CORRECT, sends=[*CORRECT.sends[:2], doubtful], handler_calls=[*CORRECT.handler_calls, copy]
    )
    assert rules(history) == {"stored twice"}


def test_message_that_was_never_sent_is_found() -> None:
    assert rules(replace(CORRECT, sends=CORRECT.sends[:2])) == {"unknown"}


def test_two_receipts_for_one_offset_are_found() -> None:
    history = replace(CORRECT, sends=[*CORRECT.sends[:2], ok(2, 1, "other")])
    assert "receipts" in rules(history)


def test_two_messages_at_one_offset_are_found() -> None:
    """The tail of the log was lost, and another message got the offset of a receipt."""
    history = replace(CORRECT, sends=[ok(0, 0), ok(1, 2, "x"), ok(2, 1, "y")])
    assert "inconsistent" in rules(history)


def test_handler_call_at_another_offset_than_the_receipt_is_found() -> None:
    history = replace(CORRECT, sends=[*CORRECT.sends[:2], ok(2, 7)], stored=None)
    assert rules(history) == {"stored twice"}


@pytest.mark.parametrize("second", [ok(2, 1), ok(2, 2)._replace(queue=OTHER)])
def test_messages_of_a_key_out_of_order_or_in_two_queues_are_found(second: Send) -> None:
    second = second._replace(begin_us=0)
    first = ok(1, 2) if second.offset == 1 else ok(1, 1)
    assert rules(History(sends=[first, second])) == {"key order", "lost"}


def test_messages_without_a_key_may_be_in_any_queue() -> None:
    history = History(sends=[ok(1, 2, lane=""), ok(2, 1, lane="")])
    assert "key order" not in rules(history)


# ---- handling again


def test_message_must_not_be_handled_again_while_its_owner_runs() -> None:
    assert rules(replace(CORRECT, outages=[])) == {"handled twice"}
    assert rules(replace(CORRECT, outages=[MemberOutage("b", 120, None)])) == {"handled twice"}


def test_message_must_not_be_handled_again_before_its_owner_fails() -> None:
    assert rules(replace(CORRECT, outages=[MemberOutage("a", 5_000, None)])) == {"handled twice"}


def test_message_started_after_the_pause_was_not_in_flight_during_it() -> None:
    early = MemberOutage("a", 10, 20)
    late = [one._replace(start_us=one.start_us + 10**6) for one in CORRECT.handler_calls]
    late = [one._replace(done_us=one.start_us + 1) for one in late]
    history = replace(
        CORRECT, handler_calls=late, outages=[early], samples=[], ownership_changes=[]
    )
    assert rules(history) == {"handled twice"}


def test_message_handled_again_must_be_flagged() -> None:
    plain = AGAIN._replace(redelivered=False)
    history = replace(
        CORRECT, handler_calls=[*CORRECT.handler_calls[:2], plain, CORRECT.handler_calls[3]]
    )
    assert rules(history) == {"not flagged"}


def test_committed_message_must_not_be_handled_again() -> None:
    samples = [committed(118, 2), committed(1_020, 3)]
    assert rules(replace(CORRECT, samples=samples)) == {"handled twice"}


def test_message_must_not_be_handled_twice_under_one_token() -> None:
    twice = handled(1, 1, 1_000)._replace(redelivered=True)
    history = replace(
        CORRECT, handler_calls=[*CORRECT.handler_calls[:2], twice], sends=[ok(0, 0), ok(1, 1)]
    )
    assert "handled twice" in rules(
        replace(history, ownership_changes=[], samples=[], stored=LOG[:2])
    )


def test_repeated_messages_must_not_exceed_the_in_flight_limit() -> None:
    many = range(SPAN_MAX + 1)
    history = History(
        sends=[ok(n, n) for n in many],
        handler_calls=[
            *(handled(n, n, 100 + n) for n in many),
            *(AGAIN._replace(number=n, offset=n, start_us=1_000 + n) for n in many),
        ],
        outages=[MemberOutage("a", 500, None)],
    )
    assert rules(history) == {"more than in flight"}
    assert {reason.rule for reason in check(history, SPAN_MAX + 1)} == set()


def zombie(count: int) -> History:
    """`a` is paused, `b` takes over, and then `a` starts its next messages."""
    stale = [
        handled(n, n, 2_000_000 + n)._replace(redelivered=False, token=1) for n in (1, 2)[:count]
    ]
    return replace(
        CORRECT,
        handler_calls=[*CORRECT.handler_calls, *stale],
        outages=[MemberOutage("a", 120, 1_999_990)],
    )


def test_paused_member_may_start_one_message_right_after_the_pause() -> None:
    assert rules(zombie(1)) == set()


def test_paused_member_must_not_start_two_messages_under_its_old_token() -> None:
    assert rules(zombie(2)) == {"zombie"}


def test_paused_member_may_continue_under_a_new_token() -> None:
    """`a` loses the queue with two messages in flight, and is granted it again at once."""
    in_flight = [handled(1, 1, 110), handled(2, 2, 112)]
    repeats = [
        one._replace(start_us=one.start_us + 890, done_us=one.start_us + 891, token=2)
        for one in in_flight
    ]
    history = replace(
        CORRECT,
        handler_calls=[
            CORRECT.handler_calls[0],
            *in_flight,
            *(one._replace(redelivered=True) for one in repeats),
        ],
        outages=[MemberOutage("a", 120, 890)],
        ownership_changes=[
            OwnershipChange("a", "granted", Q, 1, 90),
            OwnershipChange("a", "granted", Q, 2, 900),
        ],
    )
    assert rules(history) == set()


# ---- order and committed offsets


def test_first_handler_calls_out_of_order_are_found() -> None:
    swapped = [
        handled(0, 0, 100)._replace(start_us=115, done_us=116),
        *CORRECT.handler_calls[1:],
    ]
    assert rules(replace(CORRECT, handler_calls=swapped, samples=[])) == {"order"}


def test_committed_offset_must_not_go_back() -> None:
    history = replace(CORRECT, samples=[*CORRECT.samples, committed(1_030, 2)])
    assert rules(history) == {"went back"}


def test_committed_offset_that_went_back_for_a_moment_is_found() -> None:
    history = replace(CORRECT, samples=[*CORRECT.samples, committed(1_030, 2), committed(1_040, 3)])
    assert rules(history) == {"went back"}


def test_committed_offset_must_not_pass_an_unhandled_message() -> None:
    once = replace(
        CORRECT, handler_calls=[one for one in CORRECT.handler_calls if one is not AGAIN]
    )
    assert rules(replace(once, samples=[committed(105, 2)])) == {"passed over"}
    assert rules(replace(once, samples=[committed(1_020, 4)])) == {"passed over"}


def test_committed_message_must_not_be_started_for_the_first_time() -> None:
    late = CORRECT.handler_calls[3]._replace(start_us=1_100, done_us=1_050)
    history = replace(
        CORRECT, handler_calls=[*CORRECT.handler_calls[:3], late], samples=[committed(1_060, 3)]
    )
    assert rules(history) == {"passed over"}


# ---- the log


def test_message_with_a_receipt_that_is_not_in_the_log_is_lost() -> None:
    assert rules(replace(CORRECT, stored=LOG[:2])) == {"lost"}


def test_empty_log_has_lost_every_message() -> None:
    assert rules(replace(CORRECT, stored=[])) == {"lost"}


def test_log_that_was_not_read_proves_nothing() -> None:
    assert rules(replace(CORRECT, stored=None)) == set()


def test_message_removed_by_retention_is_not_lost() -> None:
    assert rules(replace(CORRECT, stored=LOG[1:])) == set()


def test_hole_in_the_log_is_found() -> None:
    unsent = [CORRECT.sends[0], CORRECT.sends[2]]
    handler_calls = [CORRECT.handler_calls[0], CORRECT.handler_calls[3]]
    stored = [LOG[0], LOG[2]]
    history = History(sends=unsent, handler_calls=handler_calls, stored=stored)
    assert rules(history) == {"log"}


@pytest.mark.parametrize("stored", [[0, 0, 1, 2], [0, 2, 1]])
def test_log_read_out_of_order_or_twice_is_found(stored: list[int]) -> None:
    history = replace(CORRECT, stored=[LoggedMessage(Q, offset, offset) for offset in stored])
    assert rules(history) == {"log"}


def test_log_with_another_message_at_the_offset_of_a_receipt_is_found() -> None:
    wrong = [*LOG[:2], LoggedMessage(Q, 2, 7)]
    assert rules(replace(CORRECT, stored=wrong)) == {"inconsistent"}


def test_failed_message_must_not_be_in_the_log() -> None:
    failed = Send(3, "key", 30, 35, SendOutcome.FAIL, reason="NotSent")
    history = replace(
        CORRECT, sends=[*CORRECT.sends, failed], stored=[*LOG, LoggedMessage(Q, 3, 3)]
    )
    assert rules(history) == {"failed"}


def test_message_sent_after_a_receipt_must_have_a_higher_offset() -> None:
    early = ok(1, 2, lane="")
    late = ok(2, 1, lane="")
    assert "real time" in rules(History(sends=[early, late]))
    together = late._replace(begin_us=early.begin_us)
    assert "real time" not in rules(History(sends=[early, together]))


# ---- owners


def test_token_must_not_be_granted_to_two_members() -> None:
    both = [CORRECT.ownership_changes[0], OwnershipChange("b", "granted", Q, 1, 900)]
    assert "owners" in rules(replace(CORRECT, ownership_changes=both))


def test_handler_must_not_start_under_the_token_of_another_member() -> None:
    others = [OwnershipChange("c", "granted", Q, 1, 90), CORRECT.ownership_changes[1]]
    assert rules(replace(CORRECT, ownership_changes=others)) == {"owners"}


def test_handler_must_not_start_under_an_old_token_after_a_newer_grant() -> None:
    early = [CORRECT.ownership_changes[0], OwnershipChange("b", "granted", Q, 2, 105)]
    assert rules(replace(CORRECT, ownership_changes=early)) == {"owners"}


def test_disconnected_member_must_not_start_a_handler_after_its_lease() -> None:
    cut = MemberOutage("a", 120, 1_999_990, paused=False)
    assert rules(replace(CORRECT, outages=[cut])) == set()
    assert "owners" in rules(replace(zombie(1), outages=[cut]))


# ---- progress


@pytest.mark.parametrize("reason", ["", "MOVING", "IDLE"])
def test_stalled_queue_must_have_a_reason(reason: str) -> None:
    assert rules(replace(CORRECT, stuck_reports=[StuckReport(Q, 1, 500, 30_000, reason)])) == {
        "stuck"
    }
    assert rules(replace(CORRECT, stuck_reports=[StuckReport(Q, 1, 500, 20_000, reason)])) == set()


def test_stalled_queue_with_a_reason_is_valid() -> None:
    assert (
        rules(replace(CORRECT, stuck_reports=[StuckReport(Q, 1, 500, 30_000, "NO_QUORUM")]))
        == set()
    )


LEDGER = RemoteLedger(
    deliveries=[
        RemoteDelivery("r", "gateway", 0, 1, 100, Q, 0),
        RemoteDelivery("r", "gateway", 1, 1, 100, Q, 1),
        RemoteDelivery("r", "gateway-1", 1, 2, 500, Q, 1),
        RemoteDelivery("s", "gateway-1", 2, 1, 500, Q, 2),
    ],
    asked={0: 110, 1: 510, 2: 510},
    acks={0: 150, 1: 550, 2: 560},
)
REMOTE = replace(
    CORRECT,
    sends=[*(ok(number, number, lane="") for number in range(3)), ok(4, 4)],
    handler_calls=[*CORRECT.handler_calls, handled(4, 4, 1_015, "b")._replace(token=2)],
    stored=[*LOG, LoggedMessage(Q, 3, 3), LoggedMessage(Q, 4, 4)],
    remote=[LEDGER],
)


def with_ledger(history: History = REMOTE, **changes: object) -> History:
    return replace(history, remote=[replace(LEDGER, **changes)])  # type: ignore[arg-type]


def test_correct_ledger_of_remote_clients_is_valid() -> None:
    assert rules(REMOTE) == set()


def test_message_that_no_remote_client_acknowledged_is_lost() -> None:
    assert rules(with_ledger(acks={0: 150, 1: 550})) == {"remote lost"}
    assert rules(with_ledger(deliveries=[], acks={})) == {"remote lost"}


def test_lost_answer_to_an_acknowledgement_counts_if_progress_has_it() -> None:
    unsure = {0: 150, 1: 550}
    assert rules(with_ledger(acks=unsure, committed={Q: 3})) == set()
    assert rules(with_ledger(acks=unsure, committed={Q: 2})) == {"remote lost"}
    assert rules(with_ledger(acks=unsure, committed={OTHER: 3})) == {"remote lost"}


def test_message_that_is_committed_without_an_acknowledgement_is_lost() -> None:
    skipped = with_ledger(acks={0: 150, 1: 550}, asked={0: 110, 1: 510}, committed={Q: 3})
    assert rules(skipped) == {"remote lost"}


def test_acknowledged_message_is_not_delivered_to_a_remote_client_again() -> None:
    late = RemoteDelivery("s", "gateway", 0, 2, 600_000, Q, 0)
    broken = with_ledger(deliveries=[*LEDGER.deliveries, late])
    assert rules(broken) == {"remote again"}
    resumed = MemberOutage("gateway", 1_000, 500_000)
    assert rules(replace(broken, gateway_outages=[resumed])) == set()
    for other in (
        resumed._replace(member="gateway-1"),
        resumed._replace(end_us=300_000),
        resumed._replace(end_us=None),
    ):
        assert rules(replace(broken, gateway_outages=[other])) == {"remote again"}


def test_repeated_delivery_to_a_remote_client_counts_the_attempt() -> None:
    again = RemoteDelivery("s", "gateway-1", 2, 1, 555, Q, 2)
    assert rules(with_ledger(deliveries=[*LEDGER.deliveries, again])) == {"remote attempt"}


def test_remote_client_gets_no_failed_and_no_unknown_message() -> None:
    unknown = RemoteDelivery("r", "gateway", 9, 1, 100, Q, 9)
    assert rules(with_ledger(deliveries=[*LEDGER.deliveries, unknown])) == {"unknown"}
    failed = Send(3, "", 1, 2, SendOutcome.FAIL)
    delivery = RemoteDelivery("r", "gateway", 3, 1, 100, Q, 3)
    sent = replace(REMOTE, sends=[*REMOTE.sends, failed])
    assert rules(with_ledger(sent, deliveries=[*LEDGER.deliveries, delivery])) == {"failed"}


LANE = f"{REMOTE_LANE}0"


def in_order(*deliveries: tuple[int, int], asked: Mapping[int, int]) -> set[str]:
    """Check messages 0 to 2 of a message group, delivered at given times."""
    ledger = RemoteLedger(
        in_order=True,
        deliveries=[
            RemoteDelivery("r", "gateway", number, 1, at_us, Q, number)
            for number, at_us in deliveries
        ],
        asked=dict(asked),
        acks=dict(asked),
    )
    return rules(
        replace(
            CORRECT,
            sends=[ok(number, number, lane=LANE) for number in range(3)],
            remote=[ledger],
        )
    )


def test_message_of_a_message_group_waits_for_the_one_ahead_of_it() -> None:
    asked = {0: 110, 1: 210, 2: 310}
    assert in_order((0, 100), (1, 200), (2, 300), asked=asked) == set()
    assert in_order((0, 100), (1, 105), (2, 300), asked=asked) == {"remote order"}
    assert in_order((1, 100), (0, 200), (2, 300), asked=asked | {0: 250}) == {"remote order"}
    unsettled = in_order((0, 100), (1, 200), (2, 300), asked={0: 110, 2: 310})
    assert unsettled == {"remote lost", "remote order"}


def test_group_in_order_gets_its_own_messages_only() -> None:
    ledger = RemoteLedger(in_order=True, deliveries=LEDGER.deliveries[:1])
    assert rules(replace(REMOTE, remote=[LEDGER, ledger])) == {"unknown"}
