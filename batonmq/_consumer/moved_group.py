"""Calls to the offsets set that keeps a group, also while the group moves to another set."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol, TypeVar

from baton.common.v1 import error_pb2
from batonmq._common.rpc import error_from_pb
from batonmq._connection.directory import Directory
from batonmq.errors import GroupMoved, NotServing

GROUP_MOVED = (GroupMoved, NotServing)
"""Refusals of a set that does not keep the group, or not yet: repeat the call."""
TRIES_MAX = 20
T = TypeVar("T")


class ItemOutcome(Protocol):
    """The outcome of one item of a batched call."""

    @property
    def error(self) -> error_pb2.Error:
        """Why the item was refused."""
        ...


def raise_if_moved(outcomes: Iterable[ItemOutcome]) -> None:
    """Raise the first refusal that says that the set does not keep the group.

    Raises:
        GroupMoved, NotServing: the set does not keep the group, or not yet.
    """
    for outcome in outcomes:
        if outcome.error.reason in _REASONS:
            raise error_from_pb(outcome.error)


async def repeat_while_moved(directory: Directory, call: Callable[[], Awaitable[T]]) -> T:
    """Return the answer of `call`, which is repeated while the group moves to another set.

    Raises:
        GroupMoved, NotServing: the group is still moving after the last try.
    """
    failures = 0
    while True:
        try:
            return await call()
        except GROUP_MOVED as error:
            if failures == TRIES_MAX:
                raise
            await directory.pause(error, failures)
            failures += 1


_REASONS = {error_pb2.Reason.Value(f"REASON_{kind.reason}") for kind in GROUP_MOVED}
