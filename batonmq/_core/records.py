"""The batch: how messages stand on the wire, in the log and in a pull response, byte for byte.

A batch belongs to one queue. It is encoded once, by the producer; storage stamps the head of
the header and touches nothing else. Two checksums make that possible: the producer's covers
everything it wrote, storage's covers the stamp. docs/format.md has the same table in prose.

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
    40     8  topic id                                          storage
    48     4  epoch of the leader                               storage
    52     4  CRC-32C of [56, length)                           producer
    56     8  producer id, 0 for none                           producer
    64     4  producer epoch
    68     4  sequence of the first record, per producer and queue
    72     8  born time of the batch, Unix milliseconds
    80     4  queue id
    84     4  record count n, at least 1
    88     4  extra key count k
    92     2  topic length t, bytes
    94     2  flags; bits 0-3 compression of the records (0 none, 1 LZ4, 2 Zstandard), others 0
    96     t  topic, ASCII
           4n lengths of the records, bytes
           4n tag hashes: Java String.hashCode of the tag, 0 without tag
           4n key hashes: CRC-32 of the first key, 0 without key
           8k extra keys: record index, CRC-32 of the key
              records, together one LZ4 block or one Zstandard frame if they are compressed

Lengths are those of the records before compression, and so are all limits. A Zstandard frame
names its content's size; with LZ4 it is the sum of the lengths.

A record is: 2 keys length, 2 tag length, 4 properties length, then keys (separated by one
space), tag, properties (name 0x01 value 0x02, repeated), body; all text UTF-8.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

import google_crc32c
import numpy as np
import numpy.typing as npt

from batonmq._core.compression import Compression, RecordCompressor, decompress
from batonmq.errors import BadBatch, BadChecksum, LimitExceeded

MAGIC = 0x42544E31
VERSION = 1
HEADER = struct.Struct(">IHHIIqqqqIIqIIqIIIHH")
HEADER_BYTES = HEADER.size
_TOPIC_BYTES, _TOPIC_BYTES_AT = struct.Struct(">H"), HEADER_BYTES - 4
STAMP = struct.Struct(">qqqqI")
STAMP_FROM, STAMP_TO, BODY_FROM = 16, 52, 56
RECORD = struct.Struct(">HHI")
_BARE = RECORD.pack(0, 0, 0)

BATCH_BYTES_MAX = 8 * 1024 * 1024
BODY_BYTES_MAX = 4 * 1024 * 1024
PROPERTIES_BYTES_MAX = 32 * 1024
"""Of what a producer attaches."""
STORED_PROPERTIES_BYTES_MAX = PROPERTIES_BYTES_MAX + 16 * 1024
"""With what is added to a message that is sent back, or sent again."""
KEYS_BYTES_MAX = 1024
TAG_BYTES_MAX = 127
TOPIC_BYTES_MAX = 127
RECORDS_MAX = 65_535
_LIMITED = ("keys", "tag", "properties", "body")
_LIMITS = (KEYS_BYTES_MAX, TAG_BYTES_MAX, STORED_PROPERTIES_BYTES_MAX, BODY_BYTES_MAX)
_COMPRESSIONS = {int(one): one for one in Compression}
_FEW = 40
"""Up to so many records a loop is faster than numpy."""

Raw = TypeVar("Raw", bytes, memoryview, bytes | memoryview)
Int64Array = npt.NDArray[np.int64]
_PLAIN = RecordCompressor()
_NO_KEYS = (np.empty(0, np.uint16), np.empty(0, np.uint32))


@dataclass(slots=True)
class Message:
    """A message as a producer hands it over; what is changed afterwards is not sent.

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
    """The fixed part of a batch and its topic; field names as in the table above."""

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

    @property
    def next_offset(self) -> int:
        """One past the queue offset of the last record."""
        return self.first_offset + self.count


@lru_cache(maxsize=4096)
def tag_hash(tag: str) -> int:
    """Java's String.hashCode of `tag`, a signed 32-bit number; 0 for the empty tag.

    Source: RocketMQ MessageExtBrokerInner.tagsString2tagsCode.
    """
    value = 0
    raw = tag.encode("utf-16-be", "surrogatepass")
    for (unit,) in struct.iter_unpack(">H", raw):
        value = (31 * value + unit) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


