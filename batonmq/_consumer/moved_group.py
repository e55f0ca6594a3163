"""Calls to the offsets set that keeps a group, also while the group is moved to another one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol, TypeVar

from baton.common.v1 import error_pb2
from batonmq._common.rpc import error_from_pb
from batonmq._connection.directory import Directory
from batonmq.errors import GroupMoved, NotServing

GROUP_MOVED = (GroupMoved, NotServing)
"""Refusals of a set that does not keep the group, or not yet: the call has to be repeated."""
TRIES_MAX = 20
T = TypeVar("T")


class ItemOutcome(Protocol):
    """An item of a batched answer."""

    @property
    def error(self) -> error_pb2.Error:
        """Why it was refused."""
        ...


def raise_if_moved(outcomes: Iterable[ItemOutcome]) -> None:
    """Look whether the set that has answered keeps the group.

    Raises:
        GroupMoved, NotServing: it does not.
    """
    for outcome in outcomes:
        if outcome.error.reason in _REASONS:
            raise error_from_pb(outcome.error)


async def repeat_while_moved(directory: Directory, ask: Callable[[], Awaitable[T]]) -> T:
    """The answer of `ask`, which is called again while the group is elsewhere.

    Raises:
        GroupMoved, NotServing: it does not arrive.
    """
    failures = 0
    while True:
        try:
            return await ask()
        except GROUP_MOVED as error:
            if failures == TRIES_MAX:
                raise
            await directory.pause(error, failures)
            failures += 1


_REASONS = {error_pb2.Reason.Value(f"REASON_{kind.reason}") for kind in GROUP_MOVED}
