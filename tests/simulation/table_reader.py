"""Reads a compacted topic: over the network, as a table, and from a copy of the log."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random

import grpc.aio

from baton.storage.v1 import query_service_pb2 as query_pb
from batonmq._common.rpc import from_rpc_error
from batonmq._connection.directory import Directory
from batonmq._consumer.reader_calls import ReaderCalls
from batonmq._consumer.session import queue_to_pb
from batonmq._core.ordering_key import ORDERING_KEY
from batonmq._core.queues import QueueRef
from batonmq._core.records import Record, decode_records, read_header
from batonmq.errors import BatonError
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.queue_reader import ReadSpec
from batonmq_server.storage.core.schedule import TOPIC_ID as SYSTEM_TOPIC_ID
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.core.tag_filter import HashFilter
from batonmq_server.testing.processes import SimulatedProcess
from tests.simulation.table_ledger import NUMBER, Entry, Messages, Pass, TableLedger, ascending

TIMEOUT_S = 3
COUNTS = (1, 4, 40)
"""Numbers of messages that a reader reads at once."""


class QueueTable:
    """The table that a reader makes of one queue.

    Attributes:
        offset: Where the reader goes on.
        lap_ms: When the reader began the lap before, or its first one.
        in_time: Whether no lap took longer than tombstones are kept.
    """

    def __init__(self, now_ms: int) -> None:
        self.offset, self.lap_ms, self.begin_ms = 0, now_ms, now_ms
        self.is_whole, self.in_time = False, True
        self.found: dict[int, Entry] = {}
        self.newest: dict[str, int] = {}
        self.values: dict[str, int] = {}

    def take(self, messages: Sequence[tuple[int, Entry]], next_offset: int) -> str:
        """Add messages; return what is wrong with their order, or ""."""
        wrong = ascending(messages, self.newest, self.offset)
        for offset, entry in messages:
            self.found[offset] = entry
            if entry.is_tombstone:
                self.values.pop(entry.key, None)
            else:
                self.values[entry.key] = entry.number
        self.offset = next_offset
        return wrong


class TableReader:
    """Reads queues in laps, each up to the end that the leader names at its begin.

    A tombstone is kept for a time after the messages that it deletes are gone. So the table is
    right if from the begin of a lap to the end of the next one less than that time passes.

    Args:
        nodes: Nodes that it asks; an empty name is the leader.
        tombstone_ms: How long tombstones are kept.
    """

    def __init__(
        self,
        ledger: TableLedger,
        process: SimulatedProcess,
        nameserver: str,
        nodes: Sequence[str],
        tombstone_ms: int,
    ) -> None:
        environment = process.client_environment()
        self.name, self._ledger, self._nodes = process.name, ledger, nodes
        self._tombstone_ms, self._clock = tombstone_ms, process.clock
        self._directory = Directory(nameserver, environment.random, environment.connect)
        self._calls = ReaderCalls(self._directory, environment, "")
        self._draws = Random(f"{ledger.seed}/{process.name}")
        self._tables: dict[QueueRef, QueueTable] = {}

    async def close(self) -> None:
        """Close the connections."""
        await self._directory.close()

    @property
    def in_time(self) -> bool:
        """Whether it went on within the time of tombstones in all queues."""
        return all(one.in_time for one in self._tables.values())

    def table(self) -> dict[str, int]:
        """Return the number of each key."""
        return {key: one for table in self._tables.values() for key, one in table.values.items()}

    def begin_again(self) -> None:
        """Forget everything."""
        self._tables.clear()
        self._ledger.counts["readers that begin again"] += 1

    async def lap(self, queue: QueueRef) -> None:
        """Read a queue up to its end."""
        table, begin_ms = self._tables.get(queue), self._clock.monotonic_ms()
        if table is None or not table.in_time:
            table = self._tables[queue] = QueueTable(begin_ms)
        end = await self._end(queue)
        while table.offset < end:
            await self._read(queue, table)
            await asyncio.sleep(self._draws.choice((0, 0, 0.02, 0.5)))
        now_ms = self._clock.monotonic_ms()
        table.in_time = now_ms - table.lap_ms < self._tombstone_ms
        table.lap_ms = begin_ms
        self._ledger.counts["laps" if table.in_time else "slow laps"] += 1
        if not table.is_whole:
            table.is_whole = True
            offsets = frozenset(table.found)
            this = Pass(table.begin_ms, now_ms, table.offset, offsets)
            self._ledger.passed(self.name, queue, this)

    async def _end(self, queue: QueueRef) -> int:
        while True:
            try:
                return (await self._calls.kept(queue)).next_offset
            except BatonError:
                await asyncio.sleep(0.2)

    async def _read(self, queue: QueueRef, table: QueueTable) -> None:
        """Read once, from any node; a node that can't answer changes nothing."""
        node = self._draws.choice(self._nodes)
        request = query_pb.ReadRequest(
            queue=queue_to_pb(queue),
            offset=table.offset,
            messages_max=self._draws.choice(COUNTS),
        )
        try:
            stub = await self._directory.query(queue.broker, node)
            answer = await stub.Read(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            await self._failed(from_rpc_error(error))
            return
        except BatonError as error:
            await self._failed(error)
            return
        messages = entries(answer.batches, table.offset, answer.next_offset)
        for offset, entry in messages:
            self._ledger.read(self.name, queue, offset, entry)
        if wrong := table.take(messages, answer.next_offset):
            self._ledger.fail("order", f"{self.name} in {queue}: {wrong}")
        self._ledger.counts["reads"] += 1

    async def _failed(self, error: BatonError) -> None:
        self._ledger.counts[f"reads with {type(error).__name__}"] += 1
        await asyncio.sleep(0.2)


def entries(batches: Sequence[bytes], offset: int, next_offset: int) -> list[tuple[int, Entry]]:
    """Return the messages in [offset, next_offset) of batches."""
    found: list[tuple[int, Entry]] = []
    for raw in batches:
        header = read_header(raw)
        found += [
            (record.offset, entry_of(record))
            for record in decode_records(raw, header, range(header.count))
            if offset <= record.offset < next_offset
        ]
    return found


def entry_of(record: Record) -> Entry:
    """Return the entry of a message."""
    properties = record.properties
    return Entry(properties[ORDERING_KEY], int(properties[NUMBER]), not record.body)


def contents(store: MessageStore) -> dict[QueueKey, Messages]:
    """Return the messages that readers of a copy can read, by queue; without those of the system.

    Raises:
        BatonError: a part can't be read.
    """
    found: dict[QueueKey, Messages] = {}
    for key in sorted(store.queues):
        if key[0] == SYSTEM_TOPIC_ID:
            continue
        offset, messages = store.offsets(key).first_offset, dict[int, Entry]()
        while (found_now := store.read(key, _all_from(offset))) is not None:
            messages.update(entries(found_now.batches, offset, found_now.next_offset))
            offset = found_now.next_offset
        found[key] = messages
    return found


def _all_from(offset: int) -> ReadSpec:
    return ReadSpec(offset, 1 << 20, 64, HashFilter(None))
