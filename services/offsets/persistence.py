"""What of the table stands on the disk, under which keys, and how a life begins from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from batonmq.common.errors import DataLoss
from services.offsets.codec import META, decode_key, decode_progress, encode_key, encode_progress
from services.offsets.core.calls import Instant, Limits, QueueKey
from services.offsets.core.table import ProgressTable
from services.offsets.disk import Entry

log = logging.getLogger(__name__)

DurableKey = QueueKey | str | None
"""What can change: a queue, by its name for which id a topic was deleted, or, as None, the term
of the lock manager."""

FORMAT = META + b"format"
EPOCH = META + b"epoch"
TERM = META + b"term"
TOPIC = META + b"topic\0"
"""Followed by the name of a topic."""
_FORMAT_VERSION = b"1"


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


def recover(disk: Stored, limits: Limits, now: Instant) -> ProgressTable:
    """The table as the last life left it, in an epoch of its own that is durable already.

    Raises:
        DataLoss: something stored can't be read or contradicts itself.
    """
    meta: dict[bytes, bytes] = {}
    queues: list[Entry] = []
    for key, value in disk.read():
        if key.startswith(META):
            meta[key] = value
        else:
            queues.append((key, value))
    if meta.get(FORMAT, _FORMAT_VERSION) != _FORMAT_VERSION:
        raise DataLoss(f"the stored progress has format {meta[FORMAT]!r}, known is 1")
    if queues and EPOCH not in meta:
        raise DataLoss("the stored progress has queues, but no epoch")
    table = ProgressTable(limits, _number(meta, EPOCH) + 1, _number(meta, TERM), now)
    for key in meta:
        if key.startswith(TOPIC):
            table.restore_topic(key.removeprefix(TOPIC).decode(), _number(meta, key))
    for stored_key, stored in queues:
        queue = decode_key(stored_key)
        table.restore(queue, decode_progress(queue, stored))
    disk.write_now([(FORMAT, _FORMAT_VERSION), (EPOCH, b"%d" % table.epoch)])
    log.info("recovered queues=%d epoch=%d term=%d", len(table), table.epoch, table.term)
    return table


def entry_of(table: ProgressTable) -> Callable[[DurableKey], Entry]:
    """How the present state of a key of `table` stands on the disk."""

    def entry(key: DurableKey) -> Entry:
        if key is None:
            return TERM, b"%d" % table.term
        if isinstance(key, str):
            return TOPIC + key.encode(), b"%d" % table.deleted_for(key)
        return encode_key(key), encode_progress(table.state(key))

    return entry


def _number(meta: dict[bytes, bytes], key: bytes) -> int:
    text = meta.get(key, b"0")
    if not text.isdigit():
        raise DataLoss(f"stored number {key!r} is {text[:40]!r}")
    return int(text)
