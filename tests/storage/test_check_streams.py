"""Goal: a transaction is asked of each stream of its group by turns, also if one never answers."""

from __future__ import annotations

import pytest

from batonmq.errors import Overloaded
from batonmq_server.storage.core import check_streams
from batonmq_server.storage.core.check_streams import CheckStream, CheckStreams

GROUP, TOPIC = "shop", "orders"


def _open(streams: CheckStreams[str], topic: str = TOPIC) -> CheckStream[str]:
    return streams.open(GROUP, lambda asked: asked == topic, lambda: None)


@pytest.mark.parametrize("transactions", [1, 2, 3, 4])
def test_each_stream_gets_some_checks_of_each_transaction(transactions: int) -> None:
    streams = CheckStreams[str]()
    opened = [_open(streams) for _ in range(2)]
    for check in range(1, 11):
        for transaction in range(transactions):
            assert streams.ask(GROUP, TOPIC, f"{transaction}", transaction + check)
    for stream in opened:
        found = stream.take()
        assert {name: found.count(name) for name in found} == {
            f"{transaction}": 5 for transaction in range(transactions)
        }


def test_stream_that_may_not_be_asked_is_left_out() -> None:
    streams = CheckStreams[str]()
    other, asked = _open(streams, "another"), _open(streams)
    assert all(streams.ask(GROUP, TOPIC, "check", turn) for turn in range(4))
    assert (other.take(), len(asked.take())) == ([], 4)
    assert not streams.ask(GROUP, "a third", "check", 0)
    assert not streams.ask("another group", TOPIC, "check", 0)


def test_streams_that_may_not_be_asked_take_no_turns() -> None:
    streams = CheckStreams[str]()
    answers = _open(streams)
    others = [_open(streams, "another") for _ in range(14)]
    hangs = _open(streams)
    for turn in range(1_000, 1_015):
        assert streams.ask(GROUP, TOPIC, "check", turn)
    assert sorted((len(answers.take()), len(hangs.take()))) == [7, 8]
    assert not any(other.take() for other in others)


def test_full_stream_gets_no_check_while_another_one_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check_streams, "WAITING_MAX", 2)
    streams = CheckStreams[str]()
    hangs, answers = _open(streams), _open(streams)
    for turn in range(10):
        assert streams.ask(GROUP, TOPIC, "check", turn)
        answers.take()
    assert len(hangs.waiting) == 2


def test_checks_of_a_closed_stream_go_to_another_one() -> None:
    streams = CheckStreams[str]()
    first, second = _open(streams), _open(streams)
    assert streams.ask(GROUP, TOPIC, "check", 0)
    streams.close(first)
    assert (first.take(), second.take()) == ([], ["check"])
    streams.close(second)
    assert (len(streams), streams.count(GROUP)) == (0, 0)


def test_full_streams_and_too_many_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_streams, "STREAMS_MAX", 1)
    monkeypatch.setattr(check_streams, "WAITING_MAX", 2)
    streams = CheckStreams[str]()
    stream = _open(streams)
    with pytest.raises(Overloaded):
        _open(streams)
    assert streams.with_room() == {GROUP}
    for turn in range(2):
        assert streams.ask(GROUP, TOPIC, "check", turn)
    assert streams.with_room() == set()
    stream.take()
    assert streams.with_room() == {GROUP}


def test_stream_with_many_bytes_gets_no_check_until_they_are_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check_streams, "WAITING_BYTES_MAX", 100)
    streams = CheckStreams[str]()
    hangs, answers = _open(streams), _open(streams)
    for turn in range(10):
        assert streams.ask(GROUP, TOPIC, "check", turn, 60)
        answers.take()
    assert len(hangs.waiting) == 2
    assert streams.with_room() == {GROUP}
    streams.close(answers)
    assert streams.with_room() == set()
    assert hangs.take() == ["check"] * 2
    assert streams.with_room() == {GROUP}
