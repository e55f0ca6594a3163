"""The batch format: the bytes of messages on the wire, in the log and in a pull response.

A batch belongs to one queue. The producer encodes it once; storage writes only the stamp in the
header. Two checksums make that possible: the producer's covers everything that the producer wrote,
storage's covers the stamp. docs/reference/format.md has the same table in prose.

All numbers are big-endian.

    at  size  field
     0     4  magic "BTN1"
     4     2  version, 1
     6     2  reserved, 0
     8     4  length of the whole batch, bytes
    12     4  CRC-32C of [16, 52): the stamp                    storage
    16     8  physical position of byte 0 in the log            storage
    24     8  queue offset of the first record                  storage
    32     8  store time, Unix milliseconds                     storage
    40     4  owner: digest of the producer's identity, or 0    storage
    44     4  topic id                                          storage
    48     4  epoch of the leader                               storage
    52     4  CRC-32C of [56, length)                           producer
    56     8  producer id, 0 for none                           producer
    64     4  producer epoch
    68     4  sequence of the first record, per producer and queue
    72     8  creation time of the batch, Unix milliseconds
    80     4  queue id
    84     4  record count n, at least 1
    88     4  extra key count k
    92     2  topic length t, bytes
    94     2  flags; bits 0-3 compression of the records (0 none, 1 LZ4, 2 Zstandard); bits 4-15
              length of the output head h, bytes; 0 if the messages are not outputs
    96     t  topic, ASCII
           4n lengths of the records, bytes
           4n tag hashes: Java String.hashCode of the tag, 0 without tag
           4n key hashes: CRC-32 of the first key, 0 without key
           8k extra keys: record index, CRC-32 of the key
            h output head, and then for each record 16 bytes: see `batonmq._core.outputs`
              records, compressed together as one LZ4 block or one Zstandard frame, or plain

Lengths are those of the records before compression, and so are all limits. A Zstandard frame
states the size of its content; with LZ4 the size is the sum of the lengths.

A record is: 2 keys length, 2 tag length, 4 properties length, then keys (separated by one
space), tag, properties (name 0x01 value 0x02, repeated), body; all text UTF-8.

This module needs no numpy. `batonmq._columns.batch_columns` reads the columns of large batches with
numpy, for storage and for Spark.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, chain, repeat
from typing import Any, NamedTuple, TypeVar

from batonmq._core.checksum import crc32c
from batonmq._core.compression import Compression, RecordCompressor
from batonmq.errors import BadBatch, BadChecksum, InvalidArgument, LimitExceeded

MAGIC = 0x42544E31
VERSION = 1
HEADER = struct.Struct(">IHHIIqqqIIIIqIIqIIIHH")
HEADER_BYTES = HEADER.size
_TOPIC_BYTES = struct.Struct(">H")
LENGTH_AT, TOPIC_BYTES_AT = 8, HEADER_BYTES - 4
STAMP = struct.Struct(">qqqIII")
STAMP_FROM, STAMP_TO, BODY_FROM = 16, 52, 56
RECORD = struct.Struct(">HHI")
BARE = RECORD.pack(0, 0, 0)
"""The head of a record that has only a body."""

BATCH_BYTES_MAX = 8 * 1024 * 1024
BODY_BYTES_MAX = 4 * 1024 * 1024
PROPERTIES_BYTES_MAX = 32 * 1024
"""Limit of the properties that a producer attaches."""
STORED_PROPERTIES_BYTES_MAX = PROPERTIES_BYTES_MAX + 16 * 1024
"""Limit with the properties that are added to a message sent to a retry topic, to the dead letters,
or back from there."""
KEYS_BYTES_MAX = 1024
TAG_BYTES_MAX = 127
TOPIC_BYTES_MAX = 127
RECORDS_MAX = 65_535
_PART_LIMITS = {
    "keys": KEYS_BYTES_MAX,
    "tag": TAG_BYTES_MAX,
    "properties": STORED_PROPERTIES_BYTES_MAX,
    "body": BODY_BYTES_MAX,
}
"""Limits of the parts of a record, in bytes."""
_COMPRESSIONS = {int(one): one for one in Compression}
_COMPRESSION_MASK, _OUTPUT_HEAD_SHIFT = 0xF, 4
OUTPUT_HEAD_BYTES = range(40, 229)
"""Possible lengths of an output head: the names of group and broker have 2 to 190 characters."""
OUTPUT_ROW_BYTES = 16
EXTRA_KEY_BYTES = 8
_NO_COMPRESSION = RecordCompressor()

Raw = TypeVar("Raw", bytes, memoryview, bytes | memoryview)


@dataclass(slots=True)
class Message:
    """A message to send. Changes made after the call of `send` have no effect.

    Attributes:
        body: Payload, at most 4 MiB.
        tag: Filter tag, at most 127 bytes of UTF-8 without white space or `|`; empty for none.
        keys: Index keys without spaces, at most 1,024 bytes together.
        properties: Names and values without 0x01 and 0x02, at most 32 KiB together.
    """

    body: bytes
    tag: str = ""
    keys: tuple[str, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed part of a batch and its topic; the fields are those of the table above."""

    length: int
    position: int
    first_offset: int
    store_unix_ms: int
    topic_id: int
    epoch: int
    producer_id: int
    producer_epoch: int
    sequence: int
    born_unix_ms: int
    queue_id: int
    count: int
    extra_key_count: int
    topic: str
    compression: Compression = Compression.NONE
    owner: int = 0
    checksum: int = 0
    output_head_bytes: int = 0

    @property
    def output_bytes(self) -> int:
        """Bytes of the output head and the output rows; 0 if the messages are not outputs."""
        head_bytes = self.output_head_bytes
        return head_bytes + OUTPUT_ROW_BYTES * self.count if head_bytes else 0

    @property
    def next_offset(self) -> int:
        """Queue offset after the last record."""
        return self.first_offset + self.count


