"""Between the wire and the core's values; refuses what is malformed whatever the state."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence

from baton.common.v1 import queue_pb2
from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from baton.lockmgr.v1 import stored_lock_pb2
from batonmq._common.rpc import error_to_pb
from batonmq._core.names import check_broker, check_client_id, check_group, check_topic
from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import InvalidArgument, LimitExceeded
from batonmq_server.lockmgr.core.locks import Denial, Entry, Lock, LockState, Wanted, WantedReason
from batonmq_server.lockmgr.core.table import HoldState, Report
from batonmq_server.runtime.paging import key_of_token, malformed_token

Notice = tuple[GroupQueue, int, Wanted | None]
"""A queue with its token, and why it is wanted from its owner; None if it is free instead."""
ITEMS_MAX = 1_024
HOLDS_MAX = 10_000
BY_MAX, REASON_MAX = 255, 1_024
RANGES_MAX = 4_096
"""Ranges one item may resume: what is in hand lies within a span of 2,000 offsets."""
QUEUE_ID_MAX = 65_535
NUMBER_MAX = 1 << 62
"""Offsets and epochs are not greater, here and at offsets."""

_OP_ID = re.compile(r"[!-~]{1,58}")
_HOLD_STATES = {state: pb.HoldState.Value(f"HOLD_STATE_{state.value}") for state in HoldState}
_WANTED_REASONS = {r: pb.WantedReason.Value(f"WANTED_REASON_{r.value}") for r in WantedReason}
_LOCK_STATES = {state: pb.LockState.Value(f"LOCK_STATE_{state.name}") for state in LockState}


def key_from_pb(queue: queue_pb2.GroupQueue) -> GroupQueue:
    """The queue, if its names are allowed.

    Raises:
        InvalidName: one is not.
        LimitExceeded: the queue id is too large.
    """
    check_at_most("queue_id", queue.queue.queue_id, QUEUE_ID_MAX)
    return GroupQueue(
        check_group(queue.group),
        check_topic(queue.queue.topic),
        check_broker(queue.queue.broker),
        queue.queue.queue_id,
    )


def key_to_pb(key: GroupQueue) -> queue_pb2.GroupQueue:
    """Inverse of `key_from_pb`."""
    queue = queue_pb2.QueueRef(topic=key.topic, broker=key.broker, queue_id=key.queue_id)
    return queue_pb2.GroupQueue(group=key.group, queue=queue)


def key_from_page_token(page_token: str) -> GroupQueue | None:
    """Return the key after which a page of a listing starts; None for the first page.

    Raises:
        InvalidArgument: the token is malformed.
    """
    encoded = key_of_token(page_token)
    if not encoded:
        return None
    match encoded.split("/"):
        case [group, topic, broker, queue_id] if queue_id.isdecimal():
            return GroupQueue(group, topic, broker, int(queue_id))
    raise malformed_token(page_token)


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


def holds_from_pb(holds: Iterable[pb.Hold]) -> list[tuple[GroupQueue, int]]:
    """Queues with tokens, each queue once.

    Raises:
        InvalidArgument: a token is missing, or a queue is named twice.
        InvalidName, LimitExceeded: see `key_from_pb`.
    """
    found: dict[GroupQueue, int] = {}
    allowed: set[tuple[str, str, str]] = set()
    for hold in holds:
        check_positive("token", hold.token)
        queue = hold.queue.queue
        key = GroupQueue(hold.queue.group, queue.topic, queue.broker, queue.queue_id)
        if key[:3] not in allowed or key.queue_id > QUEUE_ID_MAX:
            allowed.add(key_from_pb(hold.queue)[:3])
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


def check_new(field: str, key: GroupQueue, seen: Container[GroupQueue]) -> None:
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


def check_text(field: str, value: str, chars_max: int) -> str:
    """Refuse a text that is missing or too long."""
    if not value:
        raise InvalidArgument(f"{field} is missing", facts={"field": field})
    check_at_most(field, len(value), chars_max)
    return value


def check_op_id(value: str) -> str:
    """Refuse an operation id that can't be part of the id of a fence."""
    if not _OP_ID.fullmatch(value):
        raise InvalidArgument(
            f"op_id {value[:80]!r} is not 1 to 58 visible ASCII characters",
            facts={"field": "op_id"},
        )
    return value


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
        subscription_generation=stored.subscription_generation,
        forced_op_id=stored.forced_op_id,
    )


def lock_to_pb(key: GroupQueue, lock: Lock) -> stored_lock_pb2.StoredLock:
    """Inverse of `lock_from_pb`."""
    return stored_lock_pb2.StoredLock(
        queue=key_to_pb(key),
        owner=incarnation_to_pb(lock.owner) if lock.owner else None,
        token=lock.token,
        acquire_seq=lock.acquire_seq,
        attempt=lock.attempt,
        generation=lock.generation,
        subscription_generation=lock.subscription_generation,
        forced_op_id=lock.forced_op_id,
    )


def reports_to_pb(reports: Sequence[Report], holds: Sequence[pb.Hold]) -> pb.KeepAliveResponse:
    """A keep-alive's answer: first a report per hold, in order, then those of orphans."""
    response = pb.KeepAliveResponse()
    for number, (key, state, token, wanted) in enumerate(reports):
        queue = holds[number].queue if number < len(holds) else key_to_pb(key)
        line = response.reports.add(queue=queue, state=_HOLD_STATES[state], token=token)
        if wanted is not None:
            line.wanted_by = wanted.by
            line.wanted_reason = _WANTED_REASONS[wanted.reason]
    return response


def notice_to_pb(notice: Notice) -> pb.WatchResponse:
    """One event of a watch."""
    key, token, wanted = notice
    queue = key_to_pb(key)
    if wanted is None:
        return pb.WatchResponse(freed=pb.Freed(queue=queue))
    reason = _WANTED_REASONS[wanted.reason]
    return pb.WatchResponse(wanted=pb.Wanted(queue=queue, token=token, by=wanted.by, reason=reason))


def denial_to_pb(denial: Denial, now_ms: int) -> pb.Denial:
    """One refusal of a description."""
    return pb.Denial(
        client_id=denial.client_id,
        error=error_to_pb(denial.error),
        age_ms=now_ms - denial.at_ms,
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
        subscription_generation=entry.lock.subscription_generation,
    )
