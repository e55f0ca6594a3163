"""What of the table stands on the disk, under which keys, and how a life begins from it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from batonmq._core.queues import GroupQueue
from batonmq.errors import DataLoss
from batonmq_server.offsets.codec import (
    META,
    decode_handover,
    decode_home,
    decode_key,
    decode_operation,
    decode_progress,
    encode_handover,
    encode_home,
    encode_key,
    encode_operation,
    encode_progress,
    seal,
    unseal,
)
from batonmq_server.offsets.core.calls import Instant, Limits, Tombstone
from batonmq_server.offsets.core.changes import (
    HISTORY,
    POSITION,
    Change,
    ChangeLog,
    Entry,
    read_log,
)
from batonmq_server.offsets.core.holds import HOLDS_MAX, Handover
from batonmq_server.offsets.core.homes import Home
from batonmq_server.offsets.core.resets import RecordKey, Records
from batonmq_server.offsets.core.table import ProgressTable
from batonmq_server.offsets.disk import Found

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class HandedOver:
    """A change of a queue's token: a fact, so it is its own state and equal to itself alone."""

    key: GroupQueue
    handover: Handover


@dataclass(frozen=True, slots=True)
class HomeKey:
    """What became of a group that has come here, or left."""

    group: str


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """Entries as they are, of a group that arrives or is forgotten: a fact, like `HandedOver`."""

    entries: Sequence[Entry]


DurableKey = GroupQueue | HandedOver | RecordKey | HomeKey | Written | str | None
"""What can change: a queue, who holds it, a recorded operation, where a group is, what arrives of
it, by its name for which id a topic was deleted, or, as None, the term of the lock manager."""

FORMAT = META + b"format"
TERM = META + b"term"
TOPIC = META + b"topic\0"
"""Followed by the name of a topic."""
RESET = META + b"reset\0"
"""Followed by `group NUL slot`."""
HOLDS = META + b"hold\0"
"""Followed by `queue NUL slot`. Not in memory: read when somebody asks."""
HOME = META + b"home\0"
"""Followed by the name of a group."""
_FORMAT_VERSION = b"3"


RECOVERED_AT_ONCE = 2_048


class Stored(Protocol):
    """What the service asks of its disk; see `disk.Disk`."""

    def read(self, but: bytes = b"") -> Iterator[Found]:
        """All entries by key, ascending, as of one moment; without those that begin with `but`."""
        ...

    async def find(self, prefix: bytes) -> list[Found]:
        """The entries whose keys begin with `prefix`."""
        ...

    async def snapshot(self, but: bytes = b"") -> list[Found]:
        """`read`, whole, without keeping others waiting."""
        ...

    async def write(self, entries: Sequence[Entry]) -> None:
        """Write all entries or none, and return when they are durable."""
        ...

    def write_now(self, entries: Sequence[Entry]) -> None:
        """`write` for a caller that may be blocked."""
        ...

    async def replace(self, entries: Sequence[Found]) -> None:
        """Write these in place of everything, or nothing, and return when they are durable."""
        ...

    async def settled(self) -> None:
        """Return when no write is under way, one whose caller was cancelled included."""
        ...

    def check_room(self) -> None:
        """Refuse what `write` would refuse at this moment for want of room."""
        ...


def read_changes(disk: Stored, *, kept_bytes_max: int) -> ChangeLog:
    """Where the disk stands.

    Raises:
        DataLoss: that can't be read.
    """
    own = {
        key: value
        for key, value in disk.read(but=HOLDS)
        if key in (META + POSITION, META + HISTORY)
    }
    return log_of(own, kept_bytes_max=kept_bytes_max)


def log_of(entries: Mapping[bytes, bytes], *, kept_bytes_max: int) -> ChangeLog:
    """Where a disk with these entries stands.

    Raises:
        DataLoss: that can't be read.
    """
    own = {
        name: unseal(META + name, entries[META + name])
        for name in (POSITION, HISTORY)
        if META + name in entries
    }
    return read_log(own, kept_bytes_max=kept_bytes_max)


def next_change(log: ChangeLog, epoch: int, entries: Iterable[Entry]) -> Change:
    """The change that writes `entries` next, with where it leads to."""
    at, own = log.next(epoch)
    sealed = [(META + name, seal(META + name, value)) for name, value in own]
    return Change(at, [*entries, *sealed])


def first_change(log: ChangeLog, epoch: int) -> Change:
    """The change by which an epoch begins."""
    return next_change(log, epoch, [(FORMAT, _FORMAT_VERSION)])


def begin_life(
    disk: Stored, limits: Limits, now: Instant
) -> tuple[ChangeLog, ProgressTable, Records]:
    """What a node without followers begins with: an epoch of its own, durable already.

    Raises:
        DataLoss: something stored can't be read or contradicts itself.
    """
    changes = read_changes(disk, kept_bytes_max=0)
    table, records = recover(disk, limits, changes.position.epoch + 1, now)
    first = first_change(changes, table.epoch)
    disk.write_now(first.entries)
    changes.keep(first)
    return changes, table, records


def recover(
    disk: Stored, limits: Limits, epoch: int, now: Instant
) -> tuple[ProgressTable, Records]:
    """The table as the last life left it, in a new epoch. Blocks, as long as it takes.

    Raises:
        DataLoss: something stored can't be read or contradicts itself.
    """
    table, records, queues = _recovered_meta(disk.read(but=HOLDS), limits, epoch, now)
    _restore_queues(table, queues)
    return table, records


