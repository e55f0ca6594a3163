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
    decode_key,
    decode_placement,
    decode_progress,
    decode_reset,
    decode_token_change,
    encode_key,
    encode_placement,
    encode_progress,
    encode_reset,
    encode_token_change,
    seal,
    unseal,
)
from batonmq_server.offsets.core.change_log import (
    HISTORY,
    POSITION,
    ChangeLog,
    Entry,
    StoreChange,
    decode_change_log,
)
from batonmq_server.offsets.core.holds import HOLDS_MAX, TokenChange
from batonmq_server.offsets.core.local_placements import LocalPlacement
from batonmq_server.offsets.core.progress_table import ProgressTable
from batonmq_server.offsets.core.resets import ResetHistory, ResetSlot
from batonmq_server.offsets.core.values import Instant, QueueLimits, Tombstone
from batonmq_server.offsets.disk import StoredEntry

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class TokenChangeKey:
    """A change of a queue's token: a fact, so it is its own state and equal to itself alone."""

    key: GroupQueue
    token_change: TokenChange


@dataclass(frozen=True, slots=True)
class PlacementKey:
    """What became of a group that has come here, or left."""

    group: str


@dataclass(frozen=True, slots=True, eq=False)
class RawEntries:
    """Entries to write or delete as they are, of a group that is imported or forgotten.

    Equal to itself alone, like `TokenChangeKey`.
    """

    entries: Sequence[Entry]


DurableKey = GroupQueue | TokenChangeKey | ResetSlot | PlacementKey | RawEntries | str | None
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
PLACEMENT = META + b"home\0"
"""Followed by the name of a group."""
_FORMAT_VERSION = b"3"


RECOVERED_AT_ONCE = 2_048


class ProgressStore(Protocol):
    """What the service asks of its disk; see `disk.Disk`."""

    def read(self, skip: bytes = b"") -> Iterator[StoredEntry]:
        """All entries by key, ascending, as of one moment; without those that begin with `skip`."""
        ...

    async def read_prefix(self, prefix: bytes) -> list[StoredEntry]:
        """The entries whose keys begin with `prefix`."""
        ...

    async def snapshot(self, skip: bytes = b"") -> list[StoredEntry]:
        """`read`, whole, without keeping others waiting."""
        ...

    async def write(self, entries: Sequence[Entry]) -> None:
        """Write all entries or none, and return when they are durable."""
        ...

    def write_blocking(self, entries: Sequence[Entry]) -> None:
        """`write` for a caller that may be blocked."""
        ...

    async def replace(self, entries: Sequence[StoredEntry]) -> None:
        """Write these in place of everything, or nothing, and return when they are durable."""
        ...

    async def wait_idle(self) -> None:
        """Return when no write is under way, one whose caller was cancelled included."""
        ...

    def check_room(self) -> None:
        """Refuse what `write` would refuse at this moment for want of room."""
        ...


def read_change_log(disk: ProgressStore, *, kept_bytes_max: int) -> ChangeLog:
    """Where the disk stands.

    Raises:
        DataLoss: that can't be read.
    """
    own = {
        key: value
        for key, value in disk.read(skip=HOLDS)
        if key in (META + POSITION, META + HISTORY)
    }
    return change_log_of(own, kept_bytes_max=kept_bytes_max)


def change_log_of(entries: Mapping[bytes, bytes], *, kept_bytes_max: int) -> ChangeLog:
    """Where a disk with these entries stands.

    Raises:
        DataLoss: that can't be read.
    """
    own = {
        name: unseal(META + name, entries[META + name])
        for name in (POSITION, HISTORY)
        if META + name in entries
    }
    return decode_change_log(own, kept_bytes_max=kept_bytes_max)


def next_change(log: ChangeLog, epoch: int, entries: Iterable[Entry]) -> StoreChange:
    """The change that writes `entries` next, with where it leads to."""
    at, own = log.next(epoch)
    sealed = [(META + name, seal(META + name, value)) for name, value in own]
    return StoreChange(at, [*entries, *sealed])


def first_change(log: ChangeLog, epoch: int) -> StoreChange:
    """The change by which an epoch begins."""
    return next_change(log, epoch, [(FORMAT, _FORMAT_VERSION)])


def recover_standalone(
    disk: ProgressStore, limits: QueueLimits, now: Instant
) -> tuple[ChangeLog, ProgressTable, ResetHistory]:
    """What a node without followers begins with: an epoch of its own, durable already.

    Raises:
        DataLoss: something stored can't be read or contradicts itself.
    """
    changes = read_change_log(disk, kept_bytes_max=0)
    table, records = recover(disk, limits, changes.position.epoch + 1, now)
    first = first_change(changes, table.epoch)
    disk.write_blocking(first.entries)
    changes.append(first)
    return changes, table, records


def recover(
    disk: ProgressStore, limits: QueueLimits, epoch: int, now: Instant
) -> tuple[ProgressTable, ResetHistory]:
    """The table as the last life left it, in a new epoch. Blocks, as long as it takes.

    Raises:
        DataLoss: something stored can't be read or contradicts itself.
    """
    table, records, queues = _recovered_meta(disk.read(skip=HOLDS), limits, epoch, now)
    _restore_queues(table, queues)
    return table, records


