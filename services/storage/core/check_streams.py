"""The streams on which a leader asks producers what became of their transactions. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from batonmq.errors import Overloaded

STREAMS_MAX = 10_000
WAITING_MAX, WAITING_BYTES_MAX = 1_024, 16 * 1024 * 1024
"""Checks that wait to be sent on one stream, and their bytes; a group whose streams all have as
many is not asked more."""

Check = TypeVar("Check")


class CheckStream(Generic[Check]):
    """The open stream of one producer.

    Attributes:
        may_ask: Whether the producer may be asked about a message of a topic.
        notify: Called when a check was added.
        waiting: Checks that were not sent yet, with topic, turn and size.
    """

    def __init__(
        self, group: str, may_ask: Callable[[str], bool], notify: Callable[[], None]
    ) -> None:
        self.group, self.may_ask, self.notify = group, may_ask, notify
        self.waiting: deque[tuple[str, Check, int, int]] = deque()
        self._waiting_bytes = 0

    @property
    def has_room(self) -> bool:
        """Whether it takes more checks."""
        return len(self.waiting) < WAITING_MAX and self._waiting_bytes < WAITING_BYTES_MAX

    def add(self, topic: str, check: Check, turn: int, size: int) -> None:
        """Add a check of `size` bytes."""
        self.waiting.append((topic, check, turn, size))
        self._waiting_bytes += size
        self.notify()

    def take(self) -> list[Check]:
        """Return the waiting checks and remove them."""
        checks = [check for _, check, _, _ in self.waiting]
        self.waiting.clear()
        self._waiting_bytes = 0
        return checks


class CheckStreams(Generic[Check]):
    """The open streams of a leader by producer group."""

    def __init__(self) -> None:
        self._groups: dict[str, list[CheckStream[Check]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def count(self, group: str) -> int:
        """Return the number of streams of a group."""
        return len(self._groups.get(group, ()))

    def open(
        self, group: str, may_ask: Callable[[str], bool], notify: Callable[[], None]
    ) -> CheckStream[Check]:
        """Open a stream.

        Raises:
            Overloaded: `STREAMS_MAX` streams are open.
        """
        if self._count >= STREAMS_MAX:
            raise Overloaded(
                f"{STREAMS_MAX} streams of checks are open already; that is the limit",
                remedy="Share one Producer per process.",
                retry_after_ms=1_000,
                facts={"limit": STREAMS_MAX},
            )
        stream: CheckStream[Check] = CheckStream(group, may_ask, notify)
        self._groups.setdefault(group, []).append(stream)
        self._count += 1
        return stream

    def close(self, stream: CheckStream[Check]) -> None:
        """Close a stream. Its unsent checks go to another stream of the group, if there is one."""
        streams = self._groups[stream.group]
        streams.remove(stream)
        self._count -= 1
        if not streams:
            del self._groups[stream.group]
        for waiting in stream.waiting:
            self.ask(stream.group, *waiting)
        stream.waiting.clear()

    def with_room(self) -> set[str]:
        """Return the groups with a stream that takes more checks."""
        return {
            group
            for group, streams in self._groups.items()
            if any(stream.has_room for stream in streams)
        }

    def able(self, group: str, topic: str) -> list[CheckStream[Check]]:
        """Return the streams of a group that may be asked about messages of a topic.

        It takes a look at the permissions of each producer of the group.
        """
        return [one for one in self._groups.get(group, ()) if one.may_ask(topic)]

    def ask(self, group: str, topic: str, check: Check, turn: int, size: int = 0) -> bool:
        """Put a check on a stream of a group that may be asked; False if there is none.

        Args:
            turn: Which of these streams. Consecutive checks of a transaction have consecutive
                numbers, so that one producer that does not answer gets only some.
            size: Bytes of the check.
        """
        return self.put(self.able(group, topic), topic, check, turn, size)

    @staticmethod
    def put(
        able: Sequence[CheckStream[Check]], topic: str, check: Check, turn: int, size: int = 0
    ) -> bool:
        """As `ask`, with the streams that `able` has just returned."""
        if not able:
            return False
        stream = able[turn % len(able)]
        if not stream.has_room:
            with_room = [one for one in able if one.has_room] or able
            stream = with_room[turn % len(with_room)]
        stream.add(topic, check, turn, size)
        return True

    def end_all(self) -> None:
        """Wake every stream: the caller ends them."""
        for streams in self._groups.values():
            for stream in streams:
                stream.notify()
