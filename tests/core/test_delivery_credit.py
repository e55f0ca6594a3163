"""The credit of a delivery: when a storage node gets more. Pure."""

from __future__ import annotations

import pytest

from batonmq._core.delivery_credit import DeliveryCredit

WINDOW, BYTES = 100, 1_000


def begun() -> DeliveryCredit:
    """Return a credit after its first offer."""
    credit = DeliveryCredit(WINDOW)
    assert credit.offer(WINDOW, BYTES, idle=True)
    return credit


def test_first_credit_is_the_room_of_the_client() -> None:
    credit = begun()
    assert (credit.number, credit.messages_limit, credit.bytes_limit) == (1, WINDOW, BYTES)
    assert credit.messages_left == WINDOW


def test_first_credit_is_given_without_room_too() -> None:
    credit = DeliveryCredit(WINDOW)
    assert credit.offer(0, 0, idle=True)
    assert (credit.number, credit.messages_limit) == (1, 0)


def test_no_credit_is_sent_for_less_than_half_a_window() -> None:
    credit = begun()
    credit.receive(49, 10)
    assert not credit.offer(WINDOW, BYTES, idle=True)
    credit.receive(50, 10)
    assert credit.offer(WINDOW, BYTES, idle=False)
    assert (credit.number, credit.messages_limit) == (2, 150)


def test_limits_never_fall() -> None:
    credit = begun()
    credit.receive(10, 10)
    assert not credit.offer(0, 0, idle=False)
    assert (credit.messages_limit, credit.bytes_limit) == (WINDOW, BYTES)


def test_any_room_is_offered_to_a_node_without_credit_when_no_message_waits() -> None:
    credit = begun()
    credit.receive(WINDOW, 10)
    assert not credit.offer(3, 0, idle=False)
    assert credit.offer(3, 0, idle=True)
    assert credit.messages_limit == WINDOW + 3


def test_bytes_alone_are_a_reason_for_more_credit() -> None:
    credit = begun()
    credit.receive(1, 500)
    assert credit.offer(WINDOW - 1, BYTES, idle=False)
    assert credit.bytes_limit == 1_500


def test_credit_is_due_when_half_a_window_was_taken() -> None:
    credit = begun()
    credit.receive(60, 10)  # 40 messages are left
    assert credit.due_at() == 10
    assert not credit.offer(WINDOW - 11, 0, idle=False)
    assert credit.offer(WINDOW - 10, 0, idle=False)


def test_client_that_takes_one_message_at_a_time_sends_few_credits() -> None:
    credit, waiting, sent = DeliveryCredit(WINDOW), 0, 0
    credit.offer(WINDOW, BYTES, idle=True)
    for _ in range(10_000):
        sent, waiting = credit.messages_limit, waiting + credit.messages_limit - sent
        credit.receive(sent, 0)
        waiting -= 1
        if waiting <= credit.due_at():
            credit.offer(WINDOW - waiting, 0, idle=not waiting)
    assert 150 <= credit.number <= 201


@pytest.mark.parametrize(
    ("queues", "waiting"), [(0, 50), (1, 50), (2, 50), (4, 25), (8, 12), (1_000, 12)]
)
def test_credit_is_due_later_while_other_queues_have_messages(queues: int, waiting: int) -> None:
    credit = begun()
    credit.receive(WINDOW, 10)
    assert credit.due_at(queues) == waiting
    assert not credit.offer(WINDOW - waiting - 1, 0, idle=False, queues=queues)
    assert credit.offer(WINDOW - waiting, 0, idle=False, queues=queues)


def test_queue_without_messages_gets_credit_whatever_others_have() -> None:
    credit = begun()
    credit.receive(WINDOW, 10)
    assert not credit.offer(60, 0, idle=False, queues=4)
    assert credit.offer(60, 0, idle=True, queues=4)
