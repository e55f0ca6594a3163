"""The keys and values of the store, and the recovery of an epoch from them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from batonmq._common.aio import in_steps
from batonmq._core.queues import GroupQueue
from batonmq.errors import DataLoss
from batonmq_server.offsets.codec import (
    META,
    decode_key,
    decode_local_placement,
    decode_progress,
    decode_reset,
    decode_token_change,
    encode_key,
    encode_local_placement,
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
from batonmq_server.offsets.core.holds import HOLDS_MAX, TokenChange, slot_of
from batonmq_server.offsets.core.local_placements import LocalPlacement
from batonmq_server.offsets.core.progress import Progress
from batonmq_server.offsets.core.progress_table import ProgressTable
from batonmq_server.offsets.core.resets import RecordedReset, ResetHistory, ResetSlot
from batonmq_server.offsets.core.values import Instant, QueueLimits, Tombstone
from batonmq_server.offsets.disk import UNLIMITED, StoredEntry, StorePart

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class TokenChangeKey:
    """The record of one token change of a queue.

    It never changes, so it holds its own state; it is equal to itself alone.
    """

    key: GroupQueue
    token_change: TokenChange


@dataclass(frozen=True, slots=True)
class PlacementKey:
    """The local placement of a group."""

    group: str


@dataclass(frozen=True, slots=True, eq=False)
class RawEntries:
    """Entries to write or delete as they are, of a group that is imported or forgotten.

    Equal to itself alone, like `TokenChangeKey`.
    """

    entries: Sequence[Entry]


@dataclass(frozen=True, slots=True)
class FloorKey:
    """The floor of tokens and reset epochs."""


DurableKey = (
    GroupQueue | TokenChangeKey | ResetSlot | PlacementKey | RawEntries | FloorKey | str | None
)
"""What a change can affect: a queue, a token change, a recorded reset, the placement of a group,
raw entries, the floor, the deleted id of a topic (by its name), or the term of the lock manager
(None)."""

FORMAT = META + b"format"
TERM = META + b"term"
FLOOR = META + b"floor"
"""Token and reset epoch, as `token:reset_epoch`."""
TOPIC = META + b"topic\0"
"""Followed by the name of a topic."""
RESET = META + b"reset\0"
"""Followed by `group NUL slot`."""
HOLDS = META + b"hold\0"
"""Followed by `queue NUL slot`. Not kept in memory: read by ListHolds."""
PLACEMENT = META + b"home\0"
"""Prefix of local placements, stored as `home`; followed by the name of a group."""
_SLOTS = [b"%d" % slot for slot in range(HOLDS_MAX)]
_FORMAT_VERSION = b"3"

RECOVERY_STEP = 2_048
"""Queues recovered without an await."""


class ProgressStore(Protocol):
    """The disk as the service uses it; see `disk.LmdbDisk`."""

    def read(self, skip: bytes = b"") -> Iterator[StoredEntry]:
        """Yield all entries of one moment, ascending by key; leave out those of `skip`."""
        ...

    async def read_prefix(
        self, prefix: bytes, *, after: bytes = b"", bytes_max: int = UNLIMITED
    ) -> list[StoredEntry]:
        """Return the entries after `after` with keys that begin with `prefix`, up to a size."""
        ...

    async def read_part(
        self, after: bytes, until: bytes | None = None, bytes_max: int = UNLIMITED
    ) -> StorePart:
        """Return the entries after `after`, up to a key and a size, with those of the position."""
        ...

    async def snapshot(self, skip: bytes = b"") -> list[StoredEntry]:
        """Return all entries of `read` without blocking other tasks."""
        ...

    async def write(self, entries: Sequence[Entry]) -> None:
        """Write all entries or none, and return when they are durable."""
        ...

    def write_blocking(self, entries: Sequence[Entry]) -> None:
        """Do what `write` does, blocking."""
        ...

    async def replace(self, entries: Sequence[StoredEntry]) -> None:
        """Replace everything by these entries atomically, and return when they are durable."""
        ...

    async def wait_idle(self) -> None:
        """Return when no write is in progress, including those of cancelled callers."""
        ...

    def check_room(self) -> None:
        """Raise `DiskFull` if `write` would."""
        ...


def read_change_log(disk: ProgressStore, *, kept_bytes_max: int) -> ChangeLog:
    """Return the change log of a disk.

    Raises:
        DataLoss: position or history can't be read.
    """
    own = {
        key: value
        for key, value in disk.read(skip=HOLDS)
        if key in (META + POSITION, META + HISTORY)
    }
    return change_log_of(own, kept_bytes_max=kept_bytes_max)


def change_log_of(entries: Mapping[bytes, bytes], *, kept_bytes_max: int) -> ChangeLog:
    """Return the change log of a disk with these entries.

    Raises:
        DataLoss: position or history can't be read.
    """
    own = {
        name: unseal(META + name, entries[META + name])
        for name in (POSITION, HISTORY)
        if META + name in entries
    }
    return decode_change_log(own, kept_bytes_max=kept_bytes_max)


def next_change(log: ChangeLog, epoch: int, entries: Iterable[Entry]) -> StoreChange:
    """Return the next change with `entries`; it also writes the new position."""
    at, own = log.next(epoch)
    sealed = [(META + name, seal(META + name, value)) for name, value in own]
    return StoreChange(at, [*entries, *sealed])


def first_change(log: ChangeLog, epoch: int) -> StoreChange:
    """Return the first change of an epoch."""
    return next_change(log, epoch, [(FORMAT, _FORMAT_VERSION)])


def recover_standalone(
    disk: ProgressStore, limits: QueueLimits, now: Instant
) -> tuple[ChangeLog, ProgressTable, ResetHistory]:
    """Recover a node without followers, in a new epoch that is durable on return.

    Raises:
        DataLoss: a stored value can't be read or contradicts itself.
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
    """Return the stored table and history for a new epoch. Blocks until everything is read.

    Raises:
        DataLoss: a stored value can't be read or contradicts itself.
    """
    table, records, queues = _recovered_meta(disk.read(skip=HOLDS), limits, epoch, now)
    _restore_queues(table, queues)
    return table, records