async def recover_in_steps(
    disk: ProgressStore, limits: QueueLimits, epoch: int, now: Instant
) -> tuple[ProgressTable, ResetHistory]:
    """`recover` for a leader, which has a lease to keep: lets others go on now and then.

    Raises:
        DataLoss: something stored can't be read or contradicts itself.
    """
    found = await disk.snapshot(skip=HOLDS)
    table, records, queues = _recovered_meta(found, limits, epoch, now)
    for begin in range(0, len(queues), RECOVERED_AT_ONCE):
        _restore_queues(table, queues[begin : begin + RECOVERED_AT_ONCE])
        await asyncio.sleep(0)
    return table, records


def _recovered_meta(
    found: Iterable[StoredEntry], limits: QueueLimits, epoch: int, now: Instant
) -> tuple[ProgressTable, ResetHistory, list[StoredEntry]]:
    """A table without queues, and the queues as they are stored."""
    meta: dict[bytes, bytes] = {}
    queues: list[StoredEntry] = []
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
    records = ResetHistory()
    _restore_meta(table, records, meta)
    log.info("recovers queues=%d epoch=%d term=%d", len(queues), table.epoch, table.term)
    return table, records, queues


def _restore_queues(table: ProgressTable, queues: Sequence[StoredEntry]) -> None:
    for key, sealed in queues:
        value, queue = unseal(key, sealed), decode_key(key)
        if table.placements.keeps(queue.group):
            table.restore(queue, decode_progress(queue, value))


def _restore_meta(table: ProgressTable, records: ResetHistory, meta: dict[bytes, bytes]) -> None:
    """Homes first: of a group that is not here nothing else counts."""
    for key, value in meta.items():
        if key.startswith(PLACEMENT):
            table.placements.put(key.removeprefix(PLACEMENT).decode(), decode_placement(value))
    for key, value in meta.items():
        if key.startswith(TOPIC):
            table.restore_topic(key.removeprefix(TOPIC).decode(), _number(meta, key))
        elif key.startswith(RESET):
            group = key.removeprefix(RESET).partition(b"\0")[0].decode()
            if table.placements.keeps(group):
                records.put(group, decode_reset(value))


def entries_of(
    table: ProgressTable, records: ResetHistory
) -> Callable[[DurableKey], Sequence[Entry]]:
    """How the present state of a key stands on the disk."""

    def entries(key: DurableKey) -> Sequence[Entry]:
        match key:
            case None:
                found = TERM, b"%d" % table.term
            case str():
                found = TOPIC + key.encode(), b"%d" % table.deleted_topic_id(key)
            case ResetSlot():
                at = RESET + key.group.encode() + b"\0%d" % key.slot
                found = at, encode_reset(records.at(key))
            case PlacementKey():
                home = table.placements.get(key.group)
                assert home is not None
                found = placement_entry(key.group, home)
            case RawEntries():
                return key.entries
            case TokenChangeKey():
                found = (
                    _hold_key(key.key, key.token_change.slot),
                    encode_token_change(key.token_change),
                )
            case GroupQueue():
                state = table.state(key)
                if isinstance(state, Tombstone):
                    return tombstone_entries(key, state)
                found = encode_key(key), encode_progress(state)
        return [(found[0], seal(*found))]

    return entries


def placement_entry(group: str, home: LocalPlacement) -> tuple[bytes, bytes]:
    """How it stands on the disk what became of a group; not sealed yet."""
    return PLACEMENT + group.encode(), encode_placement(home)


def tombstone_entries(key: GroupQueue, tombstone: Tombstone) -> list[Entry]:
    """How a queue stands on the disk whose progress has ended."""
    at = encode_key(key)
    forgotten = [(_hold_key(key, slot), None) for slot in range(HOLDS_MAX)]
    return [(at, seal(at, encode_progress(tombstone))), *forgotten]


async def entries_of_group(disk: ProgressStore, group: str) -> list[StoredEntry]:
    """All that is kept of a group, by key, but what became of it."""
    begin = group.encode() + b"\0"
    parts = [await disk.read_prefix(prefix + begin) for prefix in (HOLDS, RESET, b"")]
    return [found for part in parts for found in part]


async def find_token_changes(disk: ProgressStore, key: GroupQueue) -> list[TokenChange]:
    """The recorded changes of a queue's token, in no order.

    Raises:
        DataLoss: one can't be read.
    """
    stored = await disk.read_prefix(HOLDS + encode_key(key) + b"\0")
    return [decode_token_change(unseal(*each)) for each in stored]


def _hold_key(key: GroupQueue, slot: int) -> bytes:
    return HOLDS + encode_key(key) + b"\0%d" % slot


def _number(meta: dict[bytes, bytes], key: bytes) -> int:
    text = meta.get(key, b"0")
    if not text.isdigit():
        raise DataLoss(f"stored number {key!r} is {text[:40]!r}")
    return int(text)