@lru_cache(maxsize=4096)
def check_tag(tag: str) -> str:
    """Why `tag`, which is not empty, can't be a tag; empty if it can."""
    length = len(tag.encode("utf-8", "surrogatepass"))
    if length > TAG_BYTES_MAX:
        return f"a tag has {length} bytes; the limit is {TAG_BYTES_MAX}"
    if not tag.isprintable() or " " in tag or "|" in tag:
        return f"tag {tag!r} holds white space, '|' or a character that can't be shown"
    return ""


def key_hash(key: str) -> int:
    """CRC-32 of the key, unsigned; 0 is kept for "no key" and becomes 1."""
    return zlib.crc32(key.encode()) or 1


def encode_properties(
    properties: Mapping[str, str], bytes_max: int = PROPERTIES_BYTES_MAX
) -> bytes:
    """Properties as RocketMQ writes them: name 0x01 value 0x02, repeated.

    Raises:
        BadBatch: a name or value holds a separator.
        LimitExceeded: they are longer than `bytes_max`.
    """
    for name, value in properties.items():
        if not name or any(c in name or c in value for c in "\x01\x02"):
            raise BadBatch(
                f"property {name!r} is empty or holds 0x01 or 0x02",
                remedy="Use names and values without these two characters.",
                facts={"field": "properties"},
            )
    raw = "".join(f"{name}\x01{value}\x02" for name, value in properties.items()).encode()
    _limit("properties", len(raw), bytes_max)
    return raw


def decode_properties(raw: bytes) -> dict[str, str]:
    """Inverse of `encode_properties`; a missing last separator is accepted."""
    pairs = (item.partition("\x01") for item in raw.decode("utf-8", "replace").split("\x02"))
    return {name: value for name, mark, value in pairs if mark}


def encode_record(message: Message, *, properties_bytes_max: int = PROPERTIES_BYTES_MAX) -> bytes:
    """One record of a batch.

    Args:
        properties_bytes_max: More than a producer may attach, where something is added to that.

    Raises:
        LimitExceeded: keys, tag, properties or body are too long.
        BadBatch: a key, the tag or a property holds a separator.
    """
    _limit("body", len(message.body), BODY_BYTES_MAX)
    if not (message.keys or message.tag or message.properties):
        return _BARE + message.body
    keys = " ".join(message.keys).encode()
    tag = message.tag.encode()
    if message.keys and (b"" in keys.split(b" ") or len(keys.split()) != len(message.keys)):
        raise BadBatch(
            "a key is empty or holds white space",
            remedy="Use keys without white space.",
            facts={"field": "keys"},
        )
    _limit("tag", len(tag), TAG_BYTES_MAX)
    if tag and (problem := check_tag(message.tag)):
        raise BadBatch(
            problem, remedy="Use a tag without white space and '|'.", facts={"field": "tag"}
        )
    properties = b""
    if message.properties:
        properties = encode_properties(message.properties, properties_bytes_max)
    _limit("keys", len(keys), KEYS_BYTES_MAX)
    head = RECORD.pack(len(keys), len(tag), len(properties))
    return b"".join((head, keys, tag, properties, message.body))


class BatchBuilder:
    """Collects the messages of one queue and encodes them as one batch.

    Args:
        packing: Whether and how the records are compressed.
    """

    __slots__ = (
        "_extra_keys", "_key_hashes", "_packing", "_records", "_tag_hashes", "bytes_count", "count",
    )  # fmt: skip

    def __init__(self, packing: RecordCompressor = _PLAIN) -> None:
        self._packing = packing
        self._records: list[bytes] = []
        self._tag_hashes: list[int] = []
        self._key_hashes: list[int] = []
        self._extra_keys: list[tuple[int, int]] = []
        self.bytes_count = self.count = 0

    def add(self, message: Message, record: bytes) -> int:
        """Add `message`, already encoded as `record` by `encode_record`; its index."""
        index, keys = self.count, message.keys
        if len(keys) > 1:
            self._extra_keys += [(index, key_hash(key)) for key in keys[1:]]
        self._records.append(record)
        self._tag_hashes.append(tag_hash(message.tag) if message.tag else 0)
        self._key_hashes.append(key_hash(keys[0]) if keys else 0)
        self.bytes_count += len(record) + 12
        self.count = index + 1
        return index

    def messages(self) -> Iterator[tuple[Message, bytes]]:
        """What was added, in order: each message, and the record that it is encoded as."""
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
    ) -> bytes:
        """The batch, unstamped: everything that storage writes is zero.

        Args:
            producer: Producer id and epoch.
            sequence: Sequence of the first message within (producer, queue).
        """
        if not self.count:
            raise BadBatch("a batch needs at least one record", facts={"field": "count"})
        name = topic.encode("ascii")
        count = self.count
        columns_bytes = 12 * count + 8 * len(self._extra_keys)
        records_bytes = self.bytes_count - 12 * count
        _limit("batch", HEADER_BYTES + len(name) + columns_bytes + records_bytes, BATCH_BYTES_MAX)
        compression, records = Compression.NONE, self._records
        if self._packing.compression:
            compression, packed = self._packing.pack(b"".join(self._records))
            records = [packed]
        body = b"".join(
            (
                name,
                struct.pack(f">{count}I", *map(len, self._records)),
                struct.pack(f">{count}i", *self._tag_hashes),
                struct.pack(f">{count}I", *self._key_hashes),
                np.array(self._extra_keys, ">u4").tobytes() if self._extra_keys else b"",
                *records,
            )
        )
        length = HEADER_BYTES + len(body)
        head = bytearray(
            HEADER.pack(
                MAGIC, VERSION, 0, length, 0, 0, 0, 0, 0, 0, 0, *producer, sequence,
                born_unix_ms, queue_id, count, len(self._extra_keys), len(name), compression,
            )
        )  # fmt: skip
        crc = google_crc32c.extend(google_crc32c.value(bytes(head[BODY_FROM:])), body)
        struct.pack_into(">I", head, STAMP_TO, crc)
        return bytes(head) + body


