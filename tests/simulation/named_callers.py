"""Access control of the simulation: identifies callers by their names, and allows every call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from batonmq_server.runtime.access.authenticator import Caller, Metadata
from batonmq_server.runtime.access.guard import Guard
from batonmq_server.runtime.access.permissions import Permission


class NamedCallers(Guard):
    """A guard for which the name of the calling process is its identity."""

    def caller(self, context: Any) -> Caller:
        return Caller(context.peer())

    def early_caller(self, metadata: Metadata) -> None:
        return None

    def check(self, path: str, caller: Caller, permissions: Sequence[Permission]) -> None: ...

    def missing(
        self, path: str, caller: Caller, permissions: Iterable[Permission]
    ) -> list[Permission]:
        return []

    def require(self, context: Any, *permissions: Permission) -> None: ...

    def allows(self, context: Any, permission: Permission) -> bool:
        return True


def turn_on(guard: Guard) -> None:
    """Make the guard of a process identify its callers."""
    guard.__class__ = NamedCallers
    guard.on = True
