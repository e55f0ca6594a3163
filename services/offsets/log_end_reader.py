"""Lowers the delivered offsets of a new epoch to the ends of the logs (protocol 6.8).

An epoch begins with the reserved bound of each delivered offset: an upper bound that may lie beyond
the last message. What an older epoch recorded was in the log when it was recorded. So the end of
the log, read after the last answer of older epochs, is an upper bound as well.

The end must come from a storage node that led its replica set at that time: a deposed leader may
lack what its successor has delivered. The node answers how long ago etcd confirmed that it leads.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeAlias

from baton.common.v1 import queue_pb2
from baton.storage.v1 import storage_service_pb2 as storage_pb
from baton.storage.v1 import storage_service_pb2_grpc as storage_grpc
from batonmq._common.clock import Clock
from batonmq._common.rpc import answered, error_from_pb
from batonmq._core.queues import GroupQueue
from batonmq.errors import BatonError, Retry
from batonmq_server.offsets.core.progress_table import ProgressTable

log = logging.getLogger(__name__)

StorageStub: TypeAlias = "Callable[[str], storage_grpc.StorageServiceAsyncStub]"
"""Returns a stub for the leader of a broker; raises `Unreachable` if none is registered."""
QUEUES_MAX = 1_000
"""Queues of one call."""
TIMEOUT_S = 2.0
ADVANCE_MS = 2_000
"""Storage uses an advance for less than this, counted from the request of its record."""
RETRY_S = 2.0
"""Pause before the brokers that have not answered are called again."""


class LogEndReader:
    """Reads the ends of the logs once per epoch; run it as one task.

    Args:
        table: Table of the epoch, at its begin.
        settle_ms: After this time no older epoch answers any more: the lease of a leader, 0 for a
            node without replicas. For `ADVANCE_MS` more, storage may send what an older epoch has
            recorded in advance, and what was not in the log then.
    """

    def __init__(
        self, table: ProgressTable, storage: StorageStub, clock: Clock, settle_ms: int
    ) -> None:
        self._table, self._storage, self._clock = table, storage, clock
        settle_ms += ADVANCE_MS
        self._settled_ms = clock.monotonic_ms() + settle_ms
        self._settle_s = settle_ms / 1000

    async def run(self) -> None:
        """Read the ends of all queues with an inexact delivered offset; return when all are read.

        A queue that becomes exact meanwhile is left out.
        """
        await asyncio.sleep(self._settle_s)
        unread = self._table.inexact()
        while unread:
            by_broker: dict[str, list[GroupQueue]] = defaultdict(list)
            for key in unread:
                by_broker[key.broker].append(key)
            async with asyncio.TaskGroup() as tasks:
                for broker, keys in by_broker.items():
                    tasks.create_task(self._read_broker(broker, keys, unread))
            still = self._table.inexact()
            unread = {key: token for key, token in unread.items() if still.get(key) == token}
            if unread:
                await asyncio.sleep(RETRY_S)

    async def _read_broker(
        self, broker: str, keys: Sequence[GroupQueue], unread: dict[GroupQueue, int]
    ) -> None:
        """Read the queues of one broker, and remove from `unread` those that were read."""
        for begin in range(0, len(keys), QUEUES_MAX):
            chunk = keys[begin : begin + QUEUES_MAX]
            try:
                outcomes = await self._query(broker, chunk)
            except BatonError as error:
                log.info("ends of queues not read broker=%s error=%s", broker, error)
                return
            if outcomes is None:
                log.info("ends of queues not read broker=%s: its leader may be deposed", broker)
                return
            for key, outcome in zip(chunk, outcomes, strict=True):
                if outcome.HasField("offsets"):
                    self._table.note_log_end(key, unread.pop(key), outcome.offsets.next_offset)
                elif error_from_pb(outcome.error).retry is not Retry.SAME_CALL:
                    del unread[key]  # the queue was removed, or is damaged

    async def _query(
        self, broker: str, keys: Sequence[GroupQueue]
    ) -> Sequence[storage_pb.QueryOffsetsOutcome] | None:
        """Return the offsets of the queues; None if the node may have been deposed before.

        Raises:
            BatonError: the node did not answer, or is not the leader.
        """
        request = storage_pb.QueryOffsetsRequest(
            queues=[
                queue_pb2.QueueRef(topic=key.topic, broker=key.broker, queue_id=key.queue_id)
                for key in keys
            ]
        )
        stub, sent_ms = self._storage(broker), self._clock.monotonic_ms()
        answer = await answered(stub.QueryOffsets(request, timeout=TIMEOUT_S))
        if not self._is_current(sent_ms, answer):
            return None
        return answer.outcomes

    def _is_current(self, sent_ms: int, answer: storage_pb.QueryOffsetsResponse) -> bool:
        """Return whether the node is known to have led after the last answer of older epochs."""
        return sent_ms - answer.leader_age_ms >= self._settled_ms
