"""Refuses channels in a process that was forked after its parent had made one.

Such a process inherits the locks of gRPC without its threads: it hangs at its first call, or
crashes.
"""

from __future__ import annotations

import os

from batonmq.errors import Retry, Unreachable


class ForkedProcess(Unreachable):
    """The process was forked after its parent had used a client, and gRPC does not work in it."""

    retry = Retry.NEVER
    remedy = (
        "Open the first client after the fork, or start processes by spawn or forkserver: "
        'multiprocessing.get_context("spawn").'
    )


class ProcessGuard:
    """Remembers the process in which it was asked first."""

    def __init__(self) -> None:
        self._pid = 0

    def check(self) -> None:
        """Return in the process of the first call.

        Raises:
            ForkedProcess: It was another process.
        """
        pid = os.getpid()
        if self._pid not in (0, pid):
            raise ForkedProcess(
                f"process {pid} was forked from process {self._pid}, which had used a client"
            )
        self._pid = pid


CHANNELS = ProcessGuard()
"""Asked before each channel is made."""
