"""Goal: what the file says is wrong goes wrong with disk and clock, and nothing else.

Method: the disks of the services over real folders; each says what it did.
"""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from batonmq._common.clock import Clock
from batonmq.errors import DiskFull
from batonmq_server.storage.disk import RealDisk
from tools.faults.services import offsets, storage
from tools.faults.upsets import FINE, Upset, UpsetClock, Upsets


@pytest.fixture
def upsets(tmp_path: Path) -> Upsets:
    return Upsets(tmp_path / "node.json")


def tell(tmp_path: Path, upset: Upset) -> None:
    upset.tell(tmp_path, "node")


def test_without_a_file_nothing_is_wrong(upsets: Upsets) -> None:
    upsets.sync()
    upsets.grow()
    assert upsets.now() == FINE


def test_a_sync_fails_once_until_it_is_told_again(tmp_path: Path, upsets: Upsets) -> None:
    disk = storage.UpsetDisk(RealDisk(tmp_path / "data"), upsets)
    file = disk.create("log/0", 4_096)
    for _ in range(2):
        tell(tmp_path, Upset(sync_fails=True))
        with pytest.raises(OSError) as raised:
            file.sync()
        assert raised.value.errno == errno.EIO
        file.sync()
        tell(tmp_path, FINE)
        file.sync()


def test_what_a_failed_sync_was_to_write_is_gone(tmp_path: Path, upsets: Upsets) -> None:
    file = storage.UpsetDisk(RealDisk(tmp_path / "data"), upsets).create("log/0", 4_096)
    file.write(0, [b"safe"])
    file.sync()
    file.write(4, [b"un", b"safe"])
    tell(tmp_path, Upset(sync_fails=True))
    with pytest.raises(OSError):
        file.sync()
    assert file.read(0, 10) == b"safe" + bytes(6)
    assert Upset.has_failed(tmp_path, "node")
    assert not Upset.has_failed(tmp_path, "node")


def test_a_full_disk_takes_what_has_its_place_and_nothing_more(
    tmp_path: Path, upsets: Upsets
) -> None:
    disk = storage.UpsetDisk(RealDisk(tmp_path / "data"), upsets)
    log, index = disk.create("log/0", 4_096), disk.open("index/0", create=True)
    tell(tmp_path, Upset(full=True))
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
    tell(tmp_path, FINE)
    index.write(0, [b"grows"])
    assert disk.space()[1] > 0


async def test_offsets_refuses_on_a_full_disk_and_fails_with_a_failed_sync(
    tmp_path: Path, upsets: Upsets
) -> None:
    with offsets.UpsetDisk(tmp_path / "data", upsets, 0) as disk:
        tell(tmp_path, Upset(full=True))
        await disk.write([(b"a", b"1")])  # 0 bytes have to be free
        tell(tmp_path, Upset(sync_fails=True))
        with pytest.raises(OSError):
            await disk.write([(b"a", b"2")])
        await disk.write([(b"a", b"3")])
        assert list(disk.read()) == [(b"a", b"3")]
    with offsets.UpsetDisk(tmp_path / "data", upsets, 1) as disk:
        tell(tmp_path, Upset(full=True))
        with pytest.raises(DiskFull):
            await disk.write([(b"a", b"4")])


async def test_a_slow_sync_takes_longer(tmp_path: Path, upsets: Upsets) -> None:
    clock = Clock()
    with offsets.UpsetDisk(tmp_path / "data", upsets, 0) as disk:
        tell(tmp_path, Upset(sync_ms=200))
        begin_ms = clock.monotonic_ms()
        await disk.write([(b"a", b"1")])
        assert clock.monotonic_ms() - begin_ms >= 199


async def test_only_the_wall_clock_is_wrong(tmp_path: Path, upsets: Upsets) -> None:
    right, wrong = Clock(), UpsetClock(upsets)
    tell(tmp_path, Upset(clock_ms=-3_600_000))
    assert right.unix_ms() <= wrong.unix_ms() + 3_600_000 <= right.unix_ms()
    assert right.monotonic_ms() <= wrong.monotonic_ms() <= right.monotonic_ms()
    tell(tmp_path, Upset(strobe_ms=100_000_000))
    seen = set[bool]()
    while len(seen) < 2:
        seen.add(wrong.unix_ms() > right.unix_ms())
        await asyncio.sleep(0)
