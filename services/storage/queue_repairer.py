"""Rebuilds damaged entries of consume queues from the log while the node works."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from batonmq._common.backoff import Backoff
from batonmq.errors import DataLoss
from batonmq_server.runtime.descriptor_shortage import is_shortage
from batonmq_server.storage.core.consumequeue import topic_of
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.queue_reader import SCANNED_MAX
from batonmq_server.storage.core.queue_repair import (
    ENTRIES_AT_ONCE,
    QueueRepair,
    apply_repair,
    find_damage,
    read_log,
)
from batonmq_server.storage.core.tier_file import StoreUnreadable
from batonmq_server.storage.flusher import InThread
from batonmq_server.storage.node import StorageNode

log = logging.getLogger(__name__)

FAILURES_MAX = 10_000
_BACKOFF = Backoff(first_ms=1_000, delay_ms_max=600_000)


@dataclass(frozen=True, slots=True)
class _Failure:
    """A repair that has failed `count` times, and when it is tried again.

    Attributes:
        error: None if the log is damaged.
    """

    count: int
    retry_s: float
    error: DataLoss | None


class QueueRepairer:
    """Repairs one queue at a time, when a read of it fails or the scrub finds damage.

    Args:
        in_thread: Runs the blocking reads of the log outside the event loop.
        on_repair: Called with the topic, once for each repair that changed a file.
        random: For the pauses after failed repairs.
    """

    def __init__(
        self,
        node: StorageNode,
        in_thread: InThread,
        on_repair: Callable[[str, QueueRepair], None],
        random: Random,
    ) -> None:
        self._node, self._in_thread, self._on_repair = node, in_thread, on_repair
        self._random = random
        self._one_at_a_time = asyncio.Lock()
        self._failures: OrderedDict[tuple[QueueKey, int], _Failure] = OrderedDict()

    async def repair(self, key: QueueKey, offset: int, error: DataLoss) -> None:
        """Rebuild the entries that a read at `offset` uses, as far as the log has their batches.

        The read may be repeated: at least one entry was changed. A repair that fails is tried again
        by the first read after a pause.

        Args:
            error: Why the read failed.

        Raises:
            DataLoss: no entry was changed. It is `error` if the log is damaged, and another one if
                a file of the index, or the log, can't be read or written.
            Unreachable: the object store of segments can't be read.
        """
        now_s = asyncio.get_running_loop().time
        async with self._one_at_a_time:
            failure = self._failures.get((key, offset))
            if failure is not None and now_s() < failure.retry_s:
                raise failure.error or error
            lost: DataLoss | None = None
            for first_offset in range(offset, offset + SCANNED_MAX, ENTRIES_AT_ONCE):
                repair = find_damage(self._node.store, key, first_offset)
                try:
                    if repair is not None:
                        await self._in_thread(self._read, repair)
                    if repair is not None and await self._apply(repair):
                        self._failures.pop((key, offset), None)
                        return
                except OSError as cause:  # for example: retention has removed a segment meanwhile
                    log.warning("consume queue not rebuilt queue=%s error=%s", key, cause)
                    if isinstance(cause, StoreUnreadable):
                        raise cause.error from cause  # the next read tries again
                    segment_lost = isinstance(cause, FileNotFoundError)  # the log is damaged
                    lost = None if segment_lost else _not_rebuilt(key, cause)
                    if is_shortage(cause):
                        raise _not_rebuilt(key, cause) from cause  # the next read tries again
                await asyncio.sleep(0)
            count = failure.count + 1 if failure else 1
            pause_s = _BACKOFF.delay_ms(count, self._random) / 1000
            self._failures[key, offset] = _Failure(count, now_s() + pause_s, lost)
            if len(self._failures) > FAILURES_MAX:
                self._failures.popitem(last=False)
            raise lost or error

    async def rebuild(self, repair: QueueRepair) -> None:
        """Write entries that the scrub has read from the log; the next round tries it again."""
        async with self._one_at_a_time:
            try:
                await self._apply(repair)
            except OSError as error:
                log.warning("consume queue not rebuilt queue=%s error=%s", repair.key, error)

    async def _apply(self, repair: QueueRepair) -> bool:
        """Write the entries of a repair; return whether a file was changed."""
        changed = apply_repair(self._node.store, repair)
        await self._in_thread(self._node.disk.sync, changed)
        if not changed:
            return False
        self._on_repair(topic_of(changed[0]), repair)
        log.warning(
            "consume queue rebuilt from the log topic_id=%d queue_id=%d first_offset=%d "
            "next_offset=%d files=%s",
            *repair.key,
            repair.first_offset,
            repair.next_offset,
            changed,
        )
        return True

    def _read(self, repair: QueueRepair) -> None:
        read_log(self._node.disk, repair)


def _not_rebuilt(key: QueueKey, cause: OSError) -> DataLoss:
    topic_id, queue_id = key
    return DataLoss(
        f"the consume queue {queue_id} of topic id {topic_id} is damaged and can't be rebuilt now: "
        f"{cause.strerror}",
        remedy="Look for disk errors on the node. A later read tries to rebuild it again.",
    )
