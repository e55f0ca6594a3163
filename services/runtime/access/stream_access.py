"""The permissions and the quota of the caller of an open stream, for its servicer."""

from __future__ import annotations

from collections.abc import Callable

from batonmq.errors import PermissionDenied
from batonmq_server.runtime.access.authenticator import Context
from batonmq_server.runtime.access.guard import Guard
from batonmq_server.runtime.access.permissions import Permission


class StreamAccess:
    """What the caller of a stream may do, at any time while the stream is open.

    The caller is authenticated once: admission ends the stream when its credentials end. While
    access control is off, everything is allowed.

    Args:
        path: Full path of the method.
        context: The call, which admission has let pass.
    """

    def __init__(self, guard: Guard, path: str, context: Context) -> None:
        self._guard, self._path = guard, path
        self._caller = guard.caller(context) if guard.on else None

    def require(self, *permissions: Permission) -> None:
        """Return if the caller has all of `permissions` now.

        Raises:
            PermissionDenied: permissions are missing; it is counted and audited.
        """
        if self._caller is None:
            return
        try:
            self._guard.check(self._path, self._caller, permissions)
        except PermissionDenied as error:
            self._guard.count_rejection(self._path, error, self._caller.identity)
            raise

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """See `Guard.subscribe`: permissions may be missing after each call of `callback`."""
        return self._guard.subscribe(callback)

    def read_wait_ms(self) -> int:
        """Return how long to wait before the next read; 0 if the caller may read now.

        The time is bounded: ask again after it, because the limit may have changed.
        """
        if self._caller is None:
            return 0
        now_ms = self._guard.clock.monotonic_ms()
        return self._guard.quotas.read_wait_ms(self._caller.identity, now_ms)

    def read_bytes_max(self) -> int | None:
        """Return what a quota allows one read to have: a second's worth; None for no limit."""
        if self._caller is None:
            return None
        rate = self._guard.quotas.read_rate(self._caller.identity)
        return None if rate is None else max(rate, 1)

    def charge_read(self, byte_count: int) -> None:
        """Count one read of so many bytes for the quota of the caller."""
        if self._caller is not None:
            self._guard.quotas.charge_read(self._caller.identity, byte_count)
