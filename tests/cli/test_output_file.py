"""Goal: a file that a command writes is there in full, or not at all.

Method: write files in a temporary folder, with and without a failure in between.
"""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from batonmq.cli.output_file import replaced


def _write_and_fail(path: Path) -> None:
    with replaced(path) as file:
        file.write("a part")
        file.flush()
        raise ConnectionError


def test_failure_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError):
        _write_and_fail(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_failure_keeps_the_former_contents(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("kept")
    with pytest.raises(ConnectionError):
        _write_and_fail(path)
    assert [one.name for one in tmp_path.iterdir()] == ["out"]
    assert path.read_text() == "kept"


def test_new_file_has_the_usual_mode_and_a_replaced_one_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "out"
    before = os.umask(0o027)
    try:
        with replaced(path) as file:
            file.write("1")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o600)
    with replaced(path) as file:
        file.write("2")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("2", 0o600)


def test_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("1")
    link.symlink_to(target)
    with replaced(link) as file:
        file.write("2")
    assert link.is_symlink()
    assert target.read_text() == "2"


def test_pipe_is_written_directly(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    with replaced(pipe) as file:
        file.write("x")
    reader.join(30)
    assert read == ["x"]
    assert pipe.is_fifo()
