"""Messages that a handler of batches receives together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, overload

from batonmq._consumer.delivered_run import DeliveredRun
from batonmq._consumer.message import Extender, ReceivedMessage
from batonmq._core.queues import QueueRef
from batonmq._core.ranges import Range

if TYPE_CHECKING:
    import pyarrow


class MessageBatch(Sequence[ReceivedMessage]):
    """Consecutive messages of one queue, at least one.

    It is a sequence of `ReceivedMessage`. The object of a message is created when it is first
    used, which costs more than the columns: a handler that reads only `bodies()` or `offsets` is
    several times as fast.

    Attributes:
        lineage: The ownership that the messages belong to; used by the library.
    """

    def __init__(self, runs: Sequence[DeliveredRun]) -> None:
        self._runs = runs
        self._begins = tuple(accumulate(map(len, runs), initial=0))
        self._messages: dict[int, ReceivedMessage] = {}
        self._extender: Extender | None = None
        self.lineage = runs[0].columns.lineage

    def __len__(self) -> int:
        return self._begins[-1]

    @overload
    def __getitem__(self, index: int) -> ReceivedMessage: ...

    @overload
    def __getitem__(self, index: slice) -> list[ReceivedMessage]: ...

    def __getitem__(self, index: int | slice) -> ReceivedMessage | list[ReceivedMessage]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = index + len(self) if index < 0 else index
        if (message := self._messages.get(number)) is not None:
            return message
        if not 0 <= number < len(self):
            raise IndexError(f"the batch has {len(self)} messages, not {index + 1}")
        place = bisect_right(self._begins, number) - 1
        message = self._messages[number] = self._runs[place].message(number - self._begins[place])
        message.attempts += 1
        message.extender = self._extender
        return message

    def __repr__(self) -> str:
        return f"<batch of {len(self)} messages of {self.queue} from {self.offsets[0]}>"

    @property
    def queue(self) -> QueueRef:
        """The queue of all messages."""
        return self._runs[0].columns.queue

    @property
    def offsets(self) -> Sequence[int]:
        """Offset of each message in the queue, ascending."""
        if len(self.ranges) == 1:
            return range(*self.ranges[0])
        return [offset for first, end in self.ranges for offset in range(first, end)]

    @property
    def tags(self) -> list[str]:
        """Tag of each message; empty without one."""
        return [message.tag for message in self]

    @property
    def keys(self) -> list[tuple[str, ...]]:
        """Keys of each message."""
        return [message.keys for message in self]

    def bodies(self) -> list[bytes]:
        """Return the body of each message, without creating the other parts of the messages."""
        return list(chain.from_iterable(run.bodies() for run in self._runs))

    def to_arrow(self) -> pyarrow.Table:
        """Return a table with the columns offset, body, tag, keys, born_unix_ms, store_unix_ms.

        Raises:
            ImportError: The package pyarrow is not installed.
        """
        import pyarrow  # noqa: PLC0415  optional, and slow to import

        return pyarrow.table(
            {
                "offset": pyarrow.array(self.offsets, pyarrow.int64()),
                "body": pyarrow.array(self.bodies(), pyarrow.binary()),
                "tag": pyarrow.array(self.tags, pyarrow.string()),
                "keys": pyarrow.array(self.keys, pyarrow.list_(pyarrow.string())),
                "born_unix_ms": pyarrow.array([one.born_unix_ms for one in self], pyarrow.int64()),
                "store_unix_ms": pyarrow.array(
                    [one.store_unix_ms for one in self], pyarrow.int64()
                ),
            }
        )

    @property
    def ranges(self) -> Sequence[Range]:
        """The offsets as ranges, one or more for each stored batch; used by the library."""
        return list(chain.from_iterable(run.ranges for run in self._runs))

    @property
    def extender(self) -> Extender | None:
        """Extends the time of the handler that runs with the messages; used by the library."""
        return self._extender

    @extender.setter
    def extender(self, extender: Extender | None) -> None:
        self._extender = extender
        for message in self._messages.values():
            message.extender = extender

    def __iter__(self) -> Iterator[ReceivedMessage]:
        return map(self.__getitem__, range(len(self)))
