"""Segments in the object store: their manifests, what of them is cached, and what is moved when.

A segment in the store has parts, written first, and a manifest, written last. A segment without a
manifest does not count as stored. The local file of a segment that is only in the store is sparse
and contains only the manifest, at its begin. The log keeps its place, so no position changes.

    manifest, big-endian:
    at  size  field
     0     4  magic "BTNT"
     4     2  version, 1
     6     2  0
     8     8  first position of the segment
    16     8  position after the segment
    24     8  epoch that wrote the last byte of the segment
    32     8  time at which its first batch was written, Unix ms
    40     8  n, the bytes that are stored; the rest of the segment is zeros
    48     4  bytes of a block
    52     4  bytes of a part, a multiple of the bytes of a block
    56     4  number of blocks
    60     4  0
              per block: 4 CRC-32C of its bytes
   end     4  CRC-32C of everything before

Where two logs name the same epoch for a position, they hold the same bytes before it. So first
position and epoch name the content of a segment, and every node writes the same objects.
"""

from __future__ import annotations

import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple, Protocol

from batonmq._core.checksum import crc32c
from batonmq.errors import DataLoss, DataLossDetail, NotServing
from batonmq_server.storage.core.files import File

MAGIC, VERSION = 0x42544E54, 1
HEAD = struct.Struct(">IHHqqqqqIIII")
CRC = struct.Struct(">I")
BLOCK_BYTES = 256 * 1024
BLOCK_BYTES_MIN = 1_024
PART_BYTES = 16 * 1024 * 1024
"""Size of an object. It is written from memory, whole or not at all."""
FETCH_BLOCKS = 16
"""Blocks that are read from the store at once: 4 MiB."""
MANIFESTS, PARTS = "manifests", "parts"
FIRST = "first"
"""File with the position before which retention has removed the segments of the store."""
_NAME = re.compile(r"(\d{20})-(\d{10})")


class SegmentName(NamedTuple):
    """The name of a segment in the store: its first position, and the epoch of its last byte."""

    first_position: int
    epoch: int

    @property
    def manifest(self) -> str:
        """Name of the manifest."""
        return f"{MANIFESTS}/{self}"

    def part(self, number: int) -> str:
        """Return the name of a part."""
        return f"{PARTS}/{self}.{number:05d}"

    def __str__(self) -> str:
        """Return the name as it is part of the names of objects."""
        return f"{self.first_position:020d}-{self.epoch:010d}"

    @classmethod
    def of_object(cls, name: str) -> SegmentName | None:
        """Return the segment of a manifest or part; None if the name is of something else."""
        found = _NAME.match(name.rpartition("/")[2])
        return cls(int(found[1]), int(found[2])) if found else None


