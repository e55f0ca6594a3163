"""Settings of malloc for processes that allocate large buffers."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES_MAX = 128 * 1024 * 1024
LARGE_BYTES = 32 * 1024 * 1024


def keep_freed_memory() -> None:
    """Let malloc keep up to 128 MiB of freed memory for the next large buffer.

    By default glibc returns every buffer of some hundred KiB to the kernel; the next one costs a
    page fault per page, which takes longer than to fill it. Other C libraries ignore this.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES_MAX)