def read_header(batch: bytes | memoryview) -> Header:
    """The header of the batch that starts at byte 0; no checksum is looked at.

    Raises:
        BadBatch: these bytes are not a batch of a version that is known, or its lengths can't be.
    """
    if len(batch) < HEADER_BYTES:
        raise BadBatch(f"{len(batch)} bytes are less than a header", facts={"field": "length"})
    (
        magic, version, reserved, length, _, position, first_offset, store_unix_ms, topic_id, epoch,
        _, producer_id, producer_epoch, sequence, born_unix_ms, queue_id, count, extra_key_count,
        topic_bytes, flags,
    ) = HEADER.unpack_from(batch)  # fmt: skip
    if magic != MAGIC or version != VERSION or reserved:
        raise BadBatch(f"magic {magic:#x} version {version}", facts={"field": "magic"})
    if flags not in _COMPRESSIONS:
        raise BadBatch(f"unknown flags {flags:#x}", facts={"field": "flags"})
    columns = HEADER_BYTES + topic_bytes + 12 * count + 8 * extra_key_count
    records_min = 1 if flags else RECORD.size * count
    if not 1 <= count <= RECORDS_MAX or columns + records_min > length:
        raise BadBatch(f"{count} records can't fit into {length} bytes", facts={"field": "count"})
    topic = bytes(batch[HEADER_BYTES : HEADER_BYTES + topic_bytes]).decode("ascii", "replace")
    return Header(
        length, position, first_offset, store_unix_ms, topic_id, epoch, producer_id,
        producer_epoch, sequence, born_unix_ms, queue_id, count, extra_key_count, topic,
        _COMPRESSIONS[flags],
    )  # fmt: skip


def read_topic(batch: bytes) -> str:
    """The topic alone, as `read_header` reads it.

    Raises:
        BadBatch: the bytes are fewer than a header.
    """
    if len(batch) < HEADER_BYTES:
        raise BadBatch(f"{len(batch)} bytes are less than a header", facts={"field": "length"})
    (topic_bytes,) = _TOPIC_BYTES.unpack_from(batch, _TOPIC_BYTES_AT)
    return batch[HEADER_BYTES : HEADER_BYTES + topic_bytes].decode("ascii", "replace")


def check_batch(batch: bytes | memoryview, *, stamped: bool) -> Header:
    """The header of `batch`, after every check that does not need the state of a queue.

    Args:
        stamped: Whether storage's stamp is there and has to be right.

    Raises:
        BadBatch: lengths, magic, version or a column are wrong.
        BadChecksum: a checksum is wrong.
        LimitExceeded: the batch, or keys, tag, properties or body of a record, are too long.
    """
    _limit("batch", len(batch), BATCH_BYTES_MAX)
    header = read_header(batch)
    if header.length != len(batch):
        raise BadBatch(
            f"length {header.length} in a batch of {len(batch)} bytes", facts={"field": "length"}
        )
    if stamped:
        check_stamp(batch)
    check_body(batch)
    _check_columns(batch, header)
    return header


