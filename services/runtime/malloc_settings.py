"""What the process does with memory that it has freed."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES_MAX = 128 * 1024 * 1024
LARGE_BYTES = 32 * 1024 * 1024


def keep_freed_memory() -> None:
    """Have malloc keep what it is given back, up to 128 MiB, for the next large buffer.

    By default glibc returns every buffer of some hundred KiB to the kernel, and each page of the
    next one is faulted in anew, which takes longer than to fill it. Only glibc knows how to.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES_MAX)
