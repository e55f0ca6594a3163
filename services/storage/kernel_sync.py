"""Syncs of files that the kernel makes by itself, without a thread of this process.

A thread of Python that syncs a file needs the interpreter's lock before it, after it, and to wake
the event loop, and each time waits for what the loop does meanwhile. The asynchronous I/O of Linux
(`io_submit`) takes the same `fdatasync` and makes a descriptor readable when it has ended. See
docs/explanation/decisions/0068-the-kernel-syncs-the-log.md.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from contextlib import suppress
from functools import partial

from batonmq._common.outside_call import OutsideCall

try:
    from caio.linux_aio import Context, Operation
except ImportError as error:  # not Linux, an old kernel, no compiled caio, or no `io_setup` allowed
    _MISSING = str(error)
else:
    _MISSING = ""

log = logging.getLogger(__name__)

_REQUESTS_MAX = 8
_ERRORS = 4_096
"""Bound of the error numbers of Linux."""
_REFUSALS = (OSError, OverflowError, SystemError, ValueError)
"""What caio raises if the kernel, or a filter of the container, does not take a request."""


class KernelSync:
    """Syncs files by the asynchronous I/O of the kernel. It is opened when it is first used."""

    def __init__(self) -> None:
        self._context: Context | None = None
        self._begun: set[OutsideCall[None]] = set()
        self._refused = False

    def begin(self, descriptor: int) -> OutsideCall[None] | None:
        """Begin to make everything written to a file durable, as `os.fdatasync` does.

        Args:
            descriptor: The open file. It must not be closed before the call has ended; -1 for none.

        Returns:
            A call that raises OSError if the sync fails. None, if the kernel does not take it: a
            thread has to sync the file.
        """
        if descriptor < 0 or self._refused:
            return None
        if _MISSING:
            self._refuse(_MISSING)
            return None
        try:
            context = self._context or self._open()
            begun = OutsideCall[None]()
            operation = Operation.fdsync(descriptor)
            operation.set_callback(partial(self._end, begun))
            context.submit(operation)
        except _REFUSALS as refusal:
            self._refuse(refusal)
            return None
        self._begun.add(begun)
        return begun

    def close(self) -> None:
        """Take no more syncs. Those under way fail: whether the files are on disk is unknown."""
        self._refused = True
        if self._context is not None:
            asyncio.get_running_loop().remove_reader(self._context.fileno)
        self._context = None
        self._fail("the kernel syncs no more files")

    def _refuse(self, why: object) -> None:
        log.warning("the kernel does not sync the log, threads do error=%s", why)
        self._refused = True

    def _open(self) -> Context:
        self._context = context = Context(_REQUESTS_MAX)
        os.set_inheritable(context.fileno, False)
        asyncio.get_running_loop().add_reader(context.fileno, partial(self._take_ended, context))
        return context

    def _take_ended(self, context: Context) -> None:
        """Take the syncs that have ended. If that fails, their outcome is unknown: all fail."""
        try:
            with suppress(BlockingIOError):  # an earlier call has taken what made it readable
                context.poll()
            context.process_events()
        except SystemError as error:
            self._fail(f"the kernel does not say how a sync has ended: {error}")

    def _fail(self, why: str) -> None:
        begun, self._begun = self._begun, set()
        for one in begun:
            one.end(None, OSError(errno.EIO, why))

    def _end(self, begun: OutsideCall[None], result: int) -> None:
        """Take the outcome of a sync.

        Args:
            result: 0, or the negative number of an error, as an unsigned number of 64 bits.
        """
        self._begun.discard(begun)
        number = -result & 0xFFFF_FFFF_FFFF_FFFF
        why = os.strerror(number) if number < _ERRORS else "unknown outcome of a sync"
        begun.end(None, OSError(number, why) if number else None)
