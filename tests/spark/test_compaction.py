"""Goal: a compaction leaves no file that neither its table nor a reader needs.

Method: a table with files that were replaced before its last checkpoint, and with copies of them
that were never committed; the times of some are set back.
"""

from __future__ import annotations

import os
import shutil
from datetime import date
from pathlib import Path
from threading import Event

import deltalake
import pyarrow as pa
import pytest

from batonmq._process.config import load
from batonspark import compaction
from batonspark.settings import PREFIX, JobSettings
from batonspark.tables import BRONZE, RetentionLimits, compact_table

DAY = date(2026, 1, 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A table of three commits in one day."""
    for number in range(3):
        rows = pa.table({"n": [number], "date": pa.array([DAY], pa.date32())})
        deltalake.write_deltalake(tmp_path, rows, mode="append", partition_by=["date"])
    return tmp_path


def compact(path: Path, vacuum_hours: int) -> set[Path]:
    """Compact the table; return the files that are left."""
    limits = RetentionLimits(date(2025, 1, 1), vacuum_hours)
    compact_table(str(path), BRONZE, limits, date(2026, 1, 2))
    return set(path.rglob("*.parquet")) - set(path.glob("_delta_log/*"))


def committed(path: Path) -> set[Path]:
    return {path / uri for uri in deltalake.DeltaTable(path).file_uris()}


def test_files_that_were_replaced_before_the_last_checkpoint_are_removed(path: Path) -> None:
    table = deltalake.DeltaTable(path)
    table.optimize.compact()
    table.create_checkpoint()
    left = compact(path, 0)
    assert len(left) == 1
    assert left == committed(path)


def test_files_that_were_never_committed_are_removed_once_they_are_old(path: Path) -> None:
    known = next(path.glob("date=*/*.parquet"))
    old, new = (Path(shutil.copy(known, known.with_stem(name))) for name in ("old", "new"))
    os.utime(old, (0, 0))
    assert compact(path, 1) >= {new}
    assert not old.exists()
    assert pa.table(deltalake.DeltaTable(path).scan(["n"]).read_all()).num_rows == 3


def test_files_that_left_the_table_lately_are_kept_for_its_readers(path: Path) -> None:
    before = committed(path)
    for file in before:
        os.utime(file, (0, 0))
    left = compact(path, 1)
    assert left > before
    assert not committed(path) & before


class Hours(Event):
    """An event that is set after some hours, which pass at once."""

    def __init__(self, hours: int) -> None:
        super().__init__()
        self.left_s = hours * 3600

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout
        self.left_s -= int(timeout)
        return self.left_s < 0


def test_process_compacts_regularly_although_one_compaction_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Event] = []

    def fail(settings: JobSettings, ended: Event) -> bool:
        made.append(ended)
        raise OSError("no space")

    monkeypatch.setattr(compaction, "compact", fail)
    ended = Hours(7)
    settings = load(JobSettings, PREFIX, {"BATON_SPARK_COMPACT_HOURS": "3"})
    compaction.compact_regularly(settings, ended)
    assert made == [ended, ended]
