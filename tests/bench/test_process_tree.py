"""Goal: the CPU time and the memory of a process tree are those of its processes, each once.

Method: lines of /proc with hand-made numbers, a folder instead of /proc, and a real process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.peers import process_tree
from bench.peers.process_tree import ProcessStat, parse, read_all, trees

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def line(pid: int, parent: int, name: str = "java", ticks: tuple[int, ...] = (0, 0, 0, 0)) -> str:
    """Return a line of /proc/PID/stat with 7 resident pages."""
    times = " ".join(map(str, ticks))
    return f"{pid} ({name}) S {parent} 1 1 0 -1 0 0 0 0 0 {times} 20 0 1 0 99 1000 7 0 0"


def test_cpu_time_includes_system_time_and_ended_children() -> None:
    stat = parse(line(12, 3, ticks=(100, 20, 3, 4)))
    assert stat == ProcessStat(12, 3, 127 / _TICKS, 7 * _PAGE)


@pytest.mark.parametrize("name", ["a b", "a) S 9 (b", ")"])
def test_name_with_spaces_and_brackets_does_not_move_the_fields(name: str) -> None:
    assert parse(line(12, 3, name, (1, 2, 3, 4))) == parse(line(12, 3, ticks=(1, 2, 3, 4)))


def test_tree_has_all_descendants_and_no_other_process() -> None:
    parents = {2: 1, 3: 2, 4: 3, 5: 1, 6: 5}
    processes = [ProcessStat(pid, parent, 0, 0) for pid, parent in parents.items()]
    assert {one.pid for one in trees([2], processes)} == {2, 3, 4}


def test_process_below_two_roots_is_counted_once() -> None:
    processes = [ProcessStat(2, 1, 5, 0), ProcessStat(3, 2, 7, 0)]
    assert sum(one.cpu_s for one in trees([2, 3, 2], processes)) == 12


def test_process_that_ends_during_the_reading_is_left_out(tmp_path: Path) -> None:
    for name in ("12", "13", "self", "meminfo"):
        (tmp_path / name).mkdir()
    (tmp_path / "12" / "stat").write_text(line(12, 1))
    assert [one.pid for one in read_all(tmp_path)] == [12]


def test_cpu_time_of_a_real_process_includes_its_ended_child() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    program = (
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {burn!r}], check=True)\n"
        "print('done', flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"done\n"
        assert process_tree.cpu_s([process.pid]) >= 0.25
        assert process_tree.rss_bytes([process.pid]) > 1024 * 1024
        assert process.stdin is not None
        process.stdin.close()
