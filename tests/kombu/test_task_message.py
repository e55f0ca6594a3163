"""Goal: a message of Kombu becomes a message that operators find, at its time.

Method: the function itself.
"""

from __future__ import annotations

from typing import Any

import pytest

from batonmq._kombu.task_message import EXPIRES_UNIX_MS, is_expired, task_message
from batonmq.errors import InvalidArgument


def _message(headers: dict[str, Any] | None = None, **properties: Any) -> dict[str, Any]:
    return {"body": "", "headers": headers, "properties": properties}


def test_a_task_is_found_by_its_name_and_its_id() -> None:
    sent = task_message(_message({"task": "shop.bill", "id": "7"}, priority=0), 0)
    assert (sent.tag, sent.keys, sent.properties, sent.at_unix_ms) == (
        "shop.bill",
        ("7",),
        {},
        None,
    )


def test_names_that_can_not_be_tags_or_keys_are_left_out() -> None:
    sent = task_message(_message({"task": "two words", "id": "a b"}), 0)
    assert (sent.tag, sent.keys) == ("", ())
    assert task_message(_message(None, correlation_id="c"), 0).keys == ("c",)


@pytest.mark.parametrize(
    "eta",
    [
        "2026-01-02T03:04:05.678000+00:00",
        "2026-01-02T05:04:05.678+02:00",
        "2026-01-02T03:04:05.678",
    ],
)
def test_an_eta_is_the_time_of_delivery(eta: str) -> None:
    assert task_message(_message({"eta": eta}), 0).at_unix_ms == 1_767_323_045_678


def test_an_eta_that_is_no_time_is_left_to_the_worker() -> None:
    assert task_message(_message({"eta": "soon"}), 0).at_unix_ms is None


def test_an_expiration_counts_from_now() -> None:
    assert task_message(_message(expiration="500"), 1_000).properties == {EXPIRES_UNIX_MS: "1500"}


def test_a_priority_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="has priority 5, but a queue is a log"):
        task_message(_message(priority=5), 0)


@pytest.mark.parametrize(
    ("text", "expired"),
    [
        ("1500", True),
        ("1501", False),
        ("", False),
        ("-1", False),
        ("²", False),
        ("9" * 5_000, False),
    ],
)
def test_a_stored_expiration_of_any_text_ends_no_worker(text: str, expired: bool) -> None:
    assert is_expired({EXPIRES_UNIX_MS: text}, 1_500) is expired
    assert not is_expired({}, 1_500)
