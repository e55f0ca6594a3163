"""What of the table stands on the disk, under which keys, and how a life begins from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from batonmq.common.errors import DataLoss
from services.offsets.codec import (
    META,
    decode_key,
    decode_operation,
    decode_progress,
    encode_key,
    encode_operation,
    encode_progress,
    seal,
    unseal,
)
from services.offsets.core.calls import Instant, Limits, QueueKey
from services.offsets.core.resets import RecordKey, Records
from services.offsets.core.table import ProgressTable
from services.offsets.disk import Entry

log = logging.getLogger(__name__)

DurableKey = QueueKey | RecordKey | str | None
"""What can change: a queue, a recorded operation, by its name for which id a topic was deleted, or,
as None, the term of the lock manager."""

FORMAT = META + b"format"
EPOCH = META + b"epoch"
TERM = META + b"term"
TOPIC = META + b"topic\0"
"""Followed by the name of a topic."""
RESET = META + b"reset\0"
"""Followed by `group NUL slot`."""
_FORMAT_VERSION = b"2"


class Stored(Protocol):
    """What the service asks of its disk; see `disk.Disk`."""

    def read(self) -> Iterator[Entry]:
        """All entries by key, ascending."""
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
    queues: list[Entry] = []
    stored = dict(disk.read())
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


def entry_of(table: ProgressTable, records: Records) -> Callable[[DurableKey], Entry]:
    """How the present state of a key stands on the disk."""

    def entry(key: DurableKey) -> Entry:
        match key:
            case None:
                found = TERM, b"%d" % table.term
            case str():
                found = TOPIC + key.encode(), b"%d" % table.deleted_for(key)
            case RecordKey():
                at = RESET + key.group.encode() + b"\0%d" % key.slot
                found = at, encode_operation(records.at(key))
            case QueueKey():
                found = encode_key(key), encode_progress(table.state(key))
        return found[0], seal(*found)

    return entry


def _number(meta: dict[bytes, bytes], key: bytes) -> int:
    text = meta.get(key, b"0")
    if not text.isdigit():
        raise DataLoss(f"stored number {key!r} is {text[:40]!r}")
    return int(text)
