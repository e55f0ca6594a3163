"""Goal: each rule of the checker can fail, and a history without a fault passes.

Method: a small history that is right: three messages in one queue, all handled; a member is killed
with the second in hand, and another one goes on. Each test breaks it in one way.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.faults.checker import check
from tools.faults.history import (
    Crash,
    Handling,
    History,
    Outcome,
    Owning,
    Sample,
    Send,
    Stored,
    Watch,
)

SPAN_MAX = 10
Q = ("broker-0", 0)
OTHER = ("broker-1", 0)


def ok(number: int, offset: int, lane: str = "key") -> Send:
    return Send(number, lane, number * 10, number * 10 + 5, Outcome.OK, Q, offset)


def handled(number: int, offset: int, start_us: int, member: str = "a") -> Handling:
    return Handling(member, Q, offset, 1, False, number, start_us, start_us + 1)


def committed(at_us: int, offset: int) -> Sample:
    return Sample(at_us - 1, at_us, {Q: offset})


AGAIN = Handling("b", Q, 1, 2, True, 1, 1_000, 1_001)
LOG = [Stored(Q, offset, offset) for offset in range(3)]
RIGHT = History(
    sends=[ok(0, 0), ok(1, 1), ok(2, 2)],
    handlings=[
        handled(0, 0, 100),
        handled(1, 1, 110),
        AGAIN,
        handled(2, 2, 1_010, "b")._replace(token=2),
    ],
    crashes=[Crash("a", 120, None)],
    ownings=[Owning("a", "granted", Q, 1, 90), Owning("b", "granted", Q, 2, 900)],
    samples=[committed(105, 1), committed(1_020, 3)],
    stored=LOG,
    end_us=2_000,
)


def rules(history: History) -> set[str]:
    return {reason.rule for reason in check(history, SPAN_MAX)}


def test_a_right_history_is_valid() -> None:
    assert rules(RIGHT) == set()


def test_an_empty_history_is_valid() -> None:
    assert rules(History()) == set()


def test_what_the_run_could_not_do_is_a_reason() -> None:
    assert rules(replace(RIGHT, problems=["not healed"])) == {"run"}


# ---- sends


def test_a_message_with_a_receipt_that_nobody_handled_is_lost() -> None:
    assert rules(replace(RIGHT, sends=[*RIGHT.sends, ok(3, 3)])) == {"lost"}


def test_a_handler_that_did_not_end_has_not_handled() -> None:
    cut = RIGHT.handlings[3]._replace(done_us=None)
    history = replace(RIGHT, handlings=[*RIGHT.handlings[:3], cut], samples=[committed(105, 1)])
    assert rules(history) == {"lost"}


def test_a_failed_message_must_not_be_handled() -> None:
    failed = Send(2, "key", 20, 25, Outcome.FAIL, reason="NotSent")
    assert rules(replace(RIGHT, sends=[*RIGHT.sends[:2], failed])) == {"failed"}
    history = replace(RIGHT, sends=[*RIGHT.sends, failed._replace(number=3)])
    assert rules(history) == set(), "not handled"


def test_a_message_in_doubt_may_be_handled_or_not() -> None:
    doubtful = Send(2, "key", 20, 25, Outcome.INDETERMINATE, reason="Unreachable")
    assert rules(replace(RIGHT, sends=[*RIGHT.sends[:2], doubtful])) == set()
    assert rules(replace(RIGHT, sends=[*RIGHT.sends, doubtful._replace(number=3)])) == set()


def test_a_message_in_doubt_must_not_be_stored_twice() -> None:
    doubtful = Send(2, "key", 20, 25, Outcome.INDETERMINATE, reason="Unreachable")
    copy = handled(2, 3, 1_030, "b")._replace(token=2)
    history = replace(RIGHT, sends=[*RIGHT.sends[:2], doubtful], handlings=[*RIGHT.handlings, copy])
    assert rules(history) == {"stored twice"}


def test_a_message_that_nobody_sent_is_noticed() -> None:
    assert rules(replace(RIGHT, sends=RIGHT.sends[:2])) == {"unknown"}


def test_two_receipts_for_one_place_are_noticed() -> None:
    history = replace(RIGHT, sends=[*RIGHT.sends[:2], ok(2, 1, "other")])
    assert "receipts" in rules(history)


def test_two_messages_at_one_place_are_noticed() -> None:
    """The receipt of one was given, and then another one stood there: a lost tail."""
    history = replace(RIGHT, sends=[ok(0, 0), ok(1, 2, "x"), ok(2, 1, "y")])
    assert "inconsistent" in rules(history)


def test_a_handler_elsewhere_than_the_receipt_says_is_noticed() -> None:
    history = replace(RIGHT, sends=[*RIGHT.sends[:2], ok(2, 7)], stored=None)
    assert rules(history) == {"stored twice"}


@pytest.mark.parametrize("second", [ok(2, 1), ok(2, 2)._replace(queue=OTHER)])
def test_messages_of_a_key_out_of_order_or_in_two_queues_are_noticed(second: Send) -> None:
    second = second._replace(begin_us=0)
    first = ok(1, 2) if second.offset == 1 else ok(1, 1)
    assert rules(History(sends=[first, second])) == {"key order", "lost"}


def test_messages_without_a_key_stand_anywhere() -> None:
    history = History(sends=[ok(1, 2, lane=""), ok(2, 1, lane="")])
    assert "key order" not in rules(history)


# ---- handling again


def test_a_message_must_not_be_handled_again_while_its_owner_lives() -> None:
    assert rules(replace(RIGHT, crashes=[])) == {"handled twice"}
    assert rules(replace(RIGHT, crashes=[Crash("b", 120, None)])) == {"handled twice"}


def test_a_message_must_not_be_handled_again_before_its_owner_fell() -> None:
    assert rules(replace(RIGHT, crashes=[Crash("a", 5_000, None)])) == {"handled twice"}


def test_a_message_that_was_started_after_the_pause_was_not_in_hand_then() -> None:
    early = Crash("a", 10, 20)
    late = [one._replace(start_us=one.start_us + 10**6) for one in RIGHT.handlings]
    late = [one._replace(done_us=one.start_us + 1) for one in late]
    history = replace(RIGHT, handlings=late, crashes=[early], samples=[], ownings=[])
    assert rules(history) == {"handled twice"}


def test_a_message_that_is_handled_again_must_be_flagged() -> None:
    plain = AGAIN._replace(redelivered=False)
    history = replace(RIGHT, handlings=[*RIGHT.handlings[:2], plain, RIGHT.handlings[3]])
    assert rules(history) == {"not flagged"}


def test_a_committed_message_must_not_be_handled_again() -> None:
    samples = [committed(118, 2), committed(1_020, 3)]
    assert rules(replace(RIGHT, samples=samples)) == {"handled twice"}


def test_a_message_must_not_be_handled_twice_under_one_token() -> None:
    twice = handled(1, 1, 1_000)._replace(redelivered=True)
    history = replace(RIGHT, handlings=[*RIGHT.handlings[:2], twice], sends=[ok(0, 0), ok(1, 1)])
    assert "handled twice" in rules(replace(history, ownings=[], samples=[], stored=LOG[:2]))


def test_more_must_not_be_handled_again_than_an_owner_may_have_in_hand() -> None:
    many = range(SPAN_MAX + 1)
    history = History(
        sends=[ok(n, n) for n in many],
        handlings=[
            *(handled(n, n, 100 + n) for n in many),
            *(AGAIN._replace(number=n, offset=n, start_us=1_000 + n) for n in many),
        ],
        crashes=[Crash("a", 500, None)],
    )
    assert rules(history) == {"more than in hand"}
    assert {reason.rule for reason in check(history, SPAN_MAX + 1)} == set()


def zombie(count: int) -> History:
    """`a` stood still, `b` took over, and then `a` starts what it was about to."""
    stale = [
        handled(n, n, 2_000_000 + n)._replace(redelivered=False, token=1) for n in (1, 2)[:count]
    ]
    return replace(
        RIGHT, handlings=[*RIGHT.handlings, *stale], crashes=[Crash("a", 120, 1_999_990)]
    )


def test_who_stood_still_may_have_been_about_to_start_one() -> None:
    assert rules(zombie(1)) == set()


def test_who_stood_still_must_not_start_more_than_one() -> None:
    assert rules(zombie(2)) == {"zombie"}


def test_who_stood_still_may_go_on_under_a_new_token() -> None:
    """`a` gives up the two it had in hand, and is granted the queue again at once."""
    in_hand = [handled(1, 1, 110), handled(2, 2, 112)]
    again = [
        one._replace(start_us=one.start_us + 890, done_us=one.start_us + 891, token=2)
        for one in in_hand
    ]
    history = replace(
        RIGHT,
        handlings=[
            RIGHT.handlings[0],
            *in_hand,
            *(one._replace(redelivered=True) for one in again),
        ],
        crashes=[Crash("a", 120, 890)],
        ownings=[Owning("a", "granted", Q, 1, 90), Owning("a", "granted", Q, 2, 900)],
    )
    assert rules(history) == set()


# ---- order and committed offsets


def test_first_handlings_out_of_order_are_noticed() -> None:
    swapped = [
        handled(0, 0, 100)._replace(start_us=115, done_us=116),
        *RIGHT.handlings[1:],
    ]
    assert rules(replace(RIGHT, handlings=swapped, samples=[])) == {"order"}


def test_a_committed_offset_must_not_fall() -> None:
    history = replace(RIGHT, samples=[*RIGHT.samples, committed(1_030, 2)])
    assert rules(history) == {"rewound"}


def test_a_committed_offset_that_fell_and_rose_again_is_noticed() -> None:
    history = replace(RIGHT, samples=[*RIGHT.samples, committed(1_030, 2), committed(1_040, 3)])
    assert rules(history) == {"rewound"}


def test_a_committed_offset_must_not_pass_what_nobody_has_handled() -> None:
    once = replace(RIGHT, handlings=[one for one in RIGHT.handlings if one is not AGAIN])
    assert rules(replace(once, samples=[committed(105, 2)])) == {"passed over"}
    assert rules(replace(once, samples=[committed(1_020, 4)])) == {"passed over"}


def test_a_message_must_not_be_started_for_the_first_time_once_it_is_committed() -> None:
    late = RIGHT.handlings[3]._replace(start_us=1_100, done_us=1_050)
    history = replace(RIGHT, handlings=[*RIGHT.handlings[:3], late], samples=[committed(1_060, 3)])
    assert rules(history) == {"passed over"}


# ---- the log


def test_a_message_with_a_receipt_that_is_not_in_the_log_is_lost() -> None:
    assert rules(replace(RIGHT, stored=LOG[:2])) == {"lost"}


def test_a_log_that_is_empty_has_lost_everything() -> None:
    assert rules(replace(RIGHT, stored=[])) == {"lost"}


def test_a_log_that_was_not_read_says_nothing() -> None:
    assert rules(replace(RIGHT, stored=None)) == set()


def test_what_retention_has_removed_is_not_lost() -> None:
    assert rules(replace(RIGHT, stored=LOG[1:])) == set()


def test_a_hole_in_the_log_is_noticed() -> None:
    unsent = [RIGHT.sends[0], RIGHT.sends[2]]
    handlings = [RIGHT.handlings[0], RIGHT.handlings[3]]
    stored = [LOG[0], LOG[2]]
    history = History(sends=unsent, handlings=handlings, stored=stored)
    assert rules(history) == {"log"}


@pytest.mark.parametrize("stored", [[0, 0, 1, 2], [0, 2, 1]])
def test_a_log_that_is_read_out_of_order_or_twice_is_noticed(stored: list[int]) -> None:
    history = replace(RIGHT, stored=[Stored(Q, offset, offset) for offset in stored])
    assert rules(history) == {"log"}


def test_another_message_in_the_log_than_the_receipt_says_is_noticed() -> None:
    wrong = [*LOG[:2], Stored(Q, 2, 7)]
    assert rules(replace(RIGHT, stored=wrong)) == {"inconsistent"}


def test_a_failed_message_must_not_be_in_the_log() -> None:
    failed = Send(3, "key", 30, 35, Outcome.FAIL, reason="NotSent")
    history = replace(RIGHT, sends=[*RIGHT.sends, failed], stored=[*LOG, Stored(Q, 3, 3)])
    assert rules(history) == {"failed"}


def test_what_was_sent_after_a_receipt_must_stand_behind_it() -> None:
    early = ok(1, 2, lane="")
    late = ok(2, 1, lane="")
    assert "real time" in rules(History(sends=[early, late]))
    together = late._replace(begin_us=early.begin_us)
    assert "real time" not in rules(History(sends=[early, together]))


# ---- owners


def test_one_token_must_not_be_granted_to_two() -> None:
    both = [RIGHT.ownings[0], Owning("b", "granted", Q, 1, 900)]
    assert "owners" in rules(replace(RIGHT, ownings=both))


def test_nothing_may_be_started_under_the_token_of_another() -> None:
    others = [Owning("c", "granted", Q, 1, 90), RIGHT.ownings[1]]
    assert rules(replace(RIGHT, ownings=others)) == {"owners"}


def test_nothing_may_be_started_under_an_old_token_once_a_new_one_is_granted() -> None:
    early = [RIGHT.ownings[0], Owning("b", "granted", Q, 2, 105)]
    assert rules(replace(RIGHT, ownings=early)) == {"owners"}


def test_who_was_cut_off_may_lose_what_it_had_but_must_not_start_anything_later() -> None:
    cut = Crash("a", 120, 1_999_990, stood_still=False)
    assert rules(replace(RIGHT, crashes=[cut])) == set()
    assert "owners" in rules(replace(zombie(1), crashes=[cut]))


# ---- progress


@pytest.mark.parametrize("reason", ["", "MOVING", "IDLE"])
def test_a_queue_that_stands_still_must_have_a_reason(reason: str) -> None:
    assert rules(replace(RIGHT, watches=[Watch(Q, 1, 500, 30_000, reason)])) == {"stuck"}
    assert rules(replace(RIGHT, watches=[Watch(Q, 1, 500, 20_000, reason)])) == set()


def test_a_queue_may_stand_still_for_a_reason() -> None:
    assert rules(replace(RIGHT, watches=[Watch(Q, 1, 500, 30_000, "NO_QUORUM")])) == set()
