"""CPU time and memory of process trees, from /proc."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The parts of /proc/PID/stat that the bench needs.

    Attributes:
        cpu_s: CPU time of the process, of its ended threads, and of ended children that it has
            waited for.
    """

    pid: int
    parent: int
    cpu_s: float
    rss_bytes: int


def parse(text: str) -> ProcessStat:
    """Return the parts of a line of /proc/PID/stat; the name in it may contain any character."""
    pid, _, rest = text.partition(" ")
    fields = rest.rpartition(")")[2].split()
    ticks = sum(map(int, fields[11:15]))
    return ProcessStat(
        int(pid), int(fields[1]), ticks / _TICKS_PER_S, int(fields[21]) * _PAGE_BYTES
    )


def read_all(proc: Path = PROC) -> list[ProcessStat]:
    """Return all processes; one that ends meanwhile is left out."""
    found = []
    for folder in proc.iterdir():
        if folder.name.isdecimal():
            try:
                found.append(parse((folder / "stat").read_text()))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def trees(roots: Iterable[int], processes: Sequence[ProcessStat]) -> list[ProcessStat]:
    """Return the processes with the ids `roots` and all their descendants, each once."""
    children: dict[int, list[ProcessStat]] = defaultdict(list)
    for process in processes:
        children[process.parent].append(process)
    wanted = set(roots)
    left = [process for process in processes if process.pid in wanted]
    found: dict[int, ProcessStat] = {}
    while left:
        process = left.pop()
        if process.pid not in found:
            found[process.pid] = process
            left += children[process.pid]
    return list(found.values())


def cpu_s(roots: Iterable[int]) -> float:
    """Return the CPU time that the trees have used."""
    return sum(process.cpu_s for process in trees(roots, read_all()))


def rss_bytes(roots: Iterable[int]) -> int:
    """Return the resident memory of the trees."""
    return sum(process.rss_bytes for process in trees(roots, read_all()))