async def recover_in_steps(
    disk: ProgressStore, limits: QueueLimits, epoch: int, now: Instant
) -> tuple[ProgressTable, ResetHistory]:
    """Do what `recover` does in steps: between two, other tasks run, such as the lease renewal.

    Raises:
        DataLoss: a stored value can't be read or contradicts itself.
    """
    entries = await disk.snapshot(skip=HOLDS)
    table, records, queues = _recovered_meta(entries, limits, epoch, now)
    for begin in range(0, len(queues), RECOVERY_STEP):
        _restore_queues(table, queues[begin : begin + RECOVERY_STEP])
        await asyncio.sleep(0)
    return table, records


def _recovered_meta(
    entries: Iterable[StoredEntry], limits: QueueLimits, epoch: int, now: Instant
) -> tuple[ProgressTable, ResetHistory, list[StoredEntry]]:
    """Return a table without queues, the history, and the stored entries of the queues."""
    meta: dict[bytes, bytes] = {}
    queues: list[StoredEntry] = []
    stored = dict(entries)
    version = stored.pop(FORMAT, _FORMAT_VERSION)
    if version != _FORMAT_VERSION:
        raise DataLoss(
            f"the stored progress has format {version!r}, this version reads {_FORMAT_VERSION!r}"
        )
    for key, sealed in stored.items():
        if key.startswith(META):
            meta[key] = unseal(key, sealed)
        else:
            queues.append((key, sealed))
    if queues and META + POSITION not in meta:
        raise DataLoss("the stored progress has queues but no position")
    table = ProgressTable(limits, epoch, _number(meta, TERM), now)
    records = ResetHistory()
    table.raise_floor(*_floor(meta))
    _restore_meta(table, records, meta)
    log.info("recovering queues=%d epoch=%d term=%d", len(queues), table.epoch, table.term)
    return table, records, queues


def _restore_queues(table: ProgressTable, queues: Sequence[StoredEntry]) -> None:
    for key, sealed in queues:
        value, queue = unseal(key, sealed), decode_key(key)
        if table.placements.keeps(queue.group):
            table.restore(queue, decode_progress(queue, value))


