"""Disks of chosen nodes that fail, below everything that is tested."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from batonmq_server.storage.disk import RealDisk, RealFile


@dataclass(slots=True)
class Failing:
    """What fails on one disk.

    Attributes:
        error: With which number.
        calls: Names of the calls that fail: `sync` of a file, `replace` and `create` of the disk.
        left: So many times more.
        met: How often it has failed.
    """

    error: int
    calls: frozenset[str]
    left: int = 1 << 30
    met: int = 0

    def meet(self, call: str) -> None:
        """Raises if that call fails."""
        if call in self.calls and self.left > 0:
            self.left, self.met = self.left - 1, self.met + 1
            raise OSError(self.error, os.strerror(self.error))


@dataclass(slots=True)
class Disks:
    """All disks by folder; those named in `failing` fail."""

    failing: dict[Path, Failing] = field(default_factory=dict)

    def meet(self, path: Path, call: str) -> None:
        """Raises if that call fails on the disk that has `path`."""
        for folder, failure in self.failing.items():
            if path.is_relative_to(folder):
                failure.meet(call)


def failing_disks(patch: pytest.MonkeyPatch) -> Disks:
    """From now on disks fail when told so."""
    disks = Disks()

    def of_disk(name: str) -> Callable[..., Any]:
        real = getattr(RealDisk, name)

        def call(disk: RealDisk, *arguments: Any) -> Any:
            disks.meet(disk._folder, name)
            return real(disk, *arguments)

        return call

    sync = RealFile.sync

    def of_file(file: RealFile) -> None:
        disks.meet(Path(f"/proc/self/fd/{file._fd}").readlink(), "sync")
        sync(file)

    for name in ("replace", "create"):
        patch.setattr(RealDisk, name, of_disk(name))
    patch.setattr(RealFile, "sync", of_file)
    return disks
