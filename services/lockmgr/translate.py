"""Between the wire and the core's values; refuses what is malformed whatever the state."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from baton.common.v1 import queue_pb2
from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from baton.lockmgr.v1 import stored_lock_pb2

from batonmq.common.errors import InvalidArgument, LimitExceeded
from batonmq.core.names import check_broker, check_client_id, check_group, check_topic
from services.lockmgr.core.locks import Entry, Incarnation, Lock, LockState, QueueKey
from services.lockmgr.core.table import HoldState, Report

ITEMS_MAX = 1_024
HOLDS_MAX = 10_000
RANGES_MAX = 4_096
"""Ranges one item may resume: what is in hand lies within a span of 2,000 offsets."""
QUEUE_ID_MAX = 65_535
NUMBER_MAX = 1 << 62
"""Offsets and epochs are not greater, here and at offsets."""

_HOLD_STATES = {state: pb.HoldState.Value(f"HOLD_STATE_{state.value}") for state in HoldState}
_LOCK_STATES = {state: pb.LockState.Value(f"LOCK_STATE_{state.name}") for state in LockState}


def key_from_pb(queue: queue_pb2.GroupQueue) -> QueueKey:
    """The queue, if its names are allowed.

    Raises:
        InvalidName: one is not.
        LimitExceeded: the queue id is too large.
    """
    check_at_most("queue_id", queue.queue.queue_id, QUEUE_ID_MAX)
    return QueueKey(
        check_group(queue.group),
        check_topic(queue.queue.topic),
        check_broker(queue.queue.broker),
        queue.queue.queue_id,
    )


def key_to_pb(key: QueueKey) -> queue_pb2.GroupQueue:
    """Inverse of `key_from_pb`."""
    queue = queue_pb2.Queue(topic=key.topic, broker=key.broker, queue_id=key.queue_id)
    return queue_pb2.GroupQueue(group=key.group, queue=queue)


def incarnation_from_pb(incarnation: queue_pb2.Incarnation) -> Incarnation:
    """The incarnation, if it is complete.

    Raises:
        InvalidName: the client id is not allowed.
        InvalidArgument: the incarnation id is missing.
    """
    client_id = check_client_id(incarnation.client_id)
    check_positive("incarnation_id", incarnation.incarnation_id)
    return Incarnation(client_id, incarnation.incarnation_id)


def incarnation_to_pb(incarnation: Incarnation) -> queue_pb2.Incarnation:
    """Inverse of `incarnation_from_pb`."""
    return queue_pb2.Incarnation(
        client_id=incarnation.client_id, incarnation_id=incarnation.incarnation_id
    )


def holds_from_pb(holds: Iterable[pb.Hold]) -> list[tuple[QueueKey, int]]:
    """Queues with tokens, each queue once.

    Raises:
        InvalidArgument: a token is missing, or a queue is named twice.
        InvalidName, LimitExceeded: see `key_from_pb`.
    """
    found: dict[QueueKey, int] = {}
    for hold in holds:
        check_positive("token", hold.token)
        key = key_from_pb(hold.queue)
        check_new("holds", key, found)
        found[key] = hold.token
    return list(found.items())


def check_ranges(ranges: Sequence[queue_pb2.OffsetRange]) -> None:
    """Ranges of offsets, as an asker brings them along: ascending, disjoint.

    Raises:
        LimitExceeded: there are too many.
        InvalidArgument: one is empty, out of order or out of bounds.
    """
    check_at_most("resume", len(ranges), RANGES_MAX)
    lowest = 0
    for part in ranges:
        if not lowest <= part.first_offset < part.next_offset <= NUMBER_MAX:
            raise InvalidArgument(
                f"resume holds [{part.first_offset}, {part.next_offset}) after offset {lowest}",
                facts={"field": "resume"},
            )
        lowest = part.next_offset


def check_new(field: str, key: QueueKey, seen: Container[QueueKey]) -> None:
    """Refuse a queue that the same request has named before."""
    if key in seen:
        raise InvalidArgument(f"{field} names {key} twice", facts={"field": field})


def check_positive(field: str, value: int) -> None:
    """Refuse a number that must be positive and is not."""
    if value <= 0:
        raise InvalidArgument(f"{field} is {value}, not positive", facts={"field": field})


def check_number(field: str, value: int) -> None:
    """Refuse an offset or an epoch that is negative or absurdly large."""
    if not 0 <= value <= NUMBER_MAX:
        raise InvalidArgument(f"{field} is {value}, not 0 to {NUMBER_MAX}", facts={"field": field})


def check_at_most(field: str, actual: int, limit: int) -> None:
    """Refuse what is larger than `limit`."""
    if actual > limit:
        raise LimitExceeded(
            f"{field} is {actual}, more than {limit}",
            facts={"field": field, "limit": limit, "actual": actual},
        )


def check_any(field: str, count: int) -> None:
    """Refuse an empty list."""
    if count == 0:
        raise InvalidArgument(f"{field} is empty", facts={"field": field})


def lock_from_pb(stored: stored_lock_pb2.StoredLock) -> Lock:
    """A lock as etcd has it."""
    owner = stored.owner if stored.HasField("owner") else None
    return Lock(
        owner=Incarnation(owner.client_id, owner.incarnation_id) if owner else None,
        token=stored.token,
        acquire_seq=stored.acquire_seq,
        attempt=stored.attempt,
        generation=stored.generation,
    )


def lock_to_pb(key: QueueKey, lock: Lock) -> stored_lock_pb2.StoredLock:
    """Inverse of `lock_from_pb`."""
    return stored_lock_pb2.StoredLock(
        queue=key_to_pb(key),
        owner=incarnation_to_pb(lock.owner) if lock.owner else None,
        token=lock.token,
        acquire_seq=lock.acquire_seq,
        attempt=lock.attempt,
        generation=lock.generation,
    )


def report_to_pb(report: Report) -> pb.HoldReport:
    """One line of a keep-alive's answer."""
    return pb.HoldReport(
        queue=key_to_pb(report.key),
        state=_HOLD_STATES[report.state],
        token=report.token,
        wanted_by=report.wanted_by,
    )


def entry_to_pb(entry: Entry, now_ms: int) -> pb.LockEntry:
    """One line of a listing."""
    owner = entry.lock.owner
    waiters = sorted(entry.waiters.items(), key=lambda item: (item[1].since_ms, item[0]))
    return pb.LockEntry(
        queue=key_to_pb(entry.key),
        state=_LOCK_STATES[entry.state],
        owner=incarnation_to_pb(owner) if owner else None,
        token=entry.lock.token,
        lease_age_ms=now_ms - entry.lease_start_ms if owner else 0,
        held_ms=now_ms - entry.held_since_ms if owner else 0,
        waiters=[asker.client_id for asker, _ in waiters],
        generation=entry.lock.generation,
        acquire_seq=entry.lock.acquire_seq,
    )
