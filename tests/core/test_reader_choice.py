"""Which node of a broker a queue is pulled from.

Goal: a consumer never waits at a follower without a bound while the broker may have a leader.
Method: the pure rules with plain values; the time is an argument.
"""

from __future__ import annotations

from batonmq._core.reader_choice import CHECK_MS, ReaderChoice


def test_node_that_an_answer_names_is_pulled_next() -> None:
    choice = ReaderChoice()
    assert choice.node_id == ""
    assert not choice.answered("b", 0, received=True)
    assert choice.node_id == "b"
    assert not choice.answered("", 10, received=False)
    assert choice.node_id == ""


def test_follower_without_messages_is_checked_after_a_bounded_time() -> None:
    choice = ReaderChoice()
    assert not choice.answered("b", 1_000, received=False)
    assert not choice.answered("b", 999 + CHECK_MS, received=False)
    assert choice.answered("b", 1_000 + CHECK_MS, received=False)
    choice.checked(has_leader=True)
    assert choice.node_id == ""


def test_follower_is_kept_while_no_leader_is_registered_and_checked_again() -> None:
    choice = ReaderChoice()
    choice.answered("b", 0, received=False)
    assert choice.answered("b", CHECK_MS, received=False)
    choice.checked(has_leader=False)
    assert choice.node_id == "b"
    assert not choice.answered("b", CHECK_MS + 1, received=False)
    assert choice.answered("b", 2 * CHECK_MS + 1, received=False)


def test_silence_of_several_followers_counts_together() -> None:
    choice = ReaderChoice()
    choice.answered("b", 0, received=False)
    assert choice.answered("c", CHECK_MS, received=False)


def test_messages_and_failures_end_the_silence() -> None:
    choice = ReaderChoice()
    choice.answered("b", 0, received=False)
    choice.answered("b", CHECK_MS - 1, received=True)
    assert not choice.answered("b", CHECK_MS, received=False)
    choice.failed("c")
    assert choice.node_id == "c"
    assert not choice.answered("c", 2 * CHECK_MS, received=False)


def test_follower_holds_a_pull_not_beyond_the_next_check() -> None:
    choice = ReaderChoice()
    assert choice.hold_ms(15_000) == 15_000
    choice.failed("b")
    assert choice.hold_ms(15_000) == CHECK_MS
    assert choice.hold_ms(500) == 500
