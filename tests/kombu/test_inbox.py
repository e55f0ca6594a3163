"""Goal: what arrives wakes a reader that blocks, and an event loop by a descriptor.

Method: threads and select.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator

import pytest

from batonmq._kombu.inbox import Delivery, Inbox

ONE, TWO = Delivery(1, 1, False, b"one"), Delivery(2, 2, False, b"two")


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    inbox = Inbox()
    yield inbox
    inbox.close()


def _readable(inbox: Inbox) -> bool:
    return bool(select.select([inbox], [], [], 0)[0])


def test_the_descriptor_is_readable_while_something_waits(inbox: Inbox) -> None:
    assert not _readable(inbox)
    inbox.put(ONE)
    inbox.put(TWO)
    assert inbox.take(0) == ONE
    assert _readable(inbox)
    assert inbox.take(0) == TWO
    assert not _readable(inbox)
    assert inbox.take(0) is None


def test_a_reader_that_blocks_is_woken(inbox: Inbox) -> None:
    threading.Timer(0.05, inbox.put, (ONE,)).start()
    assert inbox.take(30) == ONE


def test_what_a_cancelled_consumer_has_not_received_is_taken_back(inbox: Inbox) -> None:
    inbox.put(ONE)
    inbox.put(TWO)
    assert inbox.remove(lambda one: one.consumer == 1) == [ONE]
    assert inbox.remove(lambda one: one.consumer == 2) == [TWO]
    assert not _readable(inbox)


def test_an_error_follows_what_waits(inbox: Inbox) -> None:
    inbox.put(ONE)
    inbox.fail(ConnectionError("gone"))
    assert inbox.take(0) == ONE
    assert _readable(inbox)
    for _ in range(2):
        with pytest.raises(ConnectionError, match="gone"):
            inbox.take(30)


def test_a_closed_inbox_takes_nothing() -> None:
    inbox = Inbox()
    inbox.close()
    inbox.close()
    assert not inbox.put(ONE)
