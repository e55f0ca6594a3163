"""The errors of a process, or a machine, with too many open files.

An attempt to open a file then fails without any change, and may succeed later. So such an error is
never the end of a process: work is put off, and calls are rejected with OVERLOADED.
"""

from __future__ import annotations

import errno

from batonmq.errors import Overloaded

NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""Error numbers of an attempt to open a file without a free descriptor."""
_RETRY_MS = 1_000


def is_shortage(error: BaseException) -> bool:
    """Return whether `error` is that of an attempt to open a file without a free descriptor."""
    return isinstance(error, OSError) and error.errno in NO_DESCRIPTORS


def no_descriptors() -> Overloaded:
    """Return the error of a call that needs to open a file."""
    return Overloaded(
        "the process has no free file descriptor",
        remedy="Raise the limit of open files of the process (ulimit -n), or lower its "
        "connections_max.",
        retry_after_ms=_RETRY_MS,
    )
