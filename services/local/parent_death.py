"""Start a program that is killed when its parent process ends, however the parent ends.

Run as a script by a bare interpreter:

    python -I -S parent_death.py PARENT_PID PROGRAM ARGUMENT...

The script asks the kernel for SIGKILL on the parent's death, a request that survives exec, and
then executes the program under the same process id. Only Linux has this request; elsewhere the
script just executes the program. It is a script and not a `preexec_fn`, because Python code
between fork and exec is unsafe in a process with threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends.

    Args:
        parent: Process id of the parent; if it has ended already, this process exits.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the request
        sys.exit(1)


def main() -> None:
    """Tie this process to its parent, then execute the program."""
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
