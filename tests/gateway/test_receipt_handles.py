"""A handle is accepted as it was written, and in no other form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq_server.gateway.core.receipt_handles import BadHandle, ReceiptHandle, ReceiptSigner

KEY = bytes(range(32))
NAMES = st.text("ABCxyz019_-%", min_size=1, max_size=127)
NUMBERS = st.integers(0, 1 << 62)
HANDLES = st.builds(
    ReceiptHandle, NAMES, NAMES, NAMES, NAMES, st.integers(0, 65_535), *[NUMBERS] * 5
)
HANDLE = ReceiptHandle("gateway-0", "billing", "orders", "broker-0", 3, 17, 5, 99, 1, 1_700)


@given(HANDLES)
def test_handle_is_read_as_it_was_written(handle: ReceiptHandle) -> None:
    signer = ReceiptSigner(KEY)
    assert signer.read(signer.write(handle)) == handle


@given(st.data())
def test_handle_with_any_character_changed_is_rejected(data: st.DataObject) -> None:
    signer = ReceiptSigner(KEY)
    text = signer.write(HANDLE)
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from("ABCabc019-_=+/ é").filter(lambda one: one != text[at]))
    with pytest.raises(BadHandle):
        signer.read(text[:at] + other + text[at + 1 :])


@given(st.text(max_size=300))
def test_arbitrary_text_is_rejected(text: str) -> None:
    with pytest.raises(BadHandle):
        ReceiptSigner(KEY).read(text)


def test_handle_of_another_key_is_rejected() -> None:
    with pytest.raises(BadHandle, match="not signed"):
        ReceiptSigner(KEY).read(ReceiptSigner(KEY[::-1]).write(HANDLE))


def test_handle_with_added_characters_is_rejected() -> None:
    signer = ReceiptSigner(KEY)
    for changed in (signer.write(HANDLE) + "\n", " " + signer.write(HANDLE), "A" * 5_000, ""):
        with pytest.raises(BadHandle):
            signer.read(changed)
