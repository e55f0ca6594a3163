"""What is wrong with the disk and the clock of a process; told by a small file while it runs.

The services of `tools/faults/services` look into `$FAULTS_FOLDER/<node id>.json` before they sync,
write or tell the time. No file: nothing is wrong.
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
"""Suffix of the file that tells that a sync has failed."""
_STROBE_EVERY_MS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFault:
    """What is wrong.

    Attributes:
        sync_ms: How much longer every sync takes.
        sync_fails: The next sync fails, those after it don't: the kernel tells of lost pages once.
        full: Nothing can be added to the disk.
        clock_ms: How much the wall clock is ahead.
        strobe_ms: It is ahead and behind by so much in turn.
    """

    sync_ms: int = 0
    sync_fails: bool = False
    full: bool = False
    clock_ms: int = 0
    strobe_ms: int = 0

    def tell(self, folder: Path, node_id: str) -> None:
        """Let it be so for a process."""
        draft = folder / f"{node_id}.new"
        draft.write_text(json.dumps(asdict(self)))
        draft.replace(folder / f"{node_id}.json")

    @staticmethod
    def has_failed(folder: Path, node_id: str) -> bool:
        """Whether a sync of the process has failed; asked again, not any more."""
        try:
            (folder / f"{node_id}{FAILED}").unlink()
        except FileNotFoundError:
            return False
        return True


NO_FAULT = ProcessFault()


class ProcessFaults:
    """What is wrong with this process, as it is now. Any thread may ask."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen_ns, self._fault = 0, NO_FAULT
        self._may_fail = True

    @classmethod
    def of(cls, node_id: str) -> ProcessFaults:
        """Of the process with this node id."""
        folder = os.environ[FOLDER]  # noqa: TID251  where the run keeps what it does
        return cls(Path(folder) / f"{node_id}.json")

    def now(self) -> ProcessFault:
        """What is wrong."""
        try:
            changed_ns = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return NO_FAULT
        if changed_ns != self._seen_ns:
            self._fault = ProcessFault(**json.loads(self._path.read_text()))
            self._seen_ns = changed_ns
        return self._fault

    def sync(self) -> None:
        """To be called before a sync.

        Raises:
            OSError: EIO, once.
        """
        fault = self.now()
        if fault.sync_ms:
            threading.Event().wait(fault.sync_ms / 1000)
        if not fault.sync_fails:
            self._may_fail = True
        elif self._may_fail:
            self._may_fail = False
            self._path.with_suffix(FAILED).touch()
            raise OSError(errno.EIO, "a sync failed")

    def grow(self) -> None:
        """To be called before something is added to the disk.

        Raises:
            OSError: ENOSPC.
        """
        if self.now().full:
            raise OSError(errno.ENOSPC, "the disk is full")


class FaultyClock(Clock):
    """A wall clock that is wrong, and a monotonic one that isn't."""

    def __init__(self, faults: ProcessFaults) -> None:
        self._faults = faults

    def unix_ms(self) -> int:
        """See Clock."""
        fault, right_ms = self._faults.now(), super().unix_ms()
        strobe_ms = fault.strobe_ms * (1 if right_ms // _STROBE_EVERY_MS % 2 else -1)
        return right_ms + fault.clock_ms + strobe_ms
