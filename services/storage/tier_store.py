"""The object store with the segments of one broker: blocking calls, and what they raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from batonmq.errors import BatonError, DataLoss, DataLossDetail, Unreachable
from batonmq_server.storage.core.tier import (
    FIRST,
    MANIFESTS,
    PARTS,
    SegmentName,
    TierManifest,
    decode_first,
    decode_manifest,
    encode_first,
)

Value = TypeVar("Value")
READS_MAX = 2
"""A block that does not match its checksum is read again once: the damage may be on the way."""


class ObjectFiles(Protocol):
    """Files by name, in a folder or an object store. The calls block.

    A file appears whole or not at all.
    """

    def write(self, name: str, content: bytes) -> None:
        """Write a file; replace it if it exists. Durable on return."""

    def read(self, name: str) -> bytes:
        """Return the content of a file; raise FileNotFoundError if it does not exist."""

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Return bytes [begin, end) of a file; raise FileNotFoundError if it does not exist."""

    def remove(self, name: str) -> None:
        """Remove a file; does nothing if it does not exist."""

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in a folder, not of those below it; empty if none."""


class SegmentStore:
    """The segments of one broker in the store. All methods block and may run in any thread.

    Every method raises Unreachable if the store fails.

    Args:
        files: The store.
        folder: Folder of the broker in it.
    """

    def __init__(self, files: ObjectFiles, folder: str) -> None:
        self._files, self._folder = files, folder

    def stored(self) -> set[SegmentName]:
        """Return the segments with a manifest."""
        return self._segments(MANIFESTS)

    def parts(self) -> list[tuple[SegmentName, str]]:
        """Return the names of all parts, with their segments."""
        names = self._call("list parts", lambda: self._files.names(f"{self._folder}/{PARTS}"))
        found = [(SegmentName.of_object(one), one.rpartition("/")[2]) for one in names]
        return [(segment, f"{PARTS}/{name}") for segment, name in found if segment is not None]

    def first_position(self) -> int:
        """Return the position before which retention has removed segments; 0 if none."""
        try:
            return decode_first(self._read(FIRST))
        except FileNotFoundError:
            return 0

    def write_first_position(self, position: int) -> None:
        """Record that retention removes the segments before `position`."""
        self._write(FIRST, encode_first(position))

    def write_part(self, name: SegmentName, number: int, content: bytes) -> None:
        """Write a part of a segment, which has no manifest yet."""
        self._write(name.part(number), content)

    def write_manifest(self, manifest: TierManifest) -> None:
        """Write the manifest of a segment; all parts are written. From now on it is stored."""
        self._write(manifest.name.manifest, manifest.encode())

    def manifest(self, name: SegmentName) -> TierManifest | None:
        """Return the manifest of a segment; None if it is not stored.

        Raises:
            DataLoss: the manifest is damaged.
        """
        try:
            return decode_manifest(self._read(name.manifest))
        except FileNotFoundError:
            return None

    def fetch(self, manifest: TierManifest, blocks: range) -> dict[int, bytes]:
        """Return blocks of one part, by number, after a check of each.

        Raises:
            DataLoss: the part is missing, or does not match its checksums.
        """
        part, begin, end = manifest.span(blocks.start, blocks.stop)
        name = manifest.name.part(part)
        for attempt in range(1, READS_MAX + 1):
            try:
                content = self._call(
                    name, lambda: self._files.read_range(f"{self._folder}/{name}", begin, end)
                )
                return manifest.verified(blocks.start, content)
            except FileNotFoundError as error:
                raise DataLoss(
                    f"object {name} of the store is missing",
                    remedy="Restore the object from a version or copy that the store keeps, and "
                    "look for a rule of the store that removes objects. No message is skipped.",
                    detail=DataLossDetail(position=manifest.first_position),
                ) from error
            except DataLoss:
                if attempt == READS_MAX:
                    raise
        raise AssertionError(name)

    def remove(self, name: str) -> None:
        """Remove a file; does nothing if it does not exist."""
        self._call(name, lambda: self._files.remove(f"{self._folder}/{name}"))

    def _segments(self, folder: str) -> set[SegmentName]:
        names = self._call(f"list {folder}", lambda: self._files.names(f"{self._folder}/{folder}"))
        return {found for one in names if (found := SegmentName.of_object(one)) is not None}

    def _read(self, name: str) -> bytes:
        return self._call(name, lambda: self._files.read(f"{self._folder}/{name}"))

    def _write(self, name: str, content: bytes) -> None:
        try:
            self._call(name, lambda: self._files.write(f"{self._folder}/{name}", content))
        except FileNotFoundError as error:  # the bucket or the folder is missing
            raise unreachable(name, f"{error}") from error

    def _call(self, what: str, call: Callable[[], Value]) -> Value:
        try:
            return call()
        except (FileNotFoundError, BatonError):
            raise
        except Exception as error:  # each package of a store has its own classes
            raise unreachable(what, f"{type(error).__name__}: {error}") from error


def unreachable(what: str, why: str) -> Unreachable:
    """Return the error of a call of the store that failed."""
    return Unreachable(
        f"the object store of segments failed with {what}: {why}",
        remedy="Check that the store is reachable, and its credentials. The call may be repeated; "
        "no message is skipped.",
        retry_after_ms=1_000,
        facts={"object": what},
    )