def check_stamp(batch: bytes | memoryview) -> None:
    """Compare the checksum of storage's stamp.

    Raises:
        BadChecksum: it is wrong.
    """
    _check_crc(batch, 12, STAMP_FROM, STAMP_TO)


def check_body(batch: bytes | memoryview) -> None:
    """Compare the checksum of what the producer wrote.

    Raises:
        BadChecksum: it is wrong.
    """
    _check_crc(batch, STAMP_TO, BODY_FROM, len(batch))


def stamped_head(
    batch: bytes | memoryview,
    *,
    position: int,
    first_offset: int,
    store_unix_ms: int,
    topic_id: int,
    epoch: int,
) -> bytes:
    """Bytes [0, 56) of `batch` with storage's stamp; the rest of the batch stays as it is."""
    written = STAMP.pack(position, first_offset, store_unix_ms, topic_id, epoch)
    crc = google_crc32c.value(written).to_bytes(4, "big")
    return b"".join((batch[:12], crc, written, batch[STAMP_TO:BODY_FROM]))


def tag_hashes(batch: bytes | memoryview, header: Header) -> npt.NDArray[np.int32]:
    """The tag-hash column: shape (count,), big-endian signed 32 bit, a view of `batch`."""
    return np.frombuffer(batch, ">i4", header.count, _columns_at(header)[1])


