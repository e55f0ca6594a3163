"""Goal: a setting with which a client would do nothing, or something else, is refused at once.

Method: the settings of each client with one wrong value.
"""

from __future__ import annotations

from typing import Any

import pytest

from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.puller import PullerSettings
from batonmq._producer.producer_settings import ProducerSettings
from batonmq.errors import InvalidArgument


@pytest.mark.parametrize(
    ("kind", "field", "value", "choices"),
    [
        (ConsumerSettings, "consume_from", "latest", "first, last or timestamp"),
        (ConsumerSettings, "model", "broadcast", "clustering or broadcasting"),
        (ConsumerSettings, "exhausted", "drop", "dead_letter, skip or stop"),
        (PullerSettings, "consume_from", "latest", "last, first or timestamp"),
        (PullerSettings, "out_of_range", "first", "earliest, latest or error"),
    ],
)
def test_unknown_word_is_refused(kind: Any, field: str, value: str, choices: str) -> None:
    with pytest.raises(
        InvalidArgument, match=f"{field} must be {choices}, got '{value}'"
    ) as raised:
        kind(**{field: value})
    assert raised.value.facts == {"field": field}


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (ConsumerSettings, "concurrency"),
        (ConsumerSettings, "keep_alive_ms"),
        (PullerSettings, "prefetch_messages_max"),
        (ProducerSettings, "in_flight_requests_max"),
    ],
)
def test_limit_of_zero_is_refused(kind: Any, field: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{field} must be at least 1, got 0") as raised:
        kind(**{field: 0})
    assert raised.value.facts == {"field": field}
