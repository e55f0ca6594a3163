"""`python -m tools.faults.services.offsets`: a node of offsets with injectable disk faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from shutil import disk_usage

from batonmq_server.offsets.app import served
from batonmq_server.offsets.config import OffsetsSettings
from batonmq_server.offsets.core.change_log import Entry
from batonmq_server.offsets.disk import LmdbDisk, set_aside_damage
from batonmq_server.runtime.app import App
from batonmq_server.runtime.process import run
from batonmq_server.runtime.service_runtime import Runtime
from tools.faults.process_faults import FaultyClock, ProcessFaults


class FaultyOffsetsDisk(LmdbDisk):
    """A disk with injectable faults."""

    def __init__(self, folder: Path, faults: ProcessFaults, free_bytes_min: int) -> None:
        self._faults = faults
        super().__init__(folder, free_bytes_min=free_bytes_min, free_bytes=self._free)

    def write_blocking(self, entries: Sequence[Entry], *, replace: bool = False) -> None:
        self._faults.sync()
        super().write_blocking(entries, replace=replace)

    def _free(self, folder: Path) -> int:
        return 0 if self._faults.now().full else disk_usage(folder).free


@asynccontextmanager
async def build(settings: OffsetsSettings, runtime: Runtime) -> AsyncIterator[App]:
    """Build the app of a node; only its disk differs from production."""
    faults = ProcessFaults.of(settings.node_id)
    await asyncio.to_thread(set_aside_damage, settings.data_dir)
    with FaultyOffsetsDisk(settings.data_dir, faults, settings.disk_free_bytes_min) as disk:
        async with served(settings, runtime, disk) as app:
            yield app


if __name__ == "__main__":
    run(
        "offsets",
        OffsetsSettings,
        build,
        lambda settings: FaultyClock(ProcessFaults.of(settings.node_id)),
    )
