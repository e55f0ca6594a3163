"""Segment files of which the messages are only in the object store, as files that can be read."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence

from batonmq.errors import BatonError, DataLoss, DataLossDetail
from batonmq_server.storage.core.files import Disk, File
from batonmq_server.storage.core.tier import SegmentName, TierManifest, fetch_ranges, read_stub

FOLDER = "log/"
FetchBlocks = Callable[[TierManifest, range], dict[int, bytes]]
"""Reads blocks of one part from the store; blocks. Raises BatonError if it can't."""


class StoreUnreadable(OSError):
    """The object store can't be read now; a disk error for callers that know only files."""

    def __init__(self, error: BatonError) -> None:
        super().__init__(errno.EREMOTEIO, error.message)
        self.error = error


class TierFile:
    """The file of a segment that is only in the store. Reads block; nothing can be written.

    It keeps what it has read last, so a scan reads each part of the segment once.
    """

    def __init__(self, stub: File, manifest: TierManifest, fetch: FetchBlocks) -> None:
        self._stub, self.manifest, self._fetch = stub, manifest, fetch
        self._blocks: dict[int, bytes] = {}

    @property
    def size(self) -> int:
        """See File."""
        return self.manifest.size

    def read(self, at: int, bytes_max: int) -> bytes:
        """See File.

        Raises:
            StoreUnreadable: the store can't be read.
        """
        manifest = self.manifest
        end = min(at + bytes_max, manifest.size)
        stored_end, step = min(end, manifest.stored_bytes), manifest.block_bytes
        content = bytearray()
        for number in range(at // step, -(-stored_end // step) if at < stored_end else 0):
            content += self._block(number)
        begin = at % step if content else 0
        return bytes(content[begin : begin + end - at]).ljust(max(end - at, 0), b"\0")

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            (blocks,) = fetch_ranges(self.manifest, range(number, number + 1))
            try:
                self._blocks = self._fetch(self.manifest, blocks)
            except BatonError as error:
                raise StoreUnreadable(error) from error
        return self._blocks[number]

    def write(self, at: int, parts: Sequence[bytes | memoryview]) -> None:
        """See File; never called."""
        raise AssertionError(self.manifest.name)

    def cut(self, at: int) -> int:
        """See File; never called."""
        raise AssertionError(self.manifest.name)

    def resize(self, size: int) -> None:
        """See File; never called."""
        raise AssertionError(self.manifest.name)

    def used(self, at: int) -> int:
        """See File."""
        return max(0, self.manifest.stored_bytes - at)

    @property
    def descriptor(self) -> int:
        """See File."""
        return -1

    def sync(self) -> None:
        """See File: the stub is durable since it was made."""

    def close(self) -> None:
        """See File."""
        self._stub.close()


class TierDisk:
    """A disk on which segments that are only in the store can be read, too.

    Args:
        disk: The local disk.
        fetch: Reads blocks from the store.
    """

    def __init__(self, disk: Disk, fetch: FetchBlocks) -> None:
        self._disk, self._fetch = disk, fetch

    def open(self, path: str, *, create: bool = False) -> File:
        """See Disk."""
        file = self._disk.open(path, create=create)
        if not path.startswith(FOLDER):
            return file
        try:
            manifest = read_stub(file, file.size)
        except (OSError, DataLoss):
            return file  # a read of the log reports it
        return file if manifest is None else TierFile(file, manifest, self._fetch)

    def names(self, folder: str) -> list[str]:
        """See Disk."""
        return self._disk.names(folder)

    def create(self, path: str, size: int) -> File:
        """See Disk."""
        return self._disk.create(path, size)

    def remove(self, path: str) -> None:
        """See Disk."""
        self._disk.remove(path)

    def space(self) -> tuple[int, int]:
        """See Disk."""
        return self._disk.space()

    def load(self, path: str) -> bytes:
        """See Disk."""
        return self._disk.load(path)

    def replace(self, path: str, content: bytes) -> None:
        """See Disk."""
        self._disk.replace(path, content)

    def replace_sparse(self, path: str, head: bytes, size: int) -> None:
        """See Disk."""
        self._disk.replace_sparse(path, head, size)

    def sync(self, paths: Sequence[str]) -> None:
        """See Disk."""
        self._disk.sync(paths)


def damaged_stubs(disk: Disk, epoch_at: Callable[[int], int]) -> Iterator[tuple[str, SegmentName]]:
    """Yield the segment files with a damaged manifest, and the names of their segments.

    Args:
        epoch_at: Returns the epoch that wrote the byte at a position.
    """
    for name in filter(str.isdecimal, disk.names(FOLDER.rstrip("/"))):
        path, first_position = f"{FOLDER}{name}", int(name)
        file = disk.open(path)
        try:
            if not isinstance(file, TierFile):
                read_stub(file, file.size)
        except OSError:
            continue  # a read of the log reports it
        except DataLoss:
            yield path, SegmentName(first_position, epoch_at(first_position + file.size - 1))
        finally:
            file.close()


def mend_stub(disk: Disk, path: str, name: SegmentName, manifest: TierManifest | None) -> None:
    """Replace a segment file with a damaged manifest by one with the manifest in the store.

    Raises:
        DataLoss: the store has none, or that of another segment.
    """
    file = disk.open(path)
    size = file.size
    file.close()
    if manifest is None or (manifest.name, manifest.size) != (name, size):
        raise DataLoss(
            f"the manifest in {path} is damaged, and the store has no object {name.manifest} of "
            f"{size} bytes",
            remedy=f"Restore the object {name.manifest} from a version or copy that the store "
            "keeps; then start the node again.",
            detail=DataLossDetail(position=name.first_position),
        )
    disk.replace_sparse(path, manifest.encode(), size)
