"""Freed memory is kept for the next large buffer.

Method: a process of its own fills large buffers and counts its page faults, because a test
process has threads and buffers of its own.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from batonmq_server.runtime.malloc_settings import keep_freed_memory

def faults(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        held = [bytearray(512 * 1024) for _ in range(8)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "kept":
    keep_freed_memory()
faults(2)
print(faults(50))
"""
PAGES = 50 * 8 * 512 * 1024 // 4096


def faults(kept: str) -> int:
    command = [sys.executable, "-c", PROGRAM, kept]
    return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has mallopt")
def test_freed_large_buffers_are_reused_without_page_faults() -> None:
    assert faults("kept") < PAGES / 10 < PAGES / 2 < faults("given back")
