"""Many messages of one topic as columns, for `Producer.send_many`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

from batonmq._core.ordering_key import ORDERING_KEY, check_ordering_key
from batonmq._core.records import (
    BODY_BYTES_MAX,
    KEYS_BYTES_MAX,
    RECORD,
    TAG_BYTES_MAX,
    check_limit,
    check_tag,
    encode_bodies,
    encode_properties,
)
from batonmq.errors import BadBatch, InvalidArgument

COLUMN_BYTES = 12
"""Bytes of the columns of a batch per message."""


@runtime_checkable
class ArrowColumn(Protocol):
    """An Arrow array, or a column of a table."""

    def to_pylist(self) -> list[Any]:
        """Return the values."""
        ...


Bodies = Sequence[bytes] | ArrowColumn
Keys = Sequence[str] | ArrowColumn


class MessageColumns:
    """Messages with a common tag and, each, at most one key.

    Args:
        bodies: Bodies: a sequence of bytes, or a binary or string column of Arrow.
        tag: Tag of every message; empty for none.
        keys: One key per message, empty for none; an empty sequence for no keys at all.
        ordering_key: Ordering key of every message; None for none.

    Raises:
        InvalidArgument: A body is not bytes, or there are not as many keys as bodies.
        BadBatch, LimitExceeded: The tag, a key or a body is not valid.
    """

    def __init__(
        self, bodies: Bodies, tag: str = "", keys: Keys = (), ordering_key: str | None = None
    ) -> None:
        self._bodies, self._keys = _checked_bodies(_listed(bodies)), _listed(keys)
        self._tag = tag
        self._properties = b""
        self._fixed_bytes = RECORD.size + COLUMN_BYTES + len(_checked_tag(tag))
        if ordering_key is not None:
            self.add_properties({ORDERING_KEY: check_ordering_key(ordering_key)})
        if self._keys:
            _check_keys(self._keys, len(self._bodies))

    def __len__(self) -> int:
        return len(self._bodies)

    def add_properties(self, properties: Mapping[str, str]) -> None:
        """Add properties to every message."""
        added = encode_properties(properties)
        self._properties += added
        self._fixed_bytes += len(added)

    def piece(self, begin: int, bytes_max: int, count_max: int) -> MessagePiece:
        """Return the messages from `begin` on that fit into one batch; at least one."""
        bodies = self._bodies[begin : begin + count_max]
        keys = self._keys[begin : begin + count_max]
        fixed_bytes = self._fixed_bytes
        sizes = (
            [
                fixed_bytes + len(body) + 4 * len(key)  # a character of UTF-8 has at most 4 bytes
                for body, key in zip(bodies, keys, strict=True)
            ]
            if keys
            else [fixed_bytes + len(body) for body in bodies]
        )
        if sum(sizes) > bytes_max:
            count = max(1, bisect_right(list(accumulate(sizes)), bytes_max))
            bodies, keys = bodies[:count], keys[:count]
        records = encode_bodies(bodies, self._tag, keys, self._properties)
        return MessagePiece(records, self._tag, keys)


class MessagePiece:
    """Consecutive messages, encoded, that fit into one batch.

    Attributes:
        size: Bytes of the records and of their columns.
    """

    __slots__ = ("keys", "records", "size", "tag")

    def __init__(self, records: Sequence[bytes], tag: str, keys: Sequence[str]) -> None:
        self.records, self.tag, self.keys = records, tag, keys
        self.size = sum(map(len, records)) + COLUMN_BYTES * len(records)


def _listed(column: Sequence[Any] | ArrowColumn) -> Sequence[Any]:
    return column.to_pylist() if isinstance(column, ArrowColumn) else column


def _checked_bodies(bodies: Sequence[Any]) -> Sequence[bytes]:
    kinds = set(map(type, bodies))
    if kinds == {str}:  # a string column
        bodies = [body.encode() for body in bodies]
    elif kinds - {bytes}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds - {bytes}))
        raise InvalidArgument(
            f"bodies must be bytes, some are {names}",
            remedy="Pass a sequence of bytes, or a binary column without nulls.",
            facts={"field": "bodies"},
        )
    check_limit("body", max(map(len, bodies), default=0), BODY_BYTES_MAX)
    return bodies


def _checked_tag(tag: str) -> bytes:
    if tag and (problem := check_tag(tag)):
        raise BadBatch(
            problem, remedy="Use a tag without white space and without '|'.", facts={"field": "tag"}
        )
    raw = tag.encode()
    check_limit("tag", len(raw), TAG_BYTES_MAX)
    return raw


def _check_keys(keys: Sequence[str], count: int) -> None:
    if len(keys) != count:
        raise InvalidArgument(
            f"{count} bodies have {len(keys)} keys",
            remedy="Pass one key per body; an empty string for a message without a key.",
            facts={"field": "keys"},
        )
    if set(map(type, keys)) != {str}:
        raise InvalidArgument("keys must be str", facts={"field": "keys"})
    named = [key for key in keys if key]
    try:
        joined = " ".join(named).encode()
    except UnicodeEncodeError as error:
        raise BadBatch(
            f"a key can't be encoded in UTF-8: {error}", facts={"field": "keys"}
        ) from error
    if len(joined.split()) != len(named):
        raise BadBatch(
            "a key contains white space",
            remedy="Use keys without white space.",
            facts={"field": "keys"},
        )
    longest = max(map(len, joined.split()), default=0)
    check_limit("keys", longest, KEYS_BYTES_MAX)