async def recover_meanwhile(
    disk: Stored, limits: Limits, epoch: int, now: Instant
) -> tuple[ProgressTable, Records]:
    """`recover` for a leader, which has a lease to keep: lets others go on now and then.

    Raises:
        DataLoss: something stored can't be read or contradicts itself.
    """
    found = await disk.snapshot(but=HOLDS)
    table, records, queues = _recovered_meta(found, limits, epoch, now)
    for begin in range(0, len(queues), RECOVERED_AT_ONCE):
        _restore_queues(table, queues[begin : begin + RECOVERED_AT_ONCE])
        await asyncio.sleep(0)
    return table, records


def _recovered_meta(
    found: Iterable[Found], limits: Limits, epoch: int, now: Instant
) -> tuple[ProgressTable, Records, list[Found]]:
    """A table without queues, and the queues as they are stored."""
    meta: dict[bytes, bytes] = {}
    queues: list[Found] = []
    stored = dict(found)
    version = stored.pop(FORMAT, _FORMAT_VERSION)
    if version != _FORMAT_VERSION:
        raise DataLoss(f"the stored progress has format {version!r}, known is {_FORMAT_VERSION!r}")
    for key, sealed in stored.items():
        if key.startswith(META):
            meta[key] = unseal(key, sealed)
        else:
            queues.append((key, sealed))
    if queues and META + POSITION not in meta:
        raise DataLoss("the stored progress has queues, but no position")
    table = ProgressTable(limits, epoch, _number(meta, TERM), now)
    records = Records()
    _restore_meta(table, records, meta)
    log.info("recovers queues=%d epoch=%d term=%d", len(queues), table.epoch, table.term)
    return table, records, queues


def _restore_queues(table: ProgressTable, queues: Sequence[Found]) -> None:
    for key, sealed in queues:
        value, queue = unseal(key, sealed), decode_key(key)
        if table.homes.keeps(queue.group):
            table.restore(queue, decode_progress(queue, value))


def _restore_meta(table: ProgressTable, records: Records, meta: dict[bytes, bytes]) -> None:
    """Homes first: of a group that is not here nothing else counts."""
    for key, value in meta.items():
        if key.startswith(HOME):
            table.homes.put(key.removeprefix(HOME).decode(), decode_home(value))
    for key, value in meta.items():
        if key.startswith(TOPIC):
            table.restore_topic(key.removeprefix(TOPIC).decode(), _number(meta, key))
        elif key.startswith(RESET):
            group = key.removeprefix(RESET).partition(b"\0")[0].decode()
            if table.homes.keeps(group):
                records.put(group, decode_operation(value))


def entries_of(table: ProgressTable, records: Records) -> Callable[[DurableKey], Sequence[Entry]]:
    """How the present state of a key stands on the disk."""

    def entries(key: DurableKey) -> Sequence[Entry]:
        match key:
            case None:
                found = TERM, b"%d" % table.term
            case str():
                found = TOPIC + key.encode(), b"%d" % table.deleted_for(key)
            case RecordKey():
                at = RESET + key.group.encode() + b"\0%d" % key.slot
                found = at, encode_operation(records.at(key))
            case HomeKey():
                home = table.homes.get(key.group)
                assert home is not None
                found = home_entry(key.group, home)
            case Written():
                return key.entries
            case HandedOver():
                found = _hold_key(key.key, key.handover.slot), encode_handover(key.handover)
            case GroupQueue():
                state = table.state(key)
                if isinstance(state, Tombstone):
                    return tombstone_entries(key, state)
                found = encode_key(key), encode_progress(state)
        return [(found[0], seal(*found))]

    return entries


def home_entry(group: str, home: Home) -> tuple[bytes, bytes]:
    """How it stands on the disk what became of a group; not sealed yet."""
    return HOME + group.encode(), encode_home(home)


def tombstone_entries(key: GroupQueue, tombstone: Tombstone) -> list[Entry]:
    """How a queue stands on the disk whose progress has ended."""
    at = encode_key(key)
    forgotten = [(_hold_key(key, slot), None) for slot in range(HOLDS_MAX)]
    return [(at, seal(at, encode_progress(tombstone))), *forgotten]


async def entries_of_group(disk: Stored, group: str) -> list[Found]:
    """All that is kept of a group, by key, but what became of it."""
    begin = group.encode() + b"\0"
    parts = [await disk.find(prefix + begin) for prefix in (HOLDS, RESET, b"")]
    return [found for part in parts for found in part]


async def find_handovers(disk: Stored, key: GroupQueue) -> list[Handover]:
    """The recorded changes of a queue's token, in no order.

    Raises:
        DataLoss: one can't be read.
    """
    stored = await disk.find(HOLDS + encode_key(key) + b"\0")
    return [decode_handover(unseal(*each)) for each in stored]


def _hold_key(key: GroupQueue, slot: int) -> bytes:
    return HOLDS + encode_key(key) + b"\0%d" % slot


def _number(meta: dict[bytes, bytes], key: bytes) -> int:
    text = meta.get(key, b"0")
    if not text.isdigit():
        raise DataLoss(f"stored number {key!r} is {text[:40]!r}")
    return int(text)
