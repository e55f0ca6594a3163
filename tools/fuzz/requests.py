"""Arbitrary requests of a method, drawn from a seeded generator.

A request is one of four kinds: a message with arbitrary fields; a message whose names exist in the
cluster; the bytes of such a message, damaged; arbitrary bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_DEPTH_MAX = 4
_REPEATED_MAX = 4
_LONG_TEXT = "x" * 70_000
_INTEGER_BITS = (1, 7, 8, 16, 31, 32, 63)
_TEXTS = (
    "", " ", "a", "a/b", "../..", "%RETRY%a", "\x00", "\n", "\u202e", "\U0001f600", "TAG = 'x'",
    "127.0.0.1:1", "x" * 64, "x" * 256, _LONG_TEXT,
)  # fmt: skip
_WHOLE: dict[int, tuple[int, int]] = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_SFIXED32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_SFIXED64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_SINT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_SINT64: (-(2**63), 2**63 - 1),
}


class RequestGenerator:
    """Draws requests.

    Args:
        random: Source of all choices: the same seed gives the same requests.
        names: Names that exist in the cluster: topics, groups, brokers and clients.
    """

    def __init__(self, random: Random, names: Sequence[str]) -> None:
        self._random = random
        self._names = names

    def request(self, kind: Descriptor) -> bytes:
        """Return the bytes of a request, which need not be a message of this kind."""
        random = self._random
        share = random.random()
        if share < 0.1:
            return random.randbytes(random.choice((0, 1, 7, 300, 5_000)))
        encoded = self.message(kind, existing=share > 0.4).SerializeToString()
        return self._damage(encoded) if share > 0.85 else encoded

    def message(self, kind: Descriptor, *, existing: bool, depth: int = 0) -> Message:
        """Return a message with arbitrary fields, valid for Protobuf.

        Args:
            existing: Whether most texts are names that exist.
        """
        message = GetMessageClass(kind)()
        for field in kind.fields:
            nested = field.message_type
            if self._random.random() < 0.2 or (nested is not None and depth >= _DEPTH_MAX):
                continue
            count = self._random.randint(0, _REPEATED_MAX)
            if nested is None and field.is_repeated:
                values = [self._scalar(field, existing=existing) for _ in range(count)]
                getattr(message, field.name).extend(values)
            elif nested is None:
                setattr(message, field.name, self._scalar(field, existing=existing))
            elif nested.GetOptions().map_entry:
                self._fill_map(message, field.name, nested, existing=existing, depth=depth)
            elif field.is_repeated:
                for _ in range(count):
                    item = self.message(nested, existing=existing, depth=depth + 1)
                    getattr(message, field.name).append(item)
            else:
                item = self.message(nested, existing=existing, depth=depth + 1)
                getattr(message, field.name).CopyFrom(item)
        return message

    def _fill_map(
        self, message: Message, name: str, entry: Descriptor, *, existing: bool, depth: int
    ) -> None:
        entries = getattr(message, name)
        key, value = entry.fields
        for _ in range(self._random.randint(0, _REPEATED_MAX)):
            drawn = self._scalar(key, existing=existing)
            if value.message_type is None:
                entries[drawn] = self._scalar(value, existing=existing)
            else:
                item = self.message(value.message_type, existing=existing, depth=depth + 1)
                entries[drawn].CopyFrom(item)

    def _scalar(self, field: FieldDescriptor, *, existing: bool) -> object:
        random = self._random
        if field.type in _WHOLE:
            return self._whole(*_WHOLE[field.type])
        scalars: dict[int, Callable[[], object]] = {
            FieldDescriptor.TYPE_BOOL: lambda: random.random() < 0.5,
            FieldDescriptor.TYPE_STRING: lambda: self._text(existing=existing),
            FieldDescriptor.TYPE_BYTES: lambda: random.randbytes(random.choice((0, 1, 40, 2_000))),
            FieldDescriptor.TYPE_ENUM: lambda: random.choice((0, 1, 2, 3, 99)),
        }
        return scalars.get(field.type, self._fraction)()

    def _whole(self, least: int, greatest: int) -> int:
        """Return a small integer, an extreme one, or one of any size."""
        random = self._random
        share = random.random()
        if share < 0.5:
            return random.randint(max(least, -1), 3)
        if share < 0.7:
            return random.choice((least, greatest))
        value = random.getrandbits(random.choice(_INTEGER_BITS))
        return min(max(value, least), greatest)

    def _fraction(self) -> float:
        return self._random.choice((0.0, -1.0, 0.5, 1e300, float("nan"), float("inf")))

    def _text(self, *, existing: bool) -> str:
        if existing and self._random.random() < 0.9:
            return self._random.choice(self._names)
        return self._random.choice(_TEXTS)

    def _damage(self, encoded: bytes) -> bytes:
        """Return the bytes with one bit flipped, cut off, or with other bytes inserted."""
        random = self._random
        if not encoded:
            return b"\xff"
        index = random.randrange(len(encoded))
        head, rest = encoded[:index], encoded[index:]
        return random.choice(
            (
                head + bytes([rest[0] ^ 1 << random.randrange(8)]) + rest[1:],
                head,
                head + random.randbytes(random.randint(1, 20)) + rest,
            )
        )
