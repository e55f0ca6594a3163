"""What of the table stands on the disk, under which keys, and how a life begins from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from batonmq.common.errors import DataLoss
from services.offsets.codec import (
    META,
    decode_handover,
    decode_key,
    decode_operation,
    decode_progress,
    encode_handover,
    encode_key,
    encode_operation,
    encode_progress,
    seal,
    unseal,
)
from services.offsets.core.calls import Instant, Limits, QueueKey, Tombstone
from services.offsets.core.holds import HOLDS_MAX, Handover
from services.offsets.core.resets import RecordKey, Records
from services.offsets.core.table import ProgressTable
from services.offsets.disk import Entry, Found

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class HandedOver:
    """A change of a queue's token: a fact, so it is its own state and equal to itself alone."""

    key: QueueKey
    handover: Handover


DurableKey = QueueKey | HandedOver | RecordKey | str | None
"""What can change: a queue, who holds it, a recorded operation, by its name for which id a topic
was deleted, or, as None, the term of the lock manager."""

FORMAT = META + b"format"
EPOCH = META + b"epoch"
TERM = META + b"term"
TOPIC = META + b"topic\0"
"""Followed by the name of a topic."""
RESET = META + b"reset\0"
"""Followed by `group NUL slot`."""
HOLDS = META + b"hold\0"
"""Followed by `queue NUL slot`. Not in memory: read when somebody asks."""
_FORMAT_VERSION = b"2"


class Stored(Protocol):
    """What the service asks of its disk; see `disk.Disk`."""

    def read(self, but: bytes = b"") -> Iterator[Found]:
        """All entries by key, ascending, without those that begin with `but`."""
        ...

    async def find(self, prefix: bytes) -> list[Found]:
        """The entries whose keys begin with `prefix`."""
        ...

    async def write(self, entries: Sequence[Entry]) -> None:
        """Write all entries or none, and return when they are durable."""
        ...

    def write_now(self, entries: Sequence[Entry]) -> None:
        """`write` for a caller that may be blocked."""
        ...


def recover(disk: Stored, limits: Limits, now: Instant) -> tuple[ProgressTable, Records]:
    """The table as the last life left it, in an epoch of its own that is durable already.

    Raises:
        DataLoss: something stored can't be read or contradicts itself.
    """
    meta: dict[bytes, bytes] = {}
    queues: list[Found] = []
    stored = dict(disk.read(but=HOLDS))
    version = stored.pop(FORMAT, _FORMAT_VERSION)
    if version != _FORMAT_VERSION:
        raise DataLoss(f"the stored progress has format {version!r}, known is {_FORMAT_VERSION!r}")
    for key, sealed in stored.items():
        value = unseal(key, sealed)
        if key.startswith(META):
            meta[key] = value
        else:
            queues.append((key, value))
    if queues and EPOCH not in meta:
        raise DataLoss("the stored progress has queues, but no epoch")
    table = ProgressTable(limits, _number(meta, EPOCH) + 1, _number(meta, TERM), now)
    records = Records()
    for key, value in meta.items():
        if key.startswith(TOPIC):
            table.restore_topic(key.removeprefix(TOPIC).decode(), _number(meta, key))
        elif key.startswith(RESET):
            group = key.removeprefix(RESET).partition(b"\0")[0].decode()
            records.put(group, decode_operation(value))
    for key, value in queues:
        queue = decode_key(key)
        table.restore(queue, decode_progress(queue, value))
    epoch = b"%d" % table.epoch
    disk.write_now([(FORMAT, _FORMAT_VERSION), (EPOCH, seal(EPOCH, epoch))])
    log.info("recovered queues=%d epoch=%d term=%d", len(table), table.epoch, table.term)
    return table, records


def entries_of(table: ProgressTable, records: Records) -> Callable[[DurableKey], Sequence[Entry]]:
    """How the present state of a key stands on the disk."""

    def entries(key: DurableKey) -> Sequence[Entry]:
        forgotten: list[Entry] = []
        match key:
            case None:
                found = TERM, b"%d" % table.term
            case str():
                found = TOPIC + key.encode(), b"%d" % table.deleted_for(key)
            case RecordKey():
                at = RESET + key.group.encode() + b"\0%d" % key.slot
                found = at, encode_operation(records.at(key))
            case HandedOver():
                found = _hold_key(key.key, key.handover.slot), encode_handover(key.handover)
            case QueueKey():
                state = table.state(key)
                found = encode_key(key), encode_progress(state)
                if isinstance(state, Tombstone):
                    forgotten = [(_hold_key(key, slot), None) for slot in range(HOLDS_MAX)]
        return [(found[0], seal(*found)), *forgotten]

    return entries


async def find_handovers(disk: Stored, key: QueueKey) -> list[Handover]:
    """The recorded changes of a queue's token, in no order.

    Raises:
        DataLoss: one can't be read.
    """
    stored = await disk.find(HOLDS + encode_key(key) + b"\0")
    return [decode_handover(unseal(*each)) for each in stored]


def _hold_key(key: QueueKey, slot: int) -> bytes:
    return HOLDS + encode_key(key) + b"\0%d" % slot


def _number(meta: dict[bytes, bytes], key: bytes) -> int:
    text = meta.get(key, b"0")
    if not text.isdigit():
        raise DataLoss(f"stored number {key!r} is {text[:40]!r}")
    return int(text)