@lru_cache(maxsize=4096)
def tag_hash(tag: str) -> int:
    """Return Java's String.hashCode of `tag`, a signed 32-bit number; 0 for the empty tag.

    Source: RocketMQ MessageExtBrokerInner.tagsString2tagsCode.
    """
    value = 0
    raw = tag.encode("utf-16-be", "surrogatepass")
    for (unit,) in struct.iter_unpack(">H", raw):
        value = (31 * value + unit) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


@lru_cache(maxsize=4096)
def check_tag(tag: str) -> str:
    """Return what makes the non-empty `tag` invalid; an empty string if it is valid."""
    length = len(tag.encode("utf-8", "surrogatepass"))
    if length > TAG_BYTES_MAX:
        return f"a tag has {length} bytes; the limit is {TAG_BYTES_MAX}"
    if not tag.isprintable() or " " in tag or "|" in tag:
        return f"tag {tag!r} contains white space, '|' or a character that is not printable"
    return ""


def key_hash(key: str) -> int:
    """Return the unsigned CRC-32 of the key; 0 stands for "no key", so a CRC of 0 becomes 1."""
    return zlib.crc32(key.encode()) or 1


def checked_keys(keys: Sequence[str]) -> tuple[str, ...]:
    """Return the keys of a message.

    Raises:
        InvalidArgument: They are one text, whose characters would be the keys.
    """
    if isinstance(keys, str):
        raise InvalidArgument(
            f"keys must be a sequence of texts, got {keys!r}",
            remedy=f"Give a list: keys=[{keys!r}].",
            facts={"field": "keys"},
        )
    return tuple(keys)


def encode_properties(
    properties: Mapping[str, str], bytes_max: int = PROPERTIES_BYTES_MAX
) -> bytes:
    """Return properties encoded as in RocketMQ: name 0x01 value 0x02, repeated.

    Raises:
        BadBatch: A name is empty, or a name or value contains 0x01, 0x02 or a surrogate.
        LimitExceeded: The encoded properties are longer than `bytes_max`.
    """
    for name, value in properties.items():
        if not name or any(c in name or c in value for c in "\x01\x02"):
            raise BadBatch(
                f"property name {name!r} is empty, or it or its value contains 0x01 or 0x02",
                remedy="Use names that are not empty, and no 0x01 or 0x02 in names and values.",
                facts={"field": "properties"},
            )
    try:
        raw = "".join(f"{name}\x01{value}\x02" for name, value in properties.items()).encode()
    except UnicodeEncodeError as error:
        raise _not_text(error, "properties") from error
    check_limit("properties", len(raw), bytes_max)
    return raw


