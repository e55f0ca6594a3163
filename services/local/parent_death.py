"""Starts a program that dies with the process that started it, however that one ends.

Run as a script with the bare interpreter: `python -I -S parent_death.py PARENT_PID PROGRAM ARGUMENT…`.
It asks the kernel for SIGKILL on the parent's death, which outlasts exec, and becomes the program:
the process id is the program's. Only Linux can do that; elsewhere it just becomes the program.
A program between fork and exec is no place for Python code in a process with threads, so this is
a program of its own and not a `preexec_fn`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Tie this process to its parent, of that process id."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was asked
        sys.exit(1)


def main() -> None:
    """Tie this process to its parent, then become the program."""
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
