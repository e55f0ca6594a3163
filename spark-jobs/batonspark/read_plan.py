"""Plan of a read: the slices of the queues to read. Runs in the driver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from batonmq._core.queues import QueueRef
from batonspark.cluster import ClusterClient, StoredExtent
from batonspark.decode import QueueSlice
from batonspark.offsets import Offsets, key_of, queue_of
from batonspark.options import BadOption, FromTime, OffsetsOption, ReadOptions

T = TypeVar("T")
OFFSET_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class ReadFilter:
    """The part of a query's filters that lets a read skip messages.

    Attributes:
        brokers, queue_ids: Only these; None for all.
        first_offset, next_offset: Offsets [first_offset, next_offset).
        from_unix_ms, to_unix_ms: Store times, both inclusive; None is no bound.
    """

    brokers: frozenset[str] | None = None
    queue_ids: frozenset[int] | None = None
    first_offset: int = 0
    next_offset: int = OFFSET_MAX
    from_unix_ms: int | None = None
    to_unix_ms: int | None = None

    def includes(self, queue: QueueRef) -> bool:
        """Return whether the queue has to be read."""
        return (self.brokers is None or queue.broker in self.brokers) and (
            self.queue_ids is None or queue.queue_id in self.queue_ids
        )


def narrow(wanted: ReadFilter, filters: Iterable[Filter], prefix: str) -> ReadFilter:
    """Return `wanted` restricted by all filters that it supports; others are ignored.

    Args:
        prefix: Prefix of the columns broker, queue_id and offset: `sys_` in the view `metrics`.
    """
    for one in filters:
        attribute = getattr(one, "attribute", None)
        if attribute is None or len(attribute) != 1:
            continue
        name = attribute[0].lower()
        if name == "store_time":
            wanted = _by_time(wanted, one)
        elif name == f"{prefix}offset":
            wanted = _by_offset(wanted, one)
        elif name in (f"{prefix}broker", f"{prefix}queue_id"):
            wanted = _by_queue(wanted, one, name.removeprefix(prefix))
    return wanted


def stored_extents(cluster: ClusterClient, options: ReadOptions) -> dict[str, StoredExtent]:
    """Return the stored offsets of the queues to read, by `broker/queue_id`.

    Raises:
        BadOption: a queue in the options does not exist.
        TopicNotFound: the topic does not exist.
    """
    found = {key_of(queue): extent for queue, extent in cluster.extents(options.topic).items()}
    if options.queues is None:
        return found
    if missing := sorted(options.queues - found.keys()):
        raise BadOption(f"topic {options.topic} has no queue {missing[0]}")
    return {key: found[key] for key in options.queues}


def resolve_offsets(
    cluster: ClusterClient,
    options: ReadOptions,
    extents: Mapping[str, StoredExtent],
    where: OffsetsOption,
) -> Offsets:
    """Return the offset of a position in each queue.

    Raises:
        BadOption: a queue in the position does not exist.
    """
    if isinstance(where, FromTime):
        queues = {key: queue_of(options.topic, key) for key in extents}
        found = cluster.offsets_at(queues.values(), where.unix_ms)
        return {key: found[queue] for key, queue in queues.items()}
    if isinstance(where, str):
        where = dict.fromkeys(extents, where)
    if missing := sorted(where.keys() - extents.keys()):
        raise BadOption(f"topic {options.topic} has no queue {missing[0]}")
    offsets: Offsets = {}
    for key, extent in extents.items():
        place = where.get(key, "earliest")
        named = {"earliest": extent.first_offset, "latest": extent.next_offset}
        offsets[key] = place if isinstance(place, int) else named[place]
    return offsets


def batch_slices(
    cluster: ClusterClient, options: ReadOptions, wanted: ReadFilter
) -> list[QueueSlice]:
    """Return the slices of a batch read, one of each queue.

    Raises:
        BadOption: the end is behind the stored messages.
    """
    extents = {
        key: extent
        for key, extent in stored_extents(cluster, options).items()
        if wanted.includes(queue_of(options.topic, key))
    }
    begin = resolve_offsets(cluster, options, extents, _of(options.starting, extents))
    end = resolve_offsets(cluster, options, extents, _of(options.ending, extents))
    for key, offset in end.items():
        if offset > extents[key].next_offset:
            raise BadOption(f"queue {key} ends at {extents[key].next_offset}, before {offset}")
    if wanted.from_unix_ms is not None:
        since = resolve_offsets(cluster, options, extents, FromTime(wanted.from_unix_ms))
        begin = {key: max(offset, since[key]) for key, offset in begin.items()}
    if wanted.to_unix_ms is not None:
        until = resolve_offsets(cluster, options, extents, FromTime(wanted.to_unix_ms + 1))
        end = {key: min(offset, until[key]) for key, offset in end.items()}
    return [
        QueueSlice(queue_of(options.topic, key), first, after, extents[key].topic_id)
        for key in sorted(extents)
        if (first := max(begin[key], wanted.first_offset))
        < (after := min(end[key], wanted.next_offset))
    ]


def _of(where: OffsetsOption, extents: Mapping[str, StoredExtent]) -> OffsetsOption:
    """Return the position without queues that are not read."""
    if isinstance(where, str | FromTime):
        return where
    return {key: place for key, place in where.items() if key in extents}


def _by_queue(wanted: ReadFilter, one: Filter, name: str) -> ReadFilter:
    if isinstance(one, In):
        values: frozenset[Any] = frozenset(one.value)
    elif isinstance(one, EqualTo | EqualNullSafe):
        values = frozenset([one.value])
    else:
        return wanted
    if name == "broker":
        return replace(wanted, brokers=_both(wanted.brokers, values))
    return replace(wanted, queue_ids=_both(wanted.queue_ids, values))


def _both(before: frozenset[T] | None, values: frozenset[T]) -> frozenset[T]:
    return values if before is None else before & values


def _by_offset(wanted: ReadFilter, one: Filter) -> ReadFilter:
    value = getattr(one, "value", None)
    if not isinstance(value, int):
        return wanted
    first, after = 0, OFFSET_MAX
    if isinstance(one, EqualTo | EqualNullSafe | GreaterThanOrEqual):
        first = value
    if isinstance(one, GreaterThan):
        first = value + 1
    if isinstance(one, EqualTo | EqualNullSafe | LessThanOrEqual):
        after = value + 1
    if isinstance(one, LessThan):
        after = value
    return replace(
        wanted,
        first_offset=max(wanted.first_offset, first),
        next_offset=min(wanted.next_offset, after),
    )


def _by_time(wanted: ReadFilter, one: Filter) -> ReadFilter:
    value = getattr(one, "value", None)
    if not isinstance(value, datetime):
        return wanted
    aware = value if value.tzinfo else value.replace(tzinfo=UTC)
    unix_ms = int(aware.timestamp() * 1000)  # store times are whole milliseconds
    since, until = wanted.from_unix_ms, wanted.to_unix_ms
    if isinstance(one, EqualTo | EqualNullSafe | GreaterThan | GreaterThanOrEqual):
        since = unix_ms if since is None else max(since, unix_ms)
    if isinstance(one, EqualTo | EqualNullSafe | LessThan | LessThanOrEqual):
        until = unix_ms if until is None else min(until, unix_ms)
    return replace(wanted, from_unix_ms=since, to_unix_ms=until)
