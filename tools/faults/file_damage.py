"""Damages a file of a process: truncates it or flips a bit.

The file and the position are drawn from the files that the service keeps: the log, indexes and
small files of storage (docs/reference/format.md), LMDB's file of offsets and the record beside it.
"""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import NamedTuple, NoReturn

_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


class FileKind(NamedTuple):
    """Files of one kind, and the bytes of them that are meant.

    Attributes:
        pattern: Relative to the data folder.
        begin: First byte.
        end: Byte after the last one; None for the end of the content.
    """

    pattern: str
    begin: int = 0
    end: int | None = None


KINDS = {
    "storage": {
        "log": FileKind("log/*"),
        "consume queue": FileKind("consumequeue/*/*/*"),
        "key index": FileKind("keyindex/*"),
        "checkpoint": FileKind("checkpoint"),
        "synced": FileKind("synced"),
        "epochs": FileKind("epochs"),
        "floors": FileKind("floors"),
    },
    "offsets": {
        "meta pages": FileKind("progress/data.mdb", end=2 * _PAGE_BYTES),
        "pages": FileKind("progress/data.mdb", begin=2 * _PAGE_BYTES),
        "newest": FileKind("progress/newest"),
    },
}
"""Kinds of files, by service. The checkpoint has the scheduled messages and the producers, too."""
TAIL_BYTES = 64 * 1024
_CHUNK = 1024 * 1024


def tear(folder: Path, random: Random) -> str:
    """Remove the written bytes of a file from a random position on; return a description."""
    path, _ = _choose(folder, random) or _no_files(folder)
    used = _used(path)
    at = random.randrange(max(0, used - TAIL_BYTES), used)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(at)
        if path.parent.name == "log":
            file.truncate(size)  # a segment is preallocated: lost bytes read as zeros
    return f"{path.relative_to(folder)} from byte {at} of {used} on"


def flip(folder: Path, random: Random, kind: str = "") -> str:
    """Flip one bit of a file; return a description, empty if there is no file of this kind.

    Args:
        kind: A key of `KINDS`; drawn if empty.
    """
    chosen = _choose(folder, random, kind)
    if chosen is None:
        return ""
    path, (_, begin, end) = chosen
    used = min(_used(path), end) if end is not None else _used(path)
    at, bit = random.randrange(begin, used), random.randrange(8)
    flip_bit(path, at, bit)
    return f"bit {bit} of byte {at} of {used} of {path.relative_to(folder)}"


def flip_bit(path: Path, at: int, bit: int) -> None:
    """Flip a bit of the byte at `at`."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def _choose(folder: Path, random: Random, kind: str = "") -> tuple[Path, FileKind] | None:
    """Return a file with content and its kind, which is drawn first."""
    service = "offsets" if (folder / "progress").is_dir() else "storage"
    kinds = {}
    for name, one in KINDS[service].items():
        files = [path for path in sorted(folder.glob(one.pattern)) if _used(path) > one.begin]
        if files and kind in ("", name):
            kinds[name] = files
    if not kinds:
        return None
    name = random.choice(list(kinds))
    return random.choice(kinds[name]), KINDS[service][name]


def _no_files(folder: Path) -> NoReturn:
    raise FileNotFoundError(f"no file of a service in {folder}")


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
