"""Frames between a program with Kombu and its client process: a JSON object and bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from batonmq.errors import InvalidArgument

_LENGTHS = struct.Struct("!II")
FRAME_BYTES_MAX = 16 * 1024 * 1024
"""Bytes of one frame, at most: a message has 4 MiB at most."""


class Frame(NamedTuple):
    """One frame.

    Attributes:
        fields: A JSON object.
        body: Bytes that belong to it.
    """

    fields: dict[str, Any]
    body: bytes


def encode_frame(fields: dict[str, Any], body: bytes = b"") -> bytes:
    """Return a frame as bytes.

    Raises:
        InvalidArgument: The frame is too large.
    """
    head = json.dumps(fields, separators=(",", ":")).encode()
    _check_size(len(head) + len(body))
    return b"".join((_LENGTHS.pack(len(head), len(body)), head, body))


class FrameDecoder:
    """Decodes a stream of bytes, which arrive in pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add bytes; yield the frames that are complete now.

        Raises:
            InvalidArgument: A frame is too large.
        """
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _LENGTHS.size:
            head_bytes, body_bytes = _LENGTHS.unpack_from(buffer)
            _check_size(head_bytes + body_bytes)
            head_end = _LENGTHS.size + head_bytes
            end = head_end + body_bytes
            if len(buffer) < end:
                return
            frame = Frame(
                json.loads(buffer[_LENGTHS.size : head_end]),
                bytes(memoryview(buffer)[head_end:end]),
            )
            del buffer[:end]
            yield frame


def _check_size(size: int) -> None:
    if size > FRAME_BYTES_MAX:
        raise InvalidArgument(
            f"the message has {size:,} bytes, more than {FRAME_BYTES_MAX:,}",
            remedy="Store large values elsewhere and pass a reference in the task.",
            facts={"field": "body"},
        )
