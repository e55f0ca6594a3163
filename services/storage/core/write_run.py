"""Batches that the store writes together."""

from __future__ import annotations

from dataclasses import dataclass

from batonmq._core.outputs import OutputSource
from batonmq_server.storage.core.checks import CheckedBatch
from batonmq_server.storage.core.outputs import OutputBatch
from batonmq_server.storage.core.producers import QueueKey


@dataclass(frozen=True, slots=True)
class AdmittedBatch:
    """A batch that is written.

    Attributes:
        index: Its place among the batches of the call.
        first_offset: Offset of its first message.
    """

    index: int
    checked: CheckedBatch
    key: QueueKey
    first_offset: int


class WriteRun:
    """Batches that are written together: the check of none depends on another one of them.

    Attributes:
        outputs_count: Number of their outputs.
    """

    def __init__(self) -> None:
        self.admitted: list[AdmittedBatch] = []
        self.outputs_count = 0
        self._next_offsets: dict[QueueKey, int] = {}
        self._writers: set[tuple[int, QueueKey]] = set()
        self._epochs: dict[int, int] = {}
        self._sources: dict[OutputSource, list[OutputBatch]] = {}

    @property
    def sources_count(self) -> int:
        """Number of the sources of their outputs."""
        return len(self._sources)

    def affects(self, checked: CheckedBatch, key: QueueKey) -> bool:
        """Return whether the check of this batch depends on a batch of the run."""
        header, outputs = checked.header, checked.outputs
        if outputs is not None:
            others = self._sources.get(outputs.head.source, ())
            return any(one.head != outputs.head or one.overlaps(outputs) for one in others)
        return (header.producer_id, key) in self._writers or (
            self._epochs.get(header.producer_id, header.producer_epoch) != header.producer_epoch
        )

    def add(self, index: int, checked: CheckedBatch, key: QueueKey, next_offset: int) -> None:
        """Add a batch; `next_offset` is the next offset of its queue before the run."""
        header = checked.header
        first_offset = self._next_offsets.get(key, next_offset)
        self._next_offsets[key] = first_offset + header.count
        if (outputs := checked.outputs) is not None:
            self._sources.setdefault(outputs.head.source, []).append(outputs)
            self.outputs_count += len(outputs.keys)
        if header.producer_id > 0:
            self._writers.add((header.producer_id, key))
            self._epochs[header.producer_id] = header.producer_epoch
        self.admitted.append(AdmittedBatch(index, checked, key, first_offset))
