"""Faults of the disk and the clock of a running process, controlled by a small file.

The services of `tools/faults/services` read `$FAULTS_FOLDER/<node id>.json` before they sync, write
or read the clock. Without a file there is no fault.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from batonmq._common.clock import Clock

FOLDER = "FAULTS_FOLDER"
FAILED = ".failed"
"""Suffix of the file that a process creates after a failed sync."""
_STROBE_EVERY_MS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFault:
    """The faults of a process.

    Attributes:
        sync_ms: Additional duration of every sync.
        sync_fails: The next sync fails, later ones do not: the kernel reports lost pages once.
        full: The disk accepts no more data.
        clock_ms: The wall clock is ahead by this much.
        strobe_ms: The wall clock is ahead and behind by this much, alternating.
    """

    sync_ms: int = 0
    sync_fails: bool = False
    full: bool = False
    clock_ms: int = 0
    strobe_ms: int = 0

    def write(self, folder: Path, node_id: str) -> None:
        """Write the fault file of a process."""
        draft = folder / f"{node_id}.new"
        draft.write_text(json.dumps(asdict(self)))
        draft.replace(folder / f"{node_id}.json")

    @staticmethod
    def has_failed(folder: Path, node_id: str) -> bool:
        """Return whether a sync of the process has failed since the last call."""
        try:
            (folder / f"{node_id}{FAILED}").unlink()
        except FileNotFoundError:
            return False
        return True


NO_FAULT = ProcessFault()


class ProcessFaults:
    """The current faults of this process; thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen_ns, self._fault = 0, NO_FAULT
        self._may_fail = True

    @classmethod
    def of(cls, node_id: str) -> ProcessFaults:
        """Return the faults of the process with this node id."""
        folder = os.environ[FOLDER]  # noqa: TID251  set by the run for its services
        return cls(Path(folder) / f"{node_id}.json")

    def now(self) -> ProcessFault:
        """Return the current fault."""
        try:
            changed_ns = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return NO_FAULT
        if changed_ns != self._seen_ns:
            self._fault = ProcessFault(**json.loads(self._path.read_text()))
            self._seen_ns = changed_ns
        return self._fault

    def sync(self) -> None:
        """Delay or fail the sync that follows.

        Raises:
            OSError: EIO, once for each fault.
        """
        fault = self.now()
        if fault.sync_ms:
            threading.Event().wait(fault.sync_ms / 1000)
        if not fault.sync_fails:
            self._may_fail = True
        elif self._may_fail:
            self._may_fail = False
            self._path.with_suffix(FAILED).touch()
            raise OSError(errno.EIO, "injected sync failure")

    def grow(self) -> None:
        """Check for space before data is added to the disk.

        Raises:
            OSError: ENOSPC if the disk is full.
        """
        if self.now().full:
            raise OSError(errno.ENOSPC, "the disk is full")


class FaultyClock(Clock):
    """A clock with faults of the wall clock; monotonic time is correct."""

    def __init__(self, faults: ProcessFaults) -> None:
        self._faults = faults

    def unix_ms(self) -> int:
        """See Clock."""
        fault, right_ms = self._faults.now(), super().unix_ms()
        strobe_ms = fault.strobe_ms * (1 if right_ms // _STROBE_EVERY_MS % 2 else -1)
        return right_ms + fault.clock_ms + strobe_ms