def key_hashes(
    batch: bytes | memoryview, header: Header
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint32]]:
    """Every key of a batch: index of its record and its hash, first keys before extra keys."""
    _, _, keys_at, extra_at, _ = _columns_at(header)
    column = np.frombuffer(batch, ">u4", header.count, keys_at)
    if not column.any():  # no message has a key
        return _NO_KEYS
    indexes = column.nonzero()[0]
    hashes = column[indexes]
    if header.extra_key_count:
        extra = np.frombuffer(batch, ">u4", 2 * header.extra_key_count, extra_at)
        indexes = np.concatenate((indexes, extra[::2]))
        hashes = np.concatenate((hashes, extra[1::2]))
    return indexes.astype(np.uint16), hashes.astype(np.uint32)


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a batch, decoded."""

    offset: int
    tag: str
    keys: tuple[str, ...]
    properties: Mapping[str, str]
    body: bytes


def record_lengths(batch: bytes | memoryview, header: Header) -> Int64Array:
    """Lengths of the records, bytes: shape (count,)."""
    return np.frombuffer(batch, ">u4", header.count, _columns_at(header)[0]).astype(np.int64)


def record_section(batch: bytes, header: Header) -> bytes:
    """The records, one behind the other; unpacked if the batch has them compressed.

    Raises:
        BadBatch: they can't be unpacked, or their size is not that of the lengths.
        LimitExceeded: the batch would be longer than 8 MiB with them.
    """
    records, begin = _records(batch, header)
    return bytes(records[begin:])


def decode_records(batch: bytes, header: Header, indexes: Sequence[int]) -> Iterator[Record]:
    """Decode the records at `indexes` (0-based within the batch, ascending), one by one.

    Text that is not UTF-8 comes with U+FFFD in it: nobody may stop a queue with it.

    Raises:
        BadBatch: a record's inner lengths are wrong, or `record_section` can't be had.
    """
    section, records_at = _records(batch, header)
    lengths = record_lengths(batch, header)
    ends_array = np.cumsum(lengths) + records_at
    begins, ends = (ends_array - lengths).tolist(), ends_array.tolist()
    unpack_from = RECORD.unpack_from
    for index in indexes:
        begin, end = begins[index], ends[index]
        keys_bytes, tag_bytes, properties_bytes = unpack_from(section, begin)
        keys_at = begin + RECORD.size
        tag_at = keys_at + keys_bytes
        properties_at = tag_at + tag_bytes
        body_at = properties_at + properties_bytes
        if body_at > end:
            raise BadBatch(f"record {index} is cut short", facts={"field": "record"})
        yield Record(
            header.first_offset + index,
            section[tag_at:properties_at].decode("utf-8", "replace") if tag_bytes else "",
            tuple(section[keys_at:tag_at].decode("utf-8", "replace").split(" "))
            if keys_bytes
            else (),
            decode_properties(section[properties_at:body_at]) if properties_bytes else {},
            section[body_at:end],
        )


def _columns_at(header: Header) -> tuple[int, int, int, int, int]:
    lengths_at = HEADER_BYTES + len(header.topic)
    tags_at = lengths_at + 4 * header.count
    keys_at = tags_at + 4 * header.count
    extra_at = keys_at + 4 * header.count
    return lengths_at, tags_at, keys_at, extra_at, extra_at + 8 * header.extra_key_count


def _records(batch: Raw, header: Header) -> tuple[Raw | bytes, int]:
    """Bytes that hold the records, and where these begin in them: a copy only if compressed."""
    records_at = _columns_at(header)[4]
    if not header.compression:
        return batch, records_at
    size = int(record_lengths(batch, header).sum())
    _limit("batch", records_at + size, BATCH_BYTES_MAX)
    packed = memoryview(batch)[records_at : header.length]
    return decompress(header.compression, packed, size), 0


def _check_columns(batch: bytes | memoryview, header: Header) -> None:
    """Compare the columns with the heads of the records."""
    _, _, _, extra_at, _ = _columns_at(header)
    extremes = _extremes_of_few if header.count <= _FEW else _extremes_of_many
    bodies_min, *maxima = extremes(batch, header)
    if bodies_min < 0:
        raise BadBatch("a record is cut short", facts={"field": "record"})
    for field_name, actual, limit in zip(_LIMITED, maxima, _LIMITS, strict=True):
        _limit(field_name, actual, limit)
    if header.extra_key_count:
        extra = np.frombuffer(batch, ">u4", 2 * header.extra_key_count, extra_at)[::2]
        if int(extra.max()) >= header.count:
            raise BadBatch("an extra key belongs to no record", facts={"field": "extra_keys"})


def _extremes_of_few(batch: bytes | memoryview, header: Header) -> tuple[int, ...]:
    """Smallest body, then the greatest of each of `_LIMITED`, in bytes."""
    lengths = struct.unpack_from(f">{header.count}I", batch, _columns_at(header)[0])
    records, begin = _records(batch, header)
    _check_lengths(min(lengths), begin + sum(lengths), len(records))
    heads, bodies = [], []
    for length in lengths:
        head = RECORD.unpack_from(records, begin)
        heads.append(head)
        bodies.append(length - RECORD.size - sum(head))
        begin += length
    return min(bodies), *map(max, *heads, (0, 0, 0)), max(bodies)


def _extremes_of_many(batch: bytes | memoryview, header: Header) -> tuple[int, ...]:
    """As `_extremes_of_few`, for all records at once."""
    lengths = record_lengths(batch, header)
    records, begin = _records(batch, header)
    ends = lengths.cumsum()
    shortest, longest = int(lengths.min()), int(lengths.max())
    _check_lengths(shortest, begin + int(ends[-1]), len(records))
    at_every_byte = np.ndarray((len(records) - begin - 7,), np.uint64, records, begin, (1,))
    heads = at_every_byte[ends - lengths]
    if not heads.any():  # nothing but bodies
        return shortest - RECORD.size, 0, 0, 0, longest - RECORD.size
    heads = heads.view(">u8").astype(np.int64)
    keys, tags, properties = heads >> 48 & 0xFFFF, heads >> 32 & 0xFFFF, heads & 0xFFFFFFFF
    bodies = lengths - keys - tags - properties - RECORD.size
    columns = (keys, tags, properties, bodies)
    return int(bodies.min()), *(int(column.max()) for column in columns)


def _check_lengths(shortest: int, end: int, records_end: int) -> None:
    if shortest < RECORD.size:
        raise BadBatch("a record is shorter than its head", facts={"field": "lengths"})
    if end != records_end:
        raise BadBatch("record lengths do not add up to the batch", facts={"field": "lengths"})


def _check_crc(batch: bytes | memoryview, written_at: int, begin: int, end: int) -> None:
    """Compare the checksum at `written_at` with that of [begin, end), without a copy."""
    expected = int.from_bytes(batch[written_at : written_at + 4], "big")
    actual = google_crc32c.value(np.frombuffer(batch, np.uint8, end - begin, begin))
    if expected != actual:
        raise BadChecksum(
            f"checksum {actual:#010x} where {expected:#010x} was written",
            facts={"expected": expected, "actual": actual},
        )


def _limit(field_name: str, actual: int, limit: int) -> None:
    if actual > limit:
        raise LimitExceeded(
            f"{field_name} has {actual} bytes; the limit is {limit}",
            remedy=f"Send a {field_name} of {limit} bytes at most.",
            facts={"field": field_name, "limit": limit, "actual": actual},
        )
