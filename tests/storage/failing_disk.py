"""Makes the real disks of chosen nodes fail."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from batonmq._common.outside_call import OutsideCall
from batonmq_server.storage.disk import RealDisk, RealFile
from batonmq_server.storage.kernel_sync import KernelSync


@dataclass(slots=True)
class DiskFailure:
    """The failures of one disk.

    Attributes:
        error: Error number of the OSError.
        calls: Names of the calls that fail: `sync` of a file, `replace` and `create` of the disk.
        left: Number of failures that are left.
        met: Number of failures so far.
        on_failure: Called before each failure.
    """

    error: int
    calls: frozenset[str]
    left: int = 1 << 30
    met: int = 0
    on_failure: Callable[[], object] = lambda: None

    def raise_if_failing(self, call: str) -> None:
        """Raise OSError if this call must fail."""
        if call in self.calls and self.left > 0:
            self.left, self.met = self.left - 1, self.met + 1
            self.on_failure()
            raise OSError(self.error, os.strerror(self.error))


@dataclass(slots=True)
class FailingDisks:
    """The failing disks, by folder."""

    failing: dict[Path, DiskFailure] = field(default_factory=dict)

    def raise_if_failing(self, path: Path, call: str) -> None:
        """Raise OSError if this call must fail on the disk that contains `path`."""
        for folder, failure in self.failing.items():
            if path.is_relative_to(folder):
                failure.raise_if_failing(call)


def failing_disks(patch: pytest.MonkeyPatch) -> FailingDisks:
    """Patch the real disk so that calls fail as the returned object determines."""
    disks = FailingDisks()

    def of_disk(name: str) -> Callable[..., Any]:
        real = getattr(RealDisk, name)

        def call(disk: RealDisk, *arguments: Any) -> Any:
            disks.raise_if_failing(disk._folder, name)
            return real(disk, *arguments)

        return call

    sync = RealFile.sync

    def of_file(file: RealFile) -> None:
        disks.raise_if_failing(Path(f"/proc/self/fd/{file._fd}").readlink(), "sync")
        sync(file)

    begin = KernelSync.begin

    def by_kernel(kernel: KernelSync, descriptor: int) -> OutsideCall[None] | None:
        if descriptor < 0:
            return None
        try:
            disks.raise_if_failing(Path(f"/proc/self/fd/{descriptor}").readlink(), "sync")
        except OSError as error:
            failed = OutsideCall[None]()
            asyncio.get_running_loop().call_soon(failed.end, None, error)
            return failed
        return begin(kernel, descriptor)

    patch.setattr(KernelSync, "begin", by_kernel)
    for name in ("replace", "create"):
        patch.setattr(RealDisk, name, of_disk(name))
    patch.setattr(RealFile, "sync", of_file)
    return disks
