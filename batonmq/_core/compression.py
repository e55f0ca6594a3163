"""Compression of the records of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import lz4.block
import zstandard

from batonmq.errors import BadBatch

Bytes = bytes | memoryview
ZSTD_LEVEL = 1
"""On orders as JSON a higher level saves less than 1 % and takes a third more time."""


class Compression(IntEnum):
    """How the records of a batch are compressed; the numbers are those of its flags."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2


@dataclass(frozen=True, slots=True)
class RecordCompressor:
    """How a producer packs records.

    Attributes:
        compression: Of the records of a batch together.
        bytes_min: Fewer bytes are not compressed.
    """

    compression: Compression = Compression.NONE
    bytes_min: int = 0

    def pack(self, records: bytes) -> tuple[Compression, bytes]:
        """The records as they travel: compressed only if that makes them smaller."""
        if self.compression is Compression.NONE or len(records) < self.bytes_min:
            return Compression.NONE, records
        packed = _PACK[self.compression](records)
        if len(packed) >= len(records):
            return Compression.NONE, records
        return self.compression, packed


def decompress(compression: Compression, packed: Bytes, size: int) -> bytes:
    """Inverse of `RecordCompressor.pack`; takes no more memory than `size`, whatever `packed` says.

    Args:
        size: Of the records, in bytes.

    Raises:
        BadBatch: they can't be unpacked, or have another size.
    """
    try:
        records = _UNPACK[compression](packed, size)
    except (lz4.block.LZ4BlockError, zstandard.ZstdError) as error:
        raise _bad(compression, str(error)) from None
    if len(records) != size:
        raise _bad(compression, f"{len(records)} bytes where the lengths add up to {size}")
    return records


def _bad(compression: Compression, problem: str) -> BadBatch:
    return BadBatch(
        f"records can't be unpacked by {compression.name.lower()}: {problem}",
        facts={"field": "records"},
    )


def _pack_lz4(records: bytes) -> bytes:
    return bytes(lz4.block.compress(records, store_size=False))


def _unpack_lz4(packed: Bytes, size: int) -> bytes:
    return bytes(lz4.block.decompress(packed, uncompressed_size=size))


def _pack_zstd(records: bytes) -> bytes:
    return zstandard.ZstdCompressor(ZSTD_LEVEL).compress(records)


def _unpack_zstd(packed: Bytes, size: int) -> bytes:
    named = zstandard.get_frame_parameters(packed).content_size
    if named != size:  # the library would allocate what the frame names
        raise _bad(Compression.ZSTD, f"the frame does not name {size} bytes as its content")
    return zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)


_PACK: dict[Compression, Callable[[bytes], bytes]] = {
    Compression.LZ4: _pack_lz4,
    Compression.ZSTD: _pack_zstd,
}
_UNPACK: dict[Compression, Callable[[Bytes, int], bytes]] = {
    Compression.LZ4: _unpack_lz4,
    Compression.ZSTD: _unpack_zstd,
}
