"""The producers of a topic are asked in turn, and only while their streams are open."""

from __future__ import annotations

from batonmq_server.gateway.core.live_producers import PUBLISHED_MAX, LiveProducers
from batonmq_server.gateway.transaction_checks import producer_group


def test_producers_of_a_topic_are_asked_in_turn() -> None:
    producers: LiveProducers[str] = LiveProducers()
    for name in "ab":
        producers.open(name, f"stream {name}")
        assert producers.publish(name, ["orders"]) is (name == "a")
    assert [producers.in_turn("orders")[0] for _ in range(3)] == [
        "stream a",
        "stream b",
        "stream a",
    ]
    assert producers.in_turn("refunds") == []


def test_producer_without_a_stream_is_not_asked() -> None:
    producers: LiveProducers[str] = LiveProducers()
    assert producers.publish("a", ["orders"]) is False
    producers.open("a", "first")
    producers.publish("a", ["orders", "refunds"])
    producers.open("a", "second")
    producers.close("a", "first")
    assert producers.in_turn("orders") == ["second"], "the stream that replaced it counts"
    producers.close("a", "second")
    assert (producers.in_turn("orders"), list(producers.topics)) == ([], [])
    producers.close("a", "second")


def test_topics_of_one_producer_are_bounded() -> None:
    producers: LiveProducers[str] = LiveProducers()
    producers.open("a", "stream")
    producers.publish("a", [str(n) for n in range(PUBLISHED_MAX + 5)])
    assert len(list(producers.topics)) == PUBLISHED_MAX


def test_producer_group_of_a_topic_is_a_valid_name_also_for_the_longest_topic() -> None:
    assert producer_group("orders") == "rocketmq-orders"
    long, longer = producer_group("x" * 126), producer_group("x" * 127)
    assert long != longer
    assert max(len(long), len(longer)) <= 127
