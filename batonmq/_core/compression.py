"""Compression of the records of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Compression(IntEnum):
    """Compression of the records of a batch; the numbers are those of the batch's flags."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2


@dataclass(frozen=True, slots=True)
class RecordCompressor:
    """Compresses the records of a batch together.

    Attributes:
        compression: The method; NONE for no compression.
        bytes_min: Records of fewer bytes are not compressed.
    """

    compression: Compression = Compression.NONE
    bytes_min: int = 0

    def compress(self, records: bytes) -> tuple[Compression, bytes]:
        """Return the records compressed; as they are if that does not make them smaller."""
        if self.compression is Compression.NONE or len(records) < self.bytes_min:
            return Compression.NONE, records
        from batonmq._core.codecs import compress  # noqa: PLC0415  slow to import, and often unused

        compressed = compress(self.compression, records)
        if len(compressed) >= len(records):
            return Compression.NONE, records
        return self.compression, compressed