def _restore_meta(table: ProgressTable, records: ResetHistory, meta: dict[bytes, bytes]) -> None:
    """Restore placements first: the other entries of a group count only if it is kept here."""
    for key, value in meta.items():
        if key.startswith(PLACEMENT):
            table.placements.put(
                key.removeprefix(PLACEMENT).decode(), decode_local_placement(value)
            )
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
    """Return the function that encodes the current state of a durable key."""

    def entries(key: DurableKey) -> Sequence[Entry]:
        match key:
            case None:
                entry = TERM, b"%d" % table.term
            case FloorKey():
                entry = FLOOR, b"%d:%d" % table.floor
            case str():
                entry = TOPIC + key.encode(), b"%d" % table.deleted_topic_id(key)
            case ResetSlot():
                at = RESET + key.group.encode() + b"\0%d" % key.slot
                reset = records.at(key)
                if reset is None:
                    return [(at, None)]
                entry = at, encode_reset(reset)
            case PlacementKey():
                placement = table.placements.get(key.group)
                assert placement is not None
                entry = placement_entry(key.group, placement)
            case RawEntries():
                return key.entries
            case TokenChangeKey():
                entry = (
                    _hold_prefix(encode_key(key.key)) + _SLOTS[key.token_change.slot],
                    encode_token_change(key.token_change),
                )
            case GroupQueue():
                state = table.state(key)
                if state is None:
                    return [(encode_key(key), None)]
                if isinstance(state, Tombstone):
                    return tombstone_entries(key, state)
                entry = encode_key(key), encode_progress(state)
        return [(entry[0], seal(*entry))]

    return entries


def placement_entry(group: str, placement: LocalPlacement) -> tuple[bytes, bytes]:
    """Return the key and the unsealed value of a group's local placement."""
    return PLACEMENT + group.encode(), encode_local_placement(placement)


def tombstone_entries(key: GroupQueue, tombstone: Tombstone) -> list[Entry]:
    """Return the entries that store the deletion of a queue's progress and holds.

    They are as few as possible: a topic with many groups has 100,000 queues to be deleted at once.
    """
    at, end = encode_key(key), tombstone.token
    begin, prefix = max(end - HOLDS_MAX, 1), _hold_prefix(at)
    holds: list[Entry] = [(prefix + _SLOTS[slot_of(one)], None) for one in range(begin, end)]
    return [(at, seal(at, encode_progress(tombstone))), *holds]


async def entries_of_group(
    disk: ProgressStore, group: str, after: bytes = b"", bytes_max: int = UNLIMITED
) -> list[StoredEntry]:
    """Return the stored entries of a group, ascending by key, without its local placement.

    Args:
        after: Leave out the keys up to this one.
        bytes_max: Return no more entries once they have so many bytes.
    """
    begin, entries, room = group.encode() + b"\0", list[StoredEntry](), bytes_max
    for prefix in (HOLDS, RESET, b""):
        if room > 0:
            part = await disk.read_prefix(prefix + begin, after=after, bytes_max=room)
            room -= sum(len(key) + len(value) for key, value in part)
            entries += part
    return entries


async def state_of_group(
    disk: ProgressStore, group: str
) -> tuple[dict[GroupQueue, Progress | Tombstone], list[RecordedReset]]:
    """Return the stored queues and recorded resets of a group. Other tasks run meanwhile.

    Raises:
        DataLoss: an entry can't be read.
    """
    begin = group.encode() + b"\0"
    resets = [
        decode_reset(unseal(*entry))
        async for entry in in_steps(await disk.read_prefix(RESET + begin))
    ]
    queues: dict[GroupQueue, Progress | Tombstone] = {}
    async for key, sealed in in_steps(await disk.read_prefix(begin)):
        queue = decode_key(key)
        queues[queue] = decode_progress(queue, unseal(key, sealed))
    return queues, resets


async def find_token_changes(disk: ProgressStore, key: GroupQueue) -> list[TokenChange]:
    """Return the recorded token changes of a queue, in no order.

    Raises:
        DataLoss: a record can't be read.
    """
    stored = await disk.read_prefix(_hold_prefix(encode_key(key)))
    return [decode_token_change(unseal(*each)) for each in stored]


def _hold_prefix(encoded_key: bytes) -> bytes:
    return HOLDS + encoded_key + b"\0"


def _floor(meta: dict[bytes, bytes]) -> tuple[int, int]:
    text = meta.get(FLOOR, b"0:0")
    token, _, reset_epoch = text.partition(b":")
    if not (token.isdigit() and reset_epoch.isdigit()):
        raise DataLoss(f"the stored floor of tokens is {text[:40]!r}")
    return int(token), int(reset_epoch)


def _number(meta: dict[bytes, bytes], key: bytes) -> int:
    text = meta.get(key, b"0")
    if not text.isdigit():
        raise DataLoss(f"stored number {key!r} is {text[:40]!r}")
    return int(text)