def _not_text(error: UnicodeEncodeError, field: str) -> BadBatch:
    return BadBatch(
        f"{field} can't be encoded in UTF-8: {error.object[error.start : error.end]!a}",
        remedy="Decode the bytes with their real encoding before they become part of a message.",
        facts={"field": field},
    )


def decode_properties(raw: bytes) -> dict[str, str]:
    """Inverse of `encode_properties`; a missing last separator is accepted."""
    pairs = (item.partition("\x01") for item in raw.decode("utf-8", "replace").split("\x02"))
    return {name: value for name, mark, value in pairs if mark}


def encode_record(message: Message, *, properties_bytes_max: int = PROPERTIES_BYTES_MAX) -> bytes:
    """Return `message` encoded as one record.

    Args:
        properties_bytes_max: Limit of the encoded properties; larger than the default for messages
            to which the client adds properties.

    Raises:
        LimitExceeded: Keys, tag, properties or body are too long.
        BadBatch: A key, the tag or a property is empty or contains a separator or a surrogate.
        InvalidArgument: A part has a wrong type.
    """
    try:
        check_limit("body", len(message.body), BODY_BYTES_MAX)
        if not (message.keys or message.tag or message.properties):
            return BARE + message.body
        try:
            keys = " ".join(message.keys).encode()
            tag = message.tag.encode()
        except UnicodeEncodeError as error:
            raise _not_text(error, "keys or tag") from error
        if message.keys and (b"" in keys.split(b" ") or len(keys.split()) != len(message.keys)):
            raise BadBatch(
                "a key is empty or contains white space",
                remedy="Use non-empty keys without white space.",
                facts={"field": "keys"},
            )
        check_limit("tag", len(tag), TAG_BYTES_MAX)
        if tag and (problem := check_tag(message.tag)):
            raise BadBatch(
                problem,
                remedy="Use a tag without white space and without '|'.",
                facts={"field": "tag"},
            )
        properties = b""
        if message.properties:
            properties = encode_properties(message.properties, properties_bytes_max)
        check_limit("keys", len(keys), KEYS_BYTES_MAX)
        head = RECORD.pack(len(keys), len(tag), len(properties))
        return b"".join((head, keys, tag, properties, message.body))
    except (TypeError, AttributeError) as error:
        raise _wrong_type(message) from error


def _wrong_type(message: Message) -> InvalidArgument:
    """Return the error of a message with a part of a wrong type."""
    properties: Any = message.properties
    items = properties.items() if isinstance(properties, Mapping) else [(properties, "")]
    parts: list[tuple[str, type, Any]] = [
        ("body", bytes, message.body),
        ("tag", str, message.tag),
        *(("keys", str, key) for key in message.keys or ()),
        *(("properties", str, part) for item in items for part in item),
    ]
    for field_name, wanted, part in parts:
        if not isinstance(part, wanted):
            return InvalidArgument(
                f"{field_name} must be {wanted.__name__}, got {type(part).__name__}",
                remedy="Encode a body: text.encode(). Make texts of tags, keys and properties.",
                facts={"field": field_name},
            )
    return InvalidArgument("the message has a part of a wrong type")


def bare_record(body: bytes) -> bytes:
    """Return a message with nothing but a body, encoded as one record.

    Raises:
        LimitExceeded: The body is too long.
    """
    check_limit("body", len(body), BODY_BYTES_MAX)
    return BARE + body


def encode_bodies(
    bodies: Sequence[bytes], tag: str = "", keys: Sequence[str] = (), properties: bytes = b""
) -> list[bytes]:
    """Return one record per body, each with the same valid tag and, if there are keys, its own key.

    Without keys this costs much less per message than `encode_record`.

    Args:
        properties: Encoded properties of every message.
    """
    tail = tag.encode() + properties
    tag_bytes, properties_bytes = len(tail) - len(properties), len(properties)
    if not keys:
        head = RECORD.pack(0, tag_bytes, properties_bytes) + tail
        return [head + body for body in bodies]
    return [
        b"".join((RECORD.pack(len(raw), tag_bytes, properties_bytes), raw, tail, body))
        for body, raw in zip(bodies, [key.encode() for key in keys], strict=True)
    ]


