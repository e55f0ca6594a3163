"""Which messages of a queue may be handled now, if those of one ordering key go in order. Pure.

A message waits until no earlier message of its key waits or is handled. A key is *occupied* from
the time that one of its messages is ready until the last one is finished. A message that failed and
is to be handled again keeps its key, so no later message of the key overtakes it. Messages without
a key wait for none.

Of the messages that are ready, the one with the lowest offset is taken first. So the committed
offset of the queue moves as early as possible.

The schedule has no limit of its own. It holds the messages that wait in the client, which flow
control limits, and those in handlers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nsmallest
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")


class Taken(NamedTuple, Generic[Item]):
    """A message to be handled now.

    Attributes:
        again: Whether it was taken before, and has failed.
    """

    offset: int
    item: Item
    again: bool


@dataclass(frozen=True, slots=True)
class FailedMessage(Generic[Item]):
    """A message that failed and is to be handled again.

    Attributes:
        failed_ms: When its last call failed, by the monotonic clock.
    """

    key: str | None
    item: Item
    failed_ms: int


class KeySchedule(Generic[Item]):
    """The messages of one queue that wait, and the keys of those in handlers.

    Attributes:
        waiting_count: Messages that were never taken.
    """

    def __init__(self) -> None:
        self.waiting_count = 0
        self._ready: list[int] = []
        self._waiting: dict[int, tuple[str | None, Item]] = {}
        self._occupied: dict[str, deque[int] | None] = {}
        self._taken: dict[int, str | None] = {}
        self._failed: dict[int, FailedMessage[Item]] = {}
        self._given_up: set[str] = set()

    @property
    def ready(self) -> bool:
        """Whether a message may be taken."""
        return bool(self._ready)

    @property
    def taken_count(self) -> int:
        """Number of messages in handlers, and of those that are to be handled again."""
        return len(self._taken)

    @property
    def failed_count(self) -> int:
        """Number of messages that are to be handled again."""
        return len(self._failed)

    @property
    def lowest_failed(self) -> tuple[int, FailedMessage[Item]] | None:
        """The message with the lowest offset that is to be handled again, and its offset."""
        return min(self._failed.items(), key=lambda one: one[0], default=None)

    def add(self, offset: int, key: str | None, item: Item) -> None:
        """Add a message that arrived; its offset is greater than that of any other of its key."""
        self.waiting_count += 1
        self._waiting[offset] = key, item
        if key is not None and key in self._occupied:
            behind = self._occupied[key]
            if behind is None:
                behind = self._occupied[key] = deque()
            behind.append(offset)
            return
        if key is not None:
            self._occupied[key] = None
        heappush(self._ready, offset)

    def take(self) -> Taken[Item] | None:
        """Take the next message; its key is occupied until `finish`. None if none is ready."""
        if not self._ready:
            return None
        offset = heappop(self._ready)
        failed = self._failed.pop(offset, None)
        if failed is not None:
            return Taken(offset, failed.item, again=True)
        key, item = self._waiting.pop(offset)
        self.waiting_count -= 1
        self._taken[offset] = key
        return Taken(offset, item, again=False)

    def peek(self, count_max: int) -> Iterable[tuple[int, Item]]:
        """Return the offsets and items that `take` would return next, without a change.

        It ends before a message that has failed.
        """
        for offset in nsmallest(count_max, self._ready):
            if offset in self._failed:
                return
            yield offset, self._waiting[offset][1]

    def finish(self, offset: int) -> bool:
        """Note that a message is handled, or is not to be handled here.

        Returns:
            Whether the next message of its key is ready now.
        """
        key = self._taken.pop(offset, None)
        self._failed.pop(offset, None)
        return key is not None and self._free(key)

    def fail(self, offset: int, item: Item, now_ms: int) -> None:
        """Note that a taken message has failed; it keeps its key until it is handled again."""
        self._failed[offset] = FailedMessage(self._taken[offset], item, now_ms)

    def due(self, offset: int) -> bool:
        """Make a failed message ready; return whether it still waits for that."""
        if offset not in self._failed or offset in self._ready:
            return False
        heappush(self._ready, offset)
        return True

    def give_up(self, offset: int) -> None:
        """Note that a taken message is not handled under this grant; its key stays occupied.

        The message is delivered again under the next grant, before later messages of its key.
        """
        key = self._taken.pop(offset, None)
        self._failed.pop(offset, None)
        if key is not None:
            self._given_up.add(key)

    def give_up_failed(self) -> list[Item]:
        """Give up every message that is to be handled again, and return them."""
        failed = sorted(self._failed.items())
        offsets = {offset for offset, _ in failed}
        self._ready = [offset for offset in self._ready if offset not in offsets]
        heapify(self._ready)
        for offset, _ in failed:
            self.give_up(offset)
        return [one.item for _, one in failed]

    def begin_grant(self) -> None:
        """Begin a new grant with the messages in handlers; those given up are started again."""
        given_up, self._given_up = self._given_up, set()
        for key in given_up:
            self._free(key)

    def drop_waiting(self) -> None:
        """Drop the messages that were never taken; they are delivered again."""
        self._ready = [offset for offset in self._ready if offset in self._failed]
        heapify(self._ready)
        self._waiting.clear()
        self.waiting_count = 0
        kept = self._given_up.union(key for key in self._taken.values() if key is not None)
        self._occupied = dict.fromkeys(kept)

    def forget(self) -> None:
        """Drop all messages, also those in handlers: their results do not count any more."""
        self._failed.clear()
        self._taken.clear()
        self._given_up.clear()
        self.drop_waiting()

    def _free(self, key: str) -> bool:
        """Make the next message of a key ready; return whether there is one."""
        behind = self._occupied.get(key)
        if not behind:
            self._occupied.pop(key, None)
            return False
        heappush(self._ready, behind.popleft())
        return True