@dataclass(frozen=True, slots=True)
class TierManifest:
    """What the store has of one segment; see the module."""

    first_position: int
    next_position: int
    epoch: int
    first_unix_ms: int
    stored_bytes: int
    checksums: tuple[int, ...]
    block_bytes: int = BLOCK_BYTES
    part_bytes: int = PART_BYTES

    @property
    def name(self) -> SegmentName:
        """Name of the segment in the store."""
        return SegmentName(self.first_position, self.epoch)

    @property
    def size(self) -> int:
        """Length of the segment."""
        return self.next_position - self.first_position

    @property
    def part_count(self) -> int:
        """Number of parts."""
        return -(-self.stored_bytes // self.part_bytes)

    def encode(self) -> bytes:
        """Return the bytes of the manifest."""
        content = HEAD.pack(
            MAGIC, VERSION, 0, self.first_position, self.next_position, self.epoch,
            self.first_unix_ms, self.stored_bytes, self.block_bytes, self.part_bytes,
            len(self.checksums), 0,
        ) + struct.pack(f">{len(self.checksums)}I", *self.checksums)  # fmt: skip
        return content + CRC.pack(crc32c(content))

    def span(self, first_block: int, next_block: int) -> tuple[int, int, int]:
        """Return the part that contains blocks, and their begin and end in it.

        Blocks after the end of that part are left out.
        """
        begin = first_block * self.block_bytes
        part = begin // self.part_bytes
        part_end = min((part + 1) * self.part_bytes, self.stored_bytes)
        end = min(next_block * self.block_bytes, part_end)
        return part, begin - part * self.part_bytes, end - part * self.part_bytes

    def verified(self, first_block: int, content: bytes) -> dict[int, bytes]:
        """Return the blocks in `content`, which begins with `first_block`, by number.

        Raises:
            DataLoss: the content does not match its checksums, or is too short.
        """
        blocks = {}
        for at in range(0, max(len(content), 1), self.block_bytes):
            number = first_block + at // self.block_bytes
            block = content[at : at + self.block_bytes]
            wanted = min(self.block_bytes, self.stored_bytes - number * self.block_bytes)
            part = number * self.block_bytes // self.part_bytes
            position = self.first_position + number * self.block_bytes
            if len(block) != wanted:
                raise _damaged(
                    f"object {self.name.part(part)} of the store is too short: block {number} has "
                    f"{len(block)} bytes, expected {wanted}",
                    position,
                )
            if (found := crc32c(block)) != self.checksums[number]:
                raise _damaged(
                    f"object {self.name.part(part)} of the store is damaged: block {number} has "
                    f"checksum {found:08x}, expected {self.checksums[number]:08x}",
                    position,
                )
            blocks[number] = block
        return blocks


def decode_manifest(raw: bytes) -> TierManifest:
    """Inverse of `TierManifest.encode`; bytes after the manifest are ignored.

    Raises:
        DataLoss: it is damaged, or of another version.
    """
    if len(raw) < HEAD.size:
        raise _damaged("a manifest of a segment in the store is too short", 0)
    magic, version, _, first, end, epoch, unix_ms, stored, block, part, count, _ = HEAD.unpack_from(
        raw
    )
    length = HEAD.size + 4 * count
    if magic != MAGIC or raw[length : length + CRC.size] != CRC.pack(crc32c(raw[:length])):
        raise _damaged(f"the manifest of the segment at {first} is damaged", first)
    if version != VERSION:
        raise _damaged(f"the manifest of the segment at {first} has version {version}", first)
    checksums = struct.unpack_from(f">{count}I", raw, HEAD.size)
    return TierManifest(first, end, epoch, unix_ms, stored, checksums, block, part)


def is_stub(head: bytes) -> bool:
    """Return whether a segment file that begins with `head` contains only a manifest."""
    return head[:4] == MAGIC.to_bytes(4, "big")


def read_stub(file: File, size: int) -> TierManifest | None:
    """Return the manifest in a segment file of `size` bytes; None if the file has its messages.

    Raises:
        DataLoss: the manifest is damaged.
    """
    head = file.read(0, HEAD.size)
    if len(head) < HEAD.size or not is_stub(head):
        return None
    count = HEAD.unpack(head)[10]
    if count > size // BLOCK_BYTES_MIN + 1:  # a damaged number must not read the whole file
        raise _damaged("the manifest in a segment file is damaged", 0)
    return decode_manifest(file.read(0, min(HEAD.size + 4 * count + CRC.size, size)))


def block_checksums(content: bytes, block_bytes: int) -> list[int]:
    """Return the checksums of the blocks of a part of a segment."""
    return [crc32c(content[at : at + block_bytes]) for at in range(0, len(content), block_bytes)]


def encode_first(position: int) -> bytes:
    """Return the content of the file `first`."""
    return f"{position} {crc32c(str(position).encode()):08x}\n".encode()


def decode_first(raw: bytes) -> int:
    """Inverse of `encode_first`; 0 if it is empty or damaged: then less is removed."""
    number, _, crc = raw.decode("ascii", "replace").strip().partition(" ")
    if not number.isdecimal() or crc != f"{crc32c(number.encode()):08x}":
        return 0
    return int(number)


def _damaged(message: str, position: int) -> DataLoss:
    return DataLoss(
        message,
        remedy="Restore the object from a version or copy that the store keeps. Until then the "
        "messages of this part of the log can't be read; none is skipped.",
        detail=DataLossDetail(position=position),
    )


class NotCached(NotServing):
    """A part of the log is in the store and not in the cache: it must be fetched first.

    Attributes:
        manifest: The segment.
        blocks: The blocks that are missing.
    """

    manifest: TierManifest
    blocks: range

    @classmethod
    def of(cls, manifest: TierManifest, blocks: range) -> NotCached:
        """Return the error for blocks of a segment."""
        error = cls(
            f"the log at {manifest.first_position} is in the object store and is not read yet",
            retry_after_ms=100,
        )
        error.manifest, error.blocks = manifest, blocks
        return error


class RemoteSegments(Protocol):
    """Reads segments that are only in the store."""

    def read(self, manifest: TierManifest, at: int, bytes_max: int) -> bytes:
        """Return the bytes of a segment from byte `at` on, at most to its end.

        Raises:
            NotCached: they have to be fetched first.
        """
        ...

    def has(self, manifest: TierManifest, at: int, length: int) -> bool:
        """Return whether `read` can return these bytes now."""
        ...


BlockKey = tuple[SegmentName, int]


class BlockCache:
    """The most recently used blocks of segments that are in the store; threads may share it.

    Args:
        bytes_max: Maximum size of all blocks together.

    Attributes:
        held: More blocks, which a caller keeps until its search is done.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._blocks: OrderedDict[BlockKey, bytes] = OrderedDict()
        self.bytes_count = 0
        self._lock = Lock()
        self.held: Mapping[BlockKey, bytes] = {}

    def get(self, key: BlockKey) -> bytes | None:
        """Return a block; None if it is not cached."""
        with self._lock:
            block = self._blocks.get(key)
            if block is None:
                return self.held.get(key)
            self._blocks.move_to_end(key)
            return block

    def __contains__(self, key: BlockKey) -> bool:
        """Return whether a block is cached."""
        return key in self._blocks or key in self.held

    def put(self, name: SegmentName, blocks: Mapping[int, bytes]) -> None:
        """Add blocks of a segment; those not used for the longest time are removed."""
        with self._lock:
            for number, block in blocks.items():
                before = self._blocks.pop((name, number), b"")
                self._blocks[name, number] = block
                self.bytes_count += len(block) - len(before)
            while self.bytes_count > self._bytes_max:
                self.bytes_count -= len(self._blocks.popitem(last=False)[1])

    def read(self, manifest: TierManifest, at: int, bytes_max: int) -> bytes:
        """See RemoteSegments."""
        wanted = min(max(bytes_max, 0), manifest.size - at)
        blocks = _blocks_of(manifest, at, wanted)
        name, found = manifest.name, []
        for number in blocks:
            if (block := self.get((name, number))) is None:
                missing = next((n for n in blocks[::-1] if (name, n) not in self), number)
                raise NotCached.of(manifest, range(number, missing + 1))
            found.append(block)
        begin = at - blocks.start * manifest.block_bytes
        content = found[0] if len(found) == 1 else b"".join(found)
        return content[begin : begin + wanted].ljust(wanted, b"\0")

    def has(self, manifest: TierManifest, at: int, length: int) -> bool:
        """See RemoteSegments."""
        name = manifest.name
        return all((name, number) in self for number in _blocks_of(manifest, at, length))


def _blocks_of(manifest: TierManifest, at: int, length: int) -> range:
    """Return the blocks that contain bytes [at, at + length) of a segment."""
    end = min(at + length, manifest.stored_bytes)
    if end <= at:
        first = at // manifest.block_bytes
        return range(first, first)
    return range(at // manifest.block_bytes, -(-end // manifest.block_bytes))


def fetch_ranges(manifest: TierManifest, blocks: range) -> list[range]:
    """Return the ranges of blocks to read from the store so that `blocks` are cached.

    Ranges begin at multiples of FETCH_BLOCKS and lie in one part each.
    """
    ranges, per_part = [], manifest.part_bytes // manifest.block_bytes
    begin = blocks.start // FETCH_BLOCKS * FETCH_BLOCKS
    while begin < min(blocks.stop, len(manifest.checksums)):
        part_end = (begin // per_part + 1) * per_part
        end = min(begin + FETCH_BLOCKS - begin % FETCH_BLOCKS, part_end, len(manifest.checksums))
        if end > blocks.start:
            ranges.append(range(begin, end))
        begin = end
    return ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPolicy:
    """How long segments stay on the local disk once they are stored.

    Attributes:
        local_age_ms: Age at which the local copy is removed.
        local_bytes: Maximum size of the local segments; 0 for unlimited.
    """

    local_age_ms: int
    local_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LocalSegment:
    """A sealed segment, not purged, with its messages on the local disk.

    Attributes:
        name: Its name in the store.
    """

    first_position: int
    next_position: int
    name: SegmentName


def due_uploads(
    local: Iterable[LocalSegment], stored: Collection[SegmentName], safe_position: int
) -> list[LocalSegment]:
    """Return the segments to store, oldest first.

    Args:
        safe_position: End of the part of the log that no failover loses.
    """
    return [one for one in local if one.next_position <= safe_position and one.name not in stored]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalState:
    """What decides about the local copies.

    Attributes:
        log_bytes: Size of the log on the local disk.
        bound: End of the part of the log that no failover loses: nothing after it is removed.
        unix_ms: Present time.
        disk_is_short: The disk is so full that retention removes expired messages at any hour.
    """

    log_bytes: int
    bound: int
    unix_ms: int
    disk_is_short: bool


def due_removals(
    policy: TierPolicy,
    local: Sequence[LocalSegment],
    stored: Collection[SegmentName],
    state: LocalState,
    newest_unix_ms: Callable[[LocalSegment], int],
) -> Iterator[LocalSegment]:
    """Yield the segments of which the local copy is no longer needed, oldest first.

    Every one of them has a manifest in the store.

    Args:
        newest_unix_ms: Returns a time by which all messages of a segment were stored.
    """
    excess = state.log_bytes - policy.local_bytes if policy.local_bytes else 0
    for one in local:
        if one.next_position > state.bound:
            return
        if one.name not in stored:
            continue
        old = newest_unix_ms(one) + policy.local_age_ms <= state.unix_ms
        if not old and excess <= 0 and not state.disk_is_short:
            return
        excess -= one.next_position - one.first_position
        yield one


def due_store_removals(
    stored: Iterable[SegmentName], first_position: int, is_purged: Callable[[int], bool]
) -> list[SegmentName]:
    """Return the segments of the store that retention has removed from the log, oldest first."""
    return sorted(
        one
        for one in stored
        if one.first_position < first_position or is_purged(one.first_position)
    )