class BatchBuilder:
    """Collects the messages of one queue and encodes them as one batch.

    Attributes:
        bytes_count: Size of the records before compression and of their columns.
        count: Number of messages.
    """

    __slots__ = (
        "_compressor", "_extra_keys", "_key_hashes", "_records", "_tag_hashes", "bytes_count",
        "count",
    )  # fmt: skip

    def __init__(self, compressor: RecordCompressor = _NO_COMPRESSION) -> None:
        self._compressor = compressor
        self._records: list[bytes] = []
        self._tag_hashes: list[int] = []
        self._key_hashes: list[int] = []
        self._extra_keys: list[tuple[int, int]] = []
        self.bytes_count = self.count = 0

    def add(self, message: Message, record: bytes) -> int:
        """Add `message`, which `encode_record` encoded as `record`; return its index."""
        index, keys = self.count, message.keys
        if len(keys) > 1:
            self._extra_keys += [(index, key_hash(key)) for key in keys[1:]]
            self.bytes_count += EXTRA_KEY_BYTES * (len(keys) - 1)
        self._records.append(record)
        self._tag_hashes.append(tag_hash(message.tag) if message.tag else 0)
        self._key_hashes.append(key_hash(keys[0]) if keys else 0)
        self.bytes_count += len(record) + 12
        self.count = index + 1
        return index

    def add_many(self, records: Sequence[bytes], tag: str = "", keys: Sequence[str] = ()) -> int:
        """Add the records that `encode_bodies` returned; return the index of the first."""
        index = self.count
        self._records += records
        self._tag_hashes += [tag_hash(tag)] * len(records)
        self._key_hashes += [key_hash(key) if key else 0 for key in keys] or [0] * len(records)
        self.bytes_count += sum(map(len, records)) + 12 * len(records)
        self.count = index + len(records)
        return index

    def messages(self) -> Iterator[tuple[Message, bytes]]:
        """Yield each added message and its encoded record, in order."""
        for record in self._records:
            keys_bytes, tag_bytes, properties_bytes = RECORD.unpack_from(record)
            tag_at = RECORD.size + keys_bytes
            properties_at = tag_at + tag_bytes
            body_at = properties_at + properties_bytes
            keys = record[RECORD.size : tag_at].decode()
            message = Message(
                record[body_at:],
                record[tag_at:properties_at].decode(),
                tuple(keys.split(" ")) if keys else (),
                decode_properties(record[properties_at:body_at]),
            )
            yield message, record

    def encode(
        self,
        *,
        topic: str,
        queue_id: int,
        producer: tuple[int, int] = (0, 0),
        sequence: int = 0,
        born_unix_ms: int = 0,
        outputs: tuple[bytes, bytes] = (b"", b""),
    ) -> bytes:
        """Return the batch without a stamp: the fields that storage writes are zero.

        Args:
            producer: Producer id and epoch.
            sequence: Sequence of the first message, per producer and queue.
            outputs: Output head and output rows, if the messages are outputs.
        """
        if not self.count:
            raise BadBatch("the batch has no record", facts={"field": "count"})
        name = topic.encode("ascii")
        count = self.count
        outputs_bytes = sum(map(len, outputs))
        check_limit(
            "batch", HEADER_BYTES + len(name) + self.bytes_count + outputs_bytes, BATCH_BYTES_MAX
        )
        compression, records = Compression.NONE, self._records
        if self._compressor.compression:
            compression, compressed = self._compressor.compress(b"".join(self._records))
            records = [compressed]
        body = b"".join(
            (
                name,
                struct.pack(f">{count}I", *map(len, self._records)),
                struct.pack(f">{count}i", *self._tag_hashes),
                struct.pack(f">{count}I", *self._key_hashes),
                struct.pack(
                    f">{2 * len(self._extra_keys)}I", *chain.from_iterable(self._extra_keys)
                ),
                *outputs,
                *records,
            )
        )
        length = HEADER_BYTES + len(body)
        flags = int(compression) | len(outputs[0]) << _OUTPUT_HEAD_SHIFT
        head = bytearray(
            HEADER.pack(
                MAGIC, VERSION, 0, length, 0, 0, 0, 0, 0, 0, 0, 0, *producer, sequence,
                born_unix_ms, queue_id, count, len(self._extra_keys), len(name), flags,
            )
        )  # fmt: skip
        crc = crc32c(body, crc32c(head[BODY_FROM:]))
        struct.pack_into(">I", head, STAMP_TO, crc)
        return bytes(head) + body


