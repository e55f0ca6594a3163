"""Goal: the ordering key of a message survives the way from producer to consumer, and is checked.

Method: encoded properties, also with keys that look like parts of other properties; Hypothesis
compares the fast search with the decoder.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq._core.ordering_key import (
    ORDERING_KEY,
    ORDERING_KEY_BYTES_MAX,
    find_ordering_key,
    with_ordering_key,
)
from batonmq._core.records import Message, decode_properties, encode_properties
from batonmq.errors import BadBatch, LimitExceeded

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x01\x02"), max_size=6)
NAMES = st.one_of(
    TEXT.filter(bool),
    st.just(ORDERING_KEY),
    st.just(f"x{ORDERING_KEY}"),
    st.just(f"{ORDERING_KEY}x"),
)


@given(st.dictionaries(NAMES, st.one_of(TEXT, st.just(ORDERING_KEY)), max_size=5))
def test_key_is_found_as_the_decoder_finds_it(properties: dict[str, str]) -> None:
    raw = encode_properties(properties)
    assert find_ordering_key(raw) == decode_properties(raw).get(ORDERING_KEY)


@given(st.binary(max_size=80))
def test_any_bytes_have_the_key_that_the_decoder_finds(noise: bytes) -> None:
    raw = noise + f"\x02{ORDERING_KEY}\x01a\x02".encode() + noise
    assert find_ordering_key(raw) == decode_properties(raw).get(ORDERING_KEY)


@pytest.mark.parametrize("key", ["", "account 7", "ключ", "x" * ORDERING_KEY_BYTES_MAX])
def test_key_is_stored_beside_the_properties(key: str) -> None:
    message = Message(b"body", "tag", ("k",), {"a": "b"})
    stored = with_ordering_key(message, key)
    assert (stored.body, stored.tag, stored.keys) == (b"body", "tag", ("k",))
    assert stored.properties == {"a": "b", ORDERING_KEY: key}
    assert message.properties == {"a": "b"}, "the application's message is not changed"


def test_message_without_a_key_is_not_changed() -> None:
    message = Message(b"body", properties={"a": "b"})
    assert with_ordering_key(message, None) is message


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ("x" * (ORDERING_KEY_BYTES_MAX + 1), LimitExceeded),
        ("é" * (ORDERING_KEY_BYTES_MAX // 2 + 1), LimitExceeded),
        ("a\x01b", BadBatch),
        ("a\x02b", BadBatch),
        ("\ud800", BadBatch),
    ],
)
def test_invalid_key_is_refused(key: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="ordering_key"):
        with_ordering_key(Message(b""), key)
