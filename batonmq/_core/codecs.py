"""LZ4 and Zstandard, for the records of a batch.

`compression` and `records` import this module with the first compressed batch: most programs have
none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import lz4.block

from batonmq._core.compression import Compression
from batonmq.errors import BadBatch

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Bytes = bytes | memoryview
ZSTD_LEVEL = 1
"""On orders as JSON a higher level saves less than 1 % and takes a third more time."""


def compress(compression: Compression, records: bytes) -> bytes:
    """Return the compressed records; `compression` is not NONE."""
    return _COMPRESS[compression](records)


def decompress(compression: Compression, compressed: Bytes, size: int) -> bytes:
    """Inverse of `compress`; takes memory for `size` bytes and no more.

    Args:
        size: Size of the records in bytes.

    Raises:
        BadBatch: The bytes can't be decompressed, or the records have another size.
    """
    try:
        records = _DECOMPRESS[compression](compressed, size)
    except (lz4.block.LZ4BlockError, zstd.ZstdError) as error:
        raise _bad(compression, str(error)) from None
    if len(records) != size:
        raise _bad(compression, f"they have {len(records)} bytes, their lengths add up to {size}")
    return records


def _bad(compression: Compression, problem: str) -> BadBatch:
    return BadBatch(
        f"records can't be decompressed by {compression.name.lower()}: {problem}",
        facts={"field": "records"},
    )


def _compress_lz4(records: bytes) -> bytes:
    return bytes(lz4.block.compress(records, store_size=False))


def _decompress_lz4(compressed: Bytes, size: int) -> bytes:
    return bytes(lz4.block.decompress(compressed, uncompressed_size=size))


def _compress_zstd(records: bytes) -> bytes:
    return zstd.compress(records, ZSTD_LEVEL)


def _decompress_zstd(compressed: Bytes, size: int) -> bytes:
    stated = zstd.get_frame_info(compressed).decompressed_size
    if stated != size:
        raise _bad(Compression.ZSTD, f"the frame does not state {size} bytes as its content")
    decompressor = zstd.ZstdDecompressor()
    records = decompressor.decompress(compressed, size)
    if not decompressor.eof:  # what is left holds no content, if the frame is as it states
        records += decompressor.decompress(b"", 1)
    if not decompressor.eof or decompressor.unused_data:
        raise _bad(Compression.ZSTD, "the bytes are not exactly one frame")
    return records


_COMPRESS: dict[Compression, Callable[[bytes], bytes]] = {
    Compression.LZ4: _compress_lz4,
    Compression.ZSTD: _compress_zstd,
}
_DECOMPRESS: dict[Compression, Callable[[Bytes, int], bytes]] = {
    Compression.LZ4: _decompress_lz4,
    Compression.ZSTD: _decompress_zstd,
}
