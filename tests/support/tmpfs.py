"""A file system of a few megabytes for tests with a full disk."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_file_system(folder: Path, megabytes: int) -> Iterator[Path]:
    """Mount a small file system at `folder`; skip the test if that is not permitted."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)],
        check=False,
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"NOT TESTED: no file system may be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_up(folder: Path, *, leave_bytes: int) -> Path:
    """Create a file that leaves that much free space at `folder`; return the file."""
    ballast = folder / "ballast"
    file_system = os.statvfs(folder)
    size = file_system.f_bavail * file_system.f_frsize - leave_bytes
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    return ballast
