"""Goal: batches that a process keeps are read back whole by the next one, or dropped with a
warning; the file is bounded, and a failure never stops the process.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from batonmq_server.runtime import unsent_batches
from batonmq_server.runtime.unsent_batches import FILE, UnsentBatches

BATCHES = [b"one", b"", b"three" * 1_000]


def test_batches_are_read_back_until_they_are_removed(tmp_path: Path) -> None:
    file = UnsentBatches(tmp_path)
    assert file.read() == []
    assert file.write(BATCHES)
    assert UnsentBatches(tmp_path).read() == BATCHES == file.read()
    assert file.write([b"newer"])
    assert file.read() == [b"newer"]
    file.remove()
    assert file.read() == []
    file.remove()  # again: no error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cut", [0, 5, 11, 12, 200, -1])
def test_torn_file_is_dropped_with_a_warning(
    tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    file = UnsentBatches(tmp_path)
    file.write(BATCHES)
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:cut])
    assert file.read() == []
    assert f"unsent metrics are lost: {path} is damaged" in caplog.text
    assert not path.exists()


@pytest.mark.parametrize("place", [0, 4, 8, 12, 40, -1])
def test_file_with_one_wrong_bit_is_dropped(tmp_path: Path, place: int) -> None:
    file = UnsentBatches(tmp_path)
    file.write(BATCHES)
    raw = bytearray((tmp_path / FILE).read_bytes())
    raw[place] ^= 1
    (tmp_path / FILE).write_bytes(raw)
    assert file.read() == []


def test_oldest_batches_beyond_the_limit_are_lost_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(unsent_batches, "BYTES_MAX", 30)
    file = UnsentBatches(tmp_path)
    assert not file.write([b"a" * 9, b"b" * 9, b"c" * 9])
    assert file.read() == [b"b" * 9, b"c" * 9]
    assert "oldest unsent metrics are lost batches=1 limit=30" in caplog.text
    assert file.write([b"a" * 11, b"b" * 11])
    assert not file.write([b"a" * 31])
    assert file.read() == []


def test_file_that_can_not_be_written_or_read_loses_batches_and_raises_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = UnsentBatches(tmp_path / "missing")
    assert not file.write(BATCHES)
    assert f"unsent metrics are lost batches={len(BATCHES)}" in caplog.text
    (tmp_path / FILE).mkdir()
    assert UnsentBatches(tmp_path).read() == []
    assert "unsent metrics can't be read" in caplog.text
    UnsentBatches(tmp_path).remove()
    assert "file of sent metrics is not removed" in caplog.text
