"""Messages that retention removed before a group had read them: counted, and told, once."""

from __future__ import annotations

import logging
from collections import OrderedDict

from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.long_polls import QueueOwner
from batonmq_server.storage.metrics import TrafficMetrics

log = logging.getLogger(__name__)

HOLES_MAX = 10_000


class RetentionLosses:
    """Notes where groups met a hole before the first message of a queue.

    The same hole may be met again, by a new owner for one: it counts once, unless the node starts
    anew in between.
    """

    def __init__(self, traffic: TrafficMetrics) -> None:
        self._traffic = traffic
        self._told: OrderedDict[tuple[str, QueueKey], int] = OrderedDict()

    def note(self, owner: QueueOwner, key: QueueKey, offset: int, first_offset: int) -> None:
        """The group has been told that [offset, first_offset) is gone."""
        hole = owner.group, key
        offset = max(offset, self._told.get(hole, 0))
        if offset >= first_offset:
            return
        self._told[hole] = first_offset
        self._told.move_to_end(hole)
        if len(self._told) > HOLES_MAX:
            self._told.popitem(last=False)
        self._traffic.lost(owner.topic, owner.group, first_offset - offset)
        log.warning(
            "messages lost to retention group=%s topic=%s queue_id=%d first_offset=%d "
            "next_offset=%d count=%d",
            owner.group,
            owner.topic,
            owner.queue_id,
            offset,
            first_offset,
            first_offset - offset,
        )
