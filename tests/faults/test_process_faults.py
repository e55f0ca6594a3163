"""Goal: disk and clock have the faults of the fault file, and no others.

Method: the faulty disks of the services on real folders.
"""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from batonmq._common.clock import Clock
from batonmq.errors import DiskFull
from batonmq_server.storage.disk import RealDisk
from tools.faults.process_faults import NO_FAULT, FaultyClock, ProcessFault, ProcessFaults
from tools.faults.services import offsets, storage


@pytest.fixture
def faults(tmp_path: Path) -> ProcessFaults:
    return ProcessFaults(tmp_path / "node.json")


def write_fault(tmp_path: Path, fault: ProcessFault) -> None:
    fault.write(tmp_path, "node")


def test_process_without_a_file_has_no_fault(faults: ProcessFaults) -> None:
    faults.sync()
    faults.grow()
    assert faults.now() == NO_FAULT


def test_sync_fails_once_for_each_written_fault(tmp_path: Path, faults: ProcessFaults) -> None:
    disk = storage.FaultyStorageDisk(RealDisk(tmp_path / "data"), faults)
    file = disk.create("log/0", 4_096)
    for _ in range(2):
        write_fault(tmp_path, ProcessFault(sync_fails=True))
        with pytest.raises(OSError) as raised:
            file.sync()
        assert raised.value.errno == errno.EIO
        file.sync()
        write_fault(tmp_path, NO_FAULT)
        file.sync()


def test_data_of_a_failed_sync_is_lost(tmp_path: Path, faults: ProcessFaults) -> None:
    file = storage.FaultyStorageDisk(RealDisk(tmp_path / "data"), faults).create("log/0", 4_096)
    file.write(0, [b"safe"])
    file.sync()
    file.write(4, [b"un", b"safe"])
    write_fault(tmp_path, ProcessFault(sync_fails=True))
    with pytest.raises(OSError):
        file.sync()
    assert file.read(0, 10) == b"safe" + bytes(6)
    assert ProcessFault.has_failed(tmp_path, "node")
    assert not ProcessFault.has_failed(tmp_path, "node")


def test_full_disk_accepts_writes_to_allocated_space_only(
    tmp_path: Path, faults: ProcessFaults
) -> None:
    disk = storage.FaultyStorageDisk(RealDisk(tmp_path / "data"), faults)
    log, index = disk.create("log/0", 4_096), disk.open("index/0", create=True)
    write_fault(tmp_path, ProcessFault(full=True))
    log.write(0, [b"fits"])
    with pytest.raises(OSError) as raised:
        index.write(0, [b"grows"])
    assert raised.value.errno == errno.ENOSPC
    with pytest.raises(DiskFull):
        disk.create("log/1", 4_096)
    with pytest.raises(OSError):
        disk.replace("epochs", b"more")
    assert disk.space()[1] == 0
    assert disk.names("log") == ["0"]
    write_fault(tmp_path, NO_FAULT)
    index.write(0, [b"grows"])
    assert disk.space()[1] > 0


async def test_offsets_rejects_on_a_full_disk_and_fails_on_a_failed_sync(
    tmp_path: Path, faults: ProcessFaults
) -> None:
    with offsets.FaultyOffsetsDisk(tmp_path / "data", faults, 0) as disk:
        write_fault(tmp_path, ProcessFault(full=True))
        await disk.write([(b"a", b"1")])  # 0 bytes have to be free
        write_fault(tmp_path, ProcessFault(sync_fails=True))
        with pytest.raises(OSError):
            await disk.write([(b"a", b"2")])
        await disk.write([(b"a", b"3")])
        assert list(disk.read()) == [(b"a", b"3")]
    with offsets.FaultyOffsetsDisk(tmp_path / "data", faults, 1) as disk:
        write_fault(tmp_path, ProcessFault(full=True))
        with pytest.raises(DiskFull):
            await disk.write([(b"a", b"4")])


async def test_slow_sync_takes_longer(tmp_path: Path, faults: ProcessFaults) -> None:
    clock = Clock()
    with offsets.FaultyOffsetsDisk(tmp_path / "data", faults, 0) as disk:
        write_fault(tmp_path, ProcessFault(sync_ms=200))
        begin_ms = clock.monotonic_ms()
        await disk.write([(b"a", b"1")])
        assert clock.monotonic_ms() - begin_ms >= 199


async def test_clock_fault_changes_the_wall_clock_only(
    tmp_path: Path, faults: ProcessFaults
) -> None:
    right, wrong = Clock(), FaultyClock(faults)
    write_fault(tmp_path, ProcessFault(clock_ms=-3_600_000))
    assert right.unix_ms() <= wrong.unix_ms() + 3_600_000 <= right.unix_ms()
    assert right.monotonic_ms() <= wrong.monotonic_ms() <= right.monotonic_ms()
    write_fault(tmp_path, ProcessFault(strobe_ms=100_000_000))
    seen = set[bool]()
    while len(seen) < 2:
        seen.add(wrong.unix_ms() > right.unix_ms())
        await asyncio.sleep(0)
