"""Outputs: messages that name the message from which a transformer has made them.

A batch of outputs has an output head and a row for each message, big-endian, behind its extra keys.
The head says which queue the inputs are from, and under which token they are handled:

    at  size  field
     0     8  reset epoch of the input queue
     8     8  fencing token of its owner
    16     8  floor: committed offset of the input queue; inputs below it are never handled again
    24     8  topic id of the input queue
    32     4  its queue id
    36     1  length g of the group
    37     1  length b of the broker's name
    38     g  group, ASCII
           b  broker, ASCII

A row has 6 bytes for the offset of the input, counted from the floor, 2 bytes for the number of the
output among those of its input, and 8 bytes for the digest of the output.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from batonmq._core.records import OUTPUT_ROW_BYTES, Header, column_starts
from batonmq.errors import BadBatch

OUTPUTS_MAX = 1_024
"""Maximum number of outputs of one input."""
DEAD_LETTER_NUMBER = 0xFFFF
"""Number of the output that is the dead letter of its input."""
OFFSET_MAX = 1 << 48
"""Offsets of inputs are below it: offset and number of an output are one number of 64 bits."""
DIGEST_BYTES = 8
_HEAD = struct.Struct(">qqqqIBB")
_ROW = struct.Struct(">QQ")
_NUMBER_BITS = 16


@dataclass(slots=True)
class Output:
    """A message that a transformer makes of an input. Changes after it is returned have no effect.

    Attributes:
        body: Payload, at most 4 MiB.
        topic: Topic to which it goes, one of those that `Consumer.transform` names; empty if that
            names only one.
        tag: Filter tag; empty for none.
        keys: Index keys without spaces.
        properties: Names and values.
        ordering_key: Outputs with the same ordering key are stored in the order of their inputs,
            in one queue.
    """

    body: bytes
    topic: str = ""
    tag: str = ""
    keys: tuple[str, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    ordering_key: str | None = None


class OutputSource(NamedTuple):
    """The inputs of a batch of outputs: a queue, as one group reads it."""

    group: str
    topic_id: int
    broker: str
    queue_id: int

    def __str__(self) -> str:
        """Return the text for logs and errors."""
        return f"{self.group}:{self.topic_id}/{self.broker}/{self.queue_id}"


class OutputHead(NamedTuple):
    """What the outputs of a batch have in common.

    Attributes:
        floor: Committed offset of the input queue.
    """

    source: OutputSource
    reset_epoch: int
    token: int
    floor: int


class OutputRow(NamedTuple):
    """Which output a message is.

    Attributes:
        offset: Offset of the input.
        number: Number among the outputs of the input, from 0; `DEAD_LETTER_NUMBER` for its dead
            letter.
        digest: `digest_of` the message.
    """

    offset: int
    number: int
    digest: int


class OutputOrigin(NamedTuple):
    """The input from which a transformer has made a message.

    Attributes:
        offset: Offset of the input.
        number: See `OutputRow`.
    """

    source: OutputSource
    offset: int
    number: int


def digest_of(topic: str, record: bytes) -> int:
    """Return the digest of an encoded message to a topic, 64 bits."""
    return digests_of(topic, (record,))[0]


def digests_of(topic: str, records: Sequence[bytes]) -> list[int]:
    """Return the digest of each of several encoded messages to a topic."""
    prefix, number_of = topic.encode("ascii") + b"\0", int.from_bytes
    return [
        number_of(blake2b(prefix + record, digest_size=DIGEST_BYTES).digest(), "big")
        for record in records
    ]


def encode_head(head: OutputHead) -> bytes:
    """Return the output head of a batch."""
    source = head.source
    group, broker = source.group.encode("ascii"), source.broker.encode("ascii")
    return (
        _HEAD.pack(
            head.reset_epoch, head.token, head.floor, source.topic_id, source.queue_id,
            len(group), len(broker),
        )
        + group
        + broker
    )  # fmt: skip


def decode_head(raw: bytes) -> OutputHead:
    """Inverse of `encode_head`.

    Raises:
        BadBatch: These bytes are not an output head.
    """
    if len(raw) < _HEAD.size:
        raise _bad(f"an output head has {len(raw)} bytes")
    reset_epoch, token, floor, topic_id, queue_id, group_bytes, broker_bytes = _HEAD.unpack_from(
        raw
    )
    if len(raw) != _HEAD.size + group_bytes + broker_bytes:
        raise _bad("the names of an output head have other lengths than it says")
    if min(reset_epoch, floor, topic_id) < 0 or token < 1:
        raise _bad(f"reset epoch {reset_epoch}, token {token} or floor {floor} is too small")
    if floor >= OFFSET_MAX:
        raise _bad(f"floor {floor} is not below {OFFSET_MAX}")
    group, broker = _names(raw[_HEAD.size :], group_bytes)
    return OutputHead(OutputSource(group, topic_id, broker, queue_id), reset_epoch, token, floor)


@lru_cache(maxsize=4096)
def _names(raw: bytes, group_bytes: int) -> tuple[str, str]:
    try:
        text = raw.decode("ascii")
    except UnicodeDecodeError as error:
        raise _bad("a name in an output head is not ASCII") from error
    if not group_bytes or group_bytes == len(raw):
        raise _bad("an output head names no group or no broker")
    return text[:group_bytes], text[group_bytes:]


def row_key(offset: int, number: int) -> int:
    """Return the offset of an input and the number of an output as one number."""
    return offset << _NUMBER_BITS | number


def row_of(key: int, digest: int) -> OutputRow:
    """Return the row of a `row_key`."""
    return OutputRow(key >> _NUMBER_BITS, key & DEAD_LETTER_NUMBER, digest)


def encode_rows(keys: Sequence[int], digests: Sequence[int], floor: int) -> bytes:
    """Return the output rows of a batch.

    Args:
        keys: `row_key` of each output.
    """
    base, numbers = row_key(floor, 0), [0] * (2 * len(keys))
    numbers[::2] = [key - base for key in keys]
    numbers[1::2] = digests
    return struct.pack(f">{len(numbers)}Q", *numbers)


def head_of(batch: bytes | memoryview, header: Header) -> OutputHead:
    """Return the output head of a batch of outputs.

    Raises:
        BadBatch: The head is damaged.
    """
    at = column_starts(header).outputs
    return decode_head(bytes(batch[at : at + header.output_head_bytes]))


def origins_of(batch: bytes, header: Header) -> Sequence[OutputOrigin | None]:
    """Return the input of each message of a batch; None for messages that are not outputs.

    Raises:
        BadBatch: The head is damaged.
    """
    if not header.output_head_bytes:
        return [None] * header.count
    source = head_of(batch, header).source
    return [OutputOrigin(source, row.offset, row.number) for row in rows_of(batch, header)]


def rows_of(batch: bytes | memoryview, header: Header) -> Sequence[OutputRow]:
    """Return the output rows of a batch of outputs, without numpy.

    Raises:
        BadBatch: The head is damaged.
    """
    floor = head_of(batch, header).floor
    at = column_starts(header).outputs + header.output_head_bytes
    raw = bytes(batch[at : at + OUTPUT_ROW_BYTES * header.count])
    base = row_key(floor, 0)
    return [row_of(base + key, digest) for key, digest in _ROW.iter_unpack(raw)]


def _bad(problem: str) -> BadBatch:
    return BadBatch(problem, facts={"field": "outputs"})
