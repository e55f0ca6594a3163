"""Batches that a closed queue has refused, so that a late copy of one is refused, too.

A producer sends the messages of such a batch to another queue. An earlier attempt with the same
bytes may still be on its way. If the queue is opened again before it arrives, it would be stored,
and its messages would be delivered twice.

The memory is that of the open store. What another leader has refused is not known to it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from batonmq._core.mirror_marks import MIRROR_EPOCH
from batonmq._core.records import Header
from batonmq.errors import SequenceGap
from batonmq_server.storage.core.producers import QueueKey

REFUSED_MAX = 10_000


class _Refused(NamedTuple):
    """What tells a copy of a batch from another batch with the same sequence."""

    owner: int
    queue: QueueKey
    producer_id: int
    epoch: int
    sequence: int
    checksum: int


class RefusedBatches:
    """The newest batches of idempotent producers that were refused because their queue is closed.

    Left out are the batches of mirrors, and of producers that send only one: these repeat the same
    bytes until they are taken.

    Args:
        refused_max: Greatest number of batches; the oldest are forgotten first.
    """

    def __init__(self, refused_max: int = REFUSED_MAX) -> None:
        self._refused_max = refused_max
        self._refused: OrderedDict[_Refused, None] = OrderedDict()

    def check(self, header: Header, queue: QueueKey) -> None:
        """Check that the queue has not refused this batch.

        Raises:
            SequenceGap: it has. A producer that still has the batch sends it in a new epoch.
        """
        if self._refused and _refused(header, queue) in self._refused:
            raise SequenceGap(
                f"the batch with sequence {header.sequence} of producer {header.producer_id} was "
                "refused when its queue was closed",
                remedy="Send its messages in a new epoch of the producer.",
                facts={"actual": header.sequence},
            )

    def add(self, header: Header, queue: QueueKey) -> None:
        """Remember that the queue has refused a batch because it is closed."""
        if header.producer_id <= 0 or header.producer_epoch >= MIRROR_EPOCH:
            return
        refused = _refused(header, queue)
        self._refused[refused] = None
        self._refused.move_to_end(refused)
        if len(self._refused) > self._refused_max:
            self._refused.popitem(last=False)


def _refused(header: Header, queue: QueueKey) -> _Refused:
    return _Refused(
        header.owner,
        queue,
        header.producer_id,
        header.producer_epoch,
        header.sequence,
        header.checksum,
    )