def read_header(batch: bytes | memoryview) -> Header:
    """Return the header of the batch that starts at byte 0, without comparing checksums.

    Raises:
        BadBatch: The bytes are not a batch of a known version, or its lengths are impossible.
    """
    if len(batch) < HEADER_BYTES:
        raise BadBatch(
            f"{len(batch)} bytes are fewer than the {HEADER_BYTES} of a header",
            facts={"field": "length"},
        )
    (
        magic, version, reserved, length, _, position, first_offset, store_unix_ms, owner, topic_id,
        epoch, checksum, producer_id, producer_epoch, sequence, born_unix_ms, queue_id, count,
        extra_key_count, topic_bytes, flags,
    ) = HEADER.unpack_from(batch)  # fmt: skip
    if magic != MAGIC or version != VERSION or reserved:
        raise BadBatch(
            f"not a batch of version {VERSION}: magic {magic:#x}, version {version}, "
            f"reserved {reserved}",
            facts={"field": "magic"},
        )
    compression = _COMPRESSIONS.get(flags & _COMPRESSION_MASK)
    output_head_bytes = flags >> _OUTPUT_HEAD_SHIFT
    known = not output_head_bytes or output_head_bytes in OUTPUT_HEAD_BYTES
    if compression is None or not known:
        raise BadBatch(f"unknown flags {flags:#x}", facts={"field": "flags"})
    columns = HEADER_BYTES + topic_bytes + 12 * count + 8 * extra_key_count
    if output_head_bytes:
        columns += output_head_bytes + OUTPUT_ROW_BYTES * count
    records_min = 1 if compression else RECORD.size * count
    if not 1 <= count <= RECORDS_MAX or columns + records_min > length:
        raise BadBatch(
            f"a batch of {length} bytes can't have {count} records", facts={"field": "count"}
        )
    topic = bytes(batch[HEADER_BYTES : HEADER_BYTES + topic_bytes]).decode("ascii", "replace")
    return Header(
        length, position, first_offset, store_unix_ms, topic_id, epoch, producer_id,
        producer_epoch, sequence, born_unix_ms, queue_id, count, extra_key_count, topic,
        compression, owner, checksum, output_head_bytes,
    )  # fmt: skip


def read_topic(batch: bytes) -> str:
    """Return only the topic of the batch, as `read_header` reads it.

    Raises:
        BadBatch: The bytes are fewer than a header.
    """
    if len(batch) < HEADER_BYTES:
        raise BadBatch(
            f"{len(batch)} bytes are fewer than the {HEADER_BYTES} of a header",
            facts={"field": "length"},
        )
    (topic_bytes,) = _TOPIC_BYTES.unpack_from(batch, TOPIC_BYTES_AT)
    return batch[HEADER_BYTES : HEADER_BYTES + topic_bytes].decode("ascii", "replace")


def check_batch(batch: bytes | memoryview, *, stamped: bool) -> Header:
    """Return the header of `batch` after every check that needs no state of a queue.

    Args:
        stamped: Whether the batch has storage's stamp, which is then checked too.

    Raises:
        BadBatch: Lengths, magic, version or a column are wrong.
        BadChecksum: A checksum is wrong.
        LimitExceeded: The batch, or keys, tag, properties or body of a record, are too long.
    """
    header = check_frame(batch, stamped=stamped)
    check_columns(batch, header)
    return header


def check_frame(batch: bytes | memoryview, *, stamped: bool) -> Header:
    """Return the header of `batch` after the checks of `check_batch` but those of the columns."""
    check_limit("batch", len(batch), BATCH_BYTES_MAX)
    header = read_header(batch)
    if header.length != len(batch):
        raise BadBatch(
            f"length {header.length} in a batch of {len(batch)} bytes", facts={"field": "length"}
        )
    if stamped:
        check_stamp(batch)
    check_body(batch)
    return header


