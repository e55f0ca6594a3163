"""Damages a file of a stopped process: truncates it or flips a bit.

The file and the position are drawn from the files that the service keeps: the log, indexes and
small files of storage (docs/reference/format.md), the only file of offsets.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

_STORAGE = (
    "log/*", "consumequeue/*/*/*", "keyindex/*", "checkpoint", "synced", "epochs",
)  # fmt: skip
_OFFSETS = ("progress/data.mdb",)
TAIL_BYTES = 64 * 1024
_CHUNK = 1024 * 1024


def tear(folder: Path, random: Random) -> str:
    """Remove the written bytes of a file from a random position on; return a description."""
    path = _choose(folder, random)
    used = _used(path)
    at = random.randrange(max(0, used - TAIL_BYTES), used)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(at)
        if path.parent.name == "log":
            file.truncate(size)  # a segment is preallocated: lost bytes read as zeros
    return f"{path.relative_to(folder)} from byte {at} of {used} on"


def flip(folder: Path, random: Random) -> str:
    """Flip one bit of a file; return a description."""
    path = _choose(folder, random)
    used = _used(path)
    at, bit = random.randrange(used), random.randrange(8)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
    return f"bit {bit} of byte {at} of {used} of {path.relative_to(folder)}"


def _choose(folder: Path, random: Random) -> Path:
    """Return a file with content; its kind is drawn first."""
    patterns = _OFFSETS if (folder / "progress").is_dir() else _STORAGE
    kinds = [[one for one in sorted(folder.glob(pattern)) if _used(one)] for pattern in patterns]
    return random.choice(random.choice([kind for kind in kinds if kind]))


def _used(path: Path) -> int:
    """Return the number of bytes up to the last one that is not zero."""
    used = size = path.stat().st_size
    with path.open("rb") as file:
        while used:
            begin = max(0, used - _CHUNK)
            file.seek(begin)
            if chunk := file.read(used - begin).rstrip(b"\0"):
                return begin + len(chunk)
            used = begin
    return min(used, size)
