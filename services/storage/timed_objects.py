"""An object store whose calls end in time, whatever its package does.

The packages of object stores, and a network file system, may block for ever. A reader of the log
must not: it may be a thread of the local disk, which the node waits for when its role changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from batonmq._common.threads import DaemonThreads
from batonmq_server.storage.tier_store import ObjectFiles, unreachable

log = logging.getLogger(__name__)

Value = TypeVar("Value")
READ_TIMEOUTS, WRITE_TIMEOUTS = 3, 12
"""Times `timeout_ms` after which a call is abandoned. A reader waits for `timeout_ms` only; what a
slow store answers later is there when the reader asks again."""
ABANDONED_MAX = 64
"""While so many abandoned calls have not returned, every call is refused: each has a thread."""


class TimedObjects:
    """Files of an object store, each call in a thread of its own and with a deadline.

    An abandoned call continues: it may still write or remove what its caller was to.

    Args:
        timeout_ms: Time that a reader waits for the store.
    """

    def __init__(self, files: ObjectFiles, timeout_ms: int) -> None:
        self._files, self._timeout_s = files, timeout_ms / 1000
        self._threads, self._submitting = DaemonThreads("object-call"), Lock()
        self._abandoned: set[Future[Any]] = set()

    def write(self, name: str, content: bytes) -> None:
        """See ObjectFiles."""
        call = partial(self._files.write, name, content)
        self._call(name, call, self._timeout_s * WRITE_TIMEOUTS)

    def read(self, name: str) -> bytes:
        """See ObjectFiles."""
        return self._read(name, partial(self._files.read, name))

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """See ObjectFiles."""
        return self._read(name, partial(self._files.read_range, name, begin, end))

    def remove(self, name: str) -> None:
        """See ObjectFiles."""
        self._read(name, partial(self._files.remove, name))

    def names(self, folder: str) -> list[str]:
        """See ObjectFiles."""
        return self._read(folder, partial(self._files.names, folder))

    def _read(self, name: str, call: Callable[[], Value]) -> Value:
        return self._call(name, call, self._timeout_s * READ_TIMEOUTS)

    def _call(self, name: str, call: Callable[[], Value], timeout_s: float) -> Value:
        """Return the result of a call.

        Raises:
            Unreachable: the call has not returned in time, or too many others have not.
        """
        if (count := len(self._abandoned)) >= ABANDONED_MAX:
            raise unreachable(name, f"{count} earlier calls have not returned")
        with self._submitting:
            future = self._threads.submit(call)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():  # the error of the call itself
                raise
        self._abandoned.add(future)
        future.add_done_callback(self._abandoned.discard)
        log.warning("object store does not answer object=%s seconds=%g", name, timeout_s)
        raise unreachable(name, f"no answer within {timeout_s:g} s")