def check_stamp(batch: bytes | memoryview) -> None:
    """Compare the checksum of storage's stamp.

    Raises:
        BadChecksum: The checksum is wrong.
    """
    _check_crc(batch, 12, STAMP_FROM, STAMP_TO)


def check_body(batch: bytes | memoryview) -> None:
    """Compare the checksum of everything that the producer wrote.

    Raises:
        BadChecksum: The checksum is wrong.
    """
    _check_crc(batch, STAMP_TO, BODY_FROM, len(batch))


def stamped_head(  # noqa: PLR0913  keyword-only from the position on
    batch: bytes | memoryview,
    *,
    position: int,
    first_offset: int,
    store_unix_ms: int,
    topic_id: int,
    epoch: int,
    owner: int = 0,
) -> bytes:
    """Return bytes [0, 56) of `batch` with storage's stamp; the other bytes do not change."""
    written = STAMP.pack(position, first_offset, store_unix_ms, owner, topic_id, epoch)
    crc = crc32c(written).to_bytes(4, "big")
    return b"".join((batch[:12], crc, written, batch[STAMP_TO:BODY_FROM]))


class Record(NamedTuple):
    """One record of a batch, decoded."""

    offset: int
    tag: str
    keys: tuple[str, ...]
    properties: Mapping[str, str]
    body: bytes


def record_lengths(batch: bytes | memoryview, header: Header) -> tuple[int, ...]:
    """Return the length of each record, before compression, in bytes."""
    return struct.unpack_from(f">{header.count}I", batch, HEADER_BYTES + len(header.topic))


def tag_hashes(batch: bytes | memoryview, header: Header) -> tuple[int, ...]:
    """Return the tag hash of each record; 0 for a record without a tag."""
    return struct.unpack_from(f">{header.count}i", batch, column_starts(header).tags)


def record_section(batch: bytes, header: Header) -> bytes:
    """Return the records, one behind the other, decompressed.

    Raises:
        BadBatch: The records can't be decompressed, or their size is not the sum of the lengths.
        LimitExceeded: The batch would be longer than 8 MiB after decompression.
    """
    records, begin = locate_records(batch, header, sum(record_lengths(batch, header)))
    return bytes(records[begin:])


def decode_records(batch: bytes, header: Header, indexes: Sequence[int]) -> Iterator[Record]:
    """Decode the records at `indexes` (0-based within the batch, ascending), one by one.

    Raises:
        BadBatch: As `decode_record` and `record_section`.
        LimitExceeded: As `record_section`.
    """
    lengths = record_lengths(batch, header)
    section, records_at = locate_records(batch, header, sum(lengths))
    begins = tuple(accumulate(lengths, initial=records_at))
    for index in indexes:
        yield decode_record(section, begins[index], begins[index + 1], header.first_offset + index)


def decode_record(section: bytes, begin: int, end: int, offset: int) -> Record:
    """Decode the record at [begin, end) of `section`.

    Bytes that are not UTF-8 become U+FFFD: a malformed message must not stop its queue.

    Raises:
        BadBatch: The record's inner lengths are wrong.
    """
    keys_bytes, tag_bytes, properties_bytes = RECORD.unpack_from(section, begin)
    keys_at = begin + RECORD.size
    tag_at = keys_at + keys_bytes
    properties_at = tag_at + tag_bytes
    body_at = properties_at + properties_bytes
    if body_at > end:
        raise BadBatch(f"record of offset {offset} is truncated", facts={"field": "record"})
    return Record(
        offset,
        section[tag_at:properties_at].decode("utf-8", "replace") if tag_bytes else "",
        tuple(section[keys_at:tag_at].decode("utf-8", "replace").split(" ")) if keys_bytes else (),
        decode_properties(section[properties_at:body_at]) if properties_bytes else {},
        section[body_at:end],
    )


class ColumnStarts(NamedTuple):
    """Byte positions in a batch at which its columns begin."""

    lengths: int
    tags: int
    keys: int
    extra_keys: int
    outputs: int


def column_starts(header: Header) -> ColumnStarts:
    """Return where the columns of a batch begin."""
    lengths, size = HEADER_BYTES + len(header.topic), 4 * header.count
    extra_keys = lengths + 3 * size
    outputs = extra_keys + 8 * header.extra_key_count
    return ColumnStarts(lengths, lengths + size, lengths + 2 * size, extra_keys, outputs)


