"""Handled inputs that wait until all of their outputs are stored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.output_encoder import Pending
from batonmq._core.outputs import row_of
from batonmq._core.ranges import Range
from batonmq._core.retries import HandlingFailure


class PendingInputs:
    """Inputs of one queue that were handled together: they are finished when all is stored.

    Args:
        messages: The inputs, at least one, ascending by offset.
        ranges: Their offsets.
        outputs: Their outputs.
        missing: The outputs that are not stored.

    Attributes:
        left: Number of outputs that are not stored.
        failure: Why they are not stored, if storage has others.
    """

    __slots__ = ("_stored", "bytes_count", "failure", "left", "messages", "outputs", "ranges")

    def __init__(
        self,
        messages: Sequence[ReceivedMessage],
        ranges: Sequence[Range],
        outputs: Sequence[Pending],
        missing: Sequence[Pending],
    ) -> None:
        self.messages, self.ranges, self.outputs = messages, ranges, outputs
        self.bytes_count = sum(one.bytes_count for one in outputs)
        self._stored: asyncio.Event | None = None
        self.failure: HandlingFailure | None = None
        self.left = 0
        self.wait_for(missing)

    @property
    def first_offset(self) -> int:
        """Offset of the first input."""
        return self.messages[0].offset

    def wait_for(self, missing: Sequence[Pending]) -> None:
        """Note which outputs are not stored."""
        self.left = 0
        for one in missing:
            one.inputs = self
            self.left += len(one)

    async def stored(self) -> HandlingFailure | None:
        """Wait until all outputs are stored; return the failure if they can't be."""
        if self.left:
            self._stored = self._stored or asyncio.Event()
            await self._stored.wait()
        return self.failure

    @property
    def awaited(self) -> bool:
        """Whether a caller of `stored` waits, which then finishes the input."""
        return self._stored is not None

    def fail(self, failure: HandlingFailure) -> None:
        """Note that the outputs can't be stored."""
        self.failure = failure
        if self._stored is not None:
            self._stored.set()

    def note_stored(self, count: int) -> bool:
        """Note that outputs are stored; return whether they were the last ones."""
        self.left -= count
        if not self.left and self._stored is not None:
            self._stored.set()
        return not self.left

    def split(self) -> list[PendingInputs]:
        """Return the inputs one by one, each with its outputs."""
        if len(self.messages) == 1:
            return [self]
        outputs: dict[int, list[Pending]] = {message.offset: [] for message in self.messages}
        for pending in self.outputs:
            indexes: dict[int, list[int]] = {}
            for index, key in enumerate(pending.keys):
                indexes.setdefault(row_of(key, 0).offset, []).append(index)
            for offset, of_input in indexes.items():
                outputs[offset].append(pending.part(of_input))
        return [
            PendingInputs((one,), ((one.offset, one.offset + 1),), outputs[one.offset], ())
            for one in self.messages
        ]
