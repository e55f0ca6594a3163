"""Goal: frames between a program and its client process arrive whole, in pieces of any size.

Method: hypothesis cuts the stream.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq._kombu.frames import FRAME_BYTES_MAX, Frame, FrameDecoder, encode_frame
from batonmq.errors import InvalidArgument

FRAMES = st.lists(
    st.builds(Frame, st.dictionaries(st.text(), st.integers() | st.text()), st.binary()), max_size=5
)


@given(FRAMES, st.lists(st.integers(1, 40), min_size=1))
def test_frames_arrive_whole_in_pieces_of_any_size(frames: list[Frame], sizes: list[int]) -> None:
    stream = b"".join(encode_frame(frame.fields, frame.body) for frame in frames)
    decoder, arrived, at, turn = FrameDecoder(), list[Frame](), 0, 0
    while at < len(stream):
        size = sizes[turn % len(sizes)]
        arrived += decoder.feed(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert arrived == frames


def test_a_frame_that_is_too_large_is_refused_by_the_sender_and_the_receiver() -> None:
    with pytest.raises(InvalidArgument, match=r"16,777,2\d\d bytes"):
        encode_frame({}, bytes(FRAME_BYTES_MAX))
    with pytest.raises(InvalidArgument, match="bytes, more than"):
        list(FrameDecoder().feed(b"\xff" * 8))