def locate_records(batch: Raw, header: Header, size: int) -> tuple[Raw | bytes, int]:
    """Return the bytes that contain the records, and where the records begin in them.

    The bytes are those of the batch, without a copy, unless the records are compressed.

    Args:
        size: Sum of the lengths of the records.
    """
    records_at = HEADER_BYTES + len(header.topic) + 12 * header.count + 8 * header.extra_key_count
    if header.output_head_bytes:
        records_at += header.output_bytes
    if not header.compression:
        return batch, records_at
    check_limit("batch", records_at + size, BATCH_BYTES_MAX)
    compressed = memoryview(batch)[records_at : header.length]
    from batonmq._core.codecs import decompress  # noqa: PLC0415  slow to import, and often unused

    return decompress(header.compression, compressed, size), 0


def check_columns(batch: bytes | memoryview, header: Header) -> None:
    """Compare the columns with the heads of the records; see `check_batch`."""
    lengths = record_lengths(batch, header)
    size = sum(lengths)
    records, begin = locate_records(batch, header, size)
    check_lengths(min(lengths), begin + size, len(records))
    begins = accumulate(lengths[:-1], initial=begin)
    heads = map(RECORD.unpack_from, repeat(records), begins)
    # Most batches have few different sizes, so the set leaves little to compare one by one.
    parts = [(*head, size - sum(head)) for size, head in set(zip(lengths, heads, strict=True))]
    largest = parts[0] if len(parts) == 1 else tuple(map(max, zip(*parts, strict=True)))
    bodies_min = min([part[-1] for part in parts])
    check_part_sizes(bodies_min - RECORD.size, *largest[:3], largest[3] - RECORD.size)
    if header.extra_key_count:
        extra = struct.unpack_from(
            f">{2 * header.extra_key_count}I", batch, column_starts(header).extra_keys
        )
        check_extra_keys(max(extra[::2]), header)


def check_lengths(shortest: int, end: int, records_end: int) -> None:
    """Raise BadBatch if a record is shorter than its head, or if `end` is not `records_end`."""
    if shortest < RECORD.size:
        raise BadBatch("a record is shorter than its head", facts={"field": "lengths"})
    if end != records_end:
        raise BadBatch("record lengths do not add up to the batch", facts={"field": "lengths"})


def check_part_sizes(bodies_min: int, *largest: int) -> None:
    """Check the sizes of the parts of all records.

    Args:
        bodies_min: Size of the smallest body; negative if the other parts do not fit.
        largest: Largest keys, tag, properties and body.

    Raises:
        BadBatch: A body has a negative size.
        LimitExceeded: A part is too long.
    """
    if bodies_min < 0:
        raise BadBatch("a record is truncated", facts={"field": "record"})
    for field_name, actual in zip(_PART_LIMITS, largest, strict=True):
        if actual > _PART_LIMITS[field_name]:
            check_limit(field_name, actual, _PART_LIMITS[field_name])


def check_extra_keys(largest_index: int, header: Header) -> None:
    """Raise BadBatch if the batch has no record at `largest_index` of the extra keys."""
    if largest_index >= header.count:
        raise BadBatch(
            f"an extra key names record {largest_index} of {header.count}",
            facts={"field": "extra_keys"},
        )


def check_limit(field_name: str, actual: int, limit: int) -> None:
    """Raise LimitExceeded if a field has more than `limit` bytes."""
    if actual > limit:
        raise LimitExceeded(
            f"{field_name} has {actual} bytes; the limit is {limit}",
            remedy=f"Send a {field_name} of {limit} bytes at most.",
            facts={"field": field_name, "limit": limit, "actual": actual},
        )


def _check_crc(batch: bytes | memoryview, written_at: int, begin: int, end: int) -> None:
    """Compare the checksum at `written_at` with that of [begin, end), without a copy."""
    expected = int.from_bytes(batch[written_at : written_at + 4], "big")
    actual = crc32c(memoryview(batch)[begin:end])
    if expected != actual:
        raise BadChecksum(
            f"the checksum is {actual:#010x}, the batch says {expected:#010x}",
            facts={"expected": expected, "actual": actual},
        )
