"""Messages that retention removed before a group read them: each is logged and counted once."""

from __future__ import annotations

import logging
from collections import OrderedDict

from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.long_polls import QueueOwner
from batonmq_server.storage.metrics import TrafficMetrics

log = logging.getLogger(__name__)

QUEUES_MAX = 10_000


class RetentionLosses:
    """Counts the messages that a group lost to retention, per queue.

    The same range may be pulled again, for example by a new owner. It is counted once, unless the
    node restarts in between.
    """

    def __init__(self, traffic: TrafficMetrics) -> None:
        self._traffic = traffic
        self._counted: OrderedDict[tuple[str, QueueKey], int] = OrderedDict()

    def note(self, owner: QueueOwner, key: QueueKey, offset: int, first_offset: int) -> None:
        """Count the offsets [offset, first_offset) as lost for the group of `owner`."""
        queue = owner.group, key
        offset = max(offset, self._counted.get(queue, 0))
        if offset >= first_offset:
            return
        self._counted[queue] = first_offset
        self._counted.move_to_end(queue)
        if len(self._counted) > QUEUES_MAX:
            self._counted.popitem(last=False)
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
