"""Syncs of files that the kernel makes by itself, without a thread of this process.

A thread of Python that syncs a file needs the interpreter's lock before it, after it, and to wake
the event loop, and each time waits for what the loop does meanwhile. The asynchronous I/O of Linux
(`io_submit`) takes the same `fdatasync` and makes a descriptor readable when it has ended. See
docs/explanation/decisions/0068-the-kernel-syncs-the-log.md.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from functools import partial

from batonmq._common.threads import BegunCall

try:
    from caio.linux_aio import Context, Operation
except ImportError:  # not Linux, before its version 4.18, or no compiled caio for this platform
    _INSTALLED = False
else:
    _INSTALLED = True

log = logging.getLogger(__name__)

_REQUESTS_MAX = 8
_REFUSALS = (OSError, OverflowError, SystemError, ValueError)
"""What caio raises if the kernel, or a filter of the container, does not take a request."""


class KernelSync:
    """Syncs files by the asynchronous I/O of the kernel. It is opened when it is first used."""

    def __init__(self) -> None:
        self._context: Context | None = None
        self._refused = not _INSTALLED
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self, descriptor: int) -> BegunCall[None] | None:
        """Begin to make everything written to a file durable, as `os.fdatasync` does.

        Args:
            descriptor: The open file. It must not be closed before the call has ended; -1 for none.

        Returns:
            A call that raises OSError if the sync fails. None, if the kernel does not take it: a
            thread has to sync the file.
        """
        if descriptor < 0 or self._refused:
            return None
        try:
            context = self._context or self._open()
            begun = BegunCall[None]()
            operation = Operation.fdsync(descriptor)
            operation.set_callback(partial(_end, begun))
            context.submit(operation)
        except _REFUSALS as error:
            log.warning("the kernel takes no syncs, threads make them error=%s", error)
            self._refused = True
            return None
        return begun

    def close(self) -> None:
        """Take no more syncs; call it when all have ended."""
        self._refused = True
        if self._loop is not None and self._context is not None:
            self._loop.remove_reader(self._context.fileno)
        self._context = None

    def _open(self) -> Context:
        self._context = Context(_REQUESTS_MAX)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._context.fileno, self._ended)
        return self._context

    def _ended(self) -> None:
        """Take the syncs that have ended."""
        if self._context is not None:
            with suppress(BlockingIOError):
                self._context.poll()
            self._context.process_events()


def _end(begun: BegunCall[None], result: int) -> None:
    """Take the outcome of a sync.

    Args:
        result: 0, or the negative number of an error, as an unsigned number of 64 bits.
    """
    number = -result & 0xFFFF_FFFF_FFFF_FFFF
    begun.end(None, OSError(number, os.strerror(number)) if number else None)
