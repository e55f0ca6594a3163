"""Conversion between messages and the core's values; malformed messages are rejected."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from baton.common.v1 import queue_pb2
from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from baton.lockmgr.v1 import stored_lock_pb2
from batonmq._common.rpc import error_to_pb
from batonmq._core.names import check_broker, check_client_id, check_group, check_topic
from batonmq._core.queues import GroupQueue, Incarnation, QueueRef
from batonmq.errors import BatonError
from batonmq_server.lockmgr.core.lock_entry import (
    Denial,
    LockEntry,
    LockRecord,
    LockState,
    RunningHandler,
    WantedNotice,
    WantedReason,
)
from batonmq_server.lockmgr.core.lock_table import HoldReport, HoldState
from batonmq_server.lockmgr.validation import (
    QUEUE_ID_MAX,
    check_at_most,
    check_number,
    check_positive,
    check_unique,
)
from batonmq_server.runtime.paging import key_of_token, malformed_token

WatchNotice = tuple[GroupQueue, int, WantedNotice | None]
"""A queue and its token, with the notice for its owner; None if the queue is free instead."""

ORDERING_KEY_CHARACTERS_MAX = 255
"""Characters of an ordering key that are kept for display."""
FAILED_REASON_CHARACTERS_MAX = 255
_QUEUE_ID = re.compile(r"[0-9]{1,10}")
_HOLD_STATES = {state: pb.HoldState.Value(f"HOLD_STATE_{state.value}") for state in HoldState}
_WANTED_REASONS = {r: pb.WantedReason.Value(f"WANTED_REASON_{r.value}") for r in WantedReason}
_LOCK_STATES = {state: pb.LockState.Value(f"LOCK_STATE_{state.name}") for state in LockState}


def key_from_pb(queue: queue_pb2.GroupQueue) -> GroupQueue:
    """Return the queue.

    Raises:
        InvalidName: a name is not allowed.
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
    """Return the message of a queue."""
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
        case [group, topic, broker, queue_id] if _QUEUE_ID.fullmatch(queue_id):
            return GroupQueue(group, topic, broker, int(queue_id))
    raise malformed_token(page_token)


def incarnation_from_pb(incarnation: queue_pb2.Incarnation) -> Incarnation:
    """Return the incarnation.

    Raises:
        InvalidName: the client id is not allowed.
        InvalidArgument: the incarnation id is missing.
    """
    client_id = check_client_id(incarnation.client_id)
    check_positive("incarnation_id", incarnation.incarnation_id)
    return Incarnation(client_id, incarnation.incarnation_id, incarnation.owner)


def incarnation_to_pb(incarnation: Incarnation) -> queue_pb2.Incarnation:
    """Return the message of an incarnation."""
    return queue_pb2.Incarnation(
        client_id=incarnation.client_id,
        incarnation_id=incarnation.incarnation_id,
        owner=incarnation.owner,
    )


def holds_from_pb(holds: Iterable[pb.Hold]) -> list[tuple[GroupQueue, int]]:
    """Return the queues with their tokens.

    Raises:
        InvalidArgument: a token is missing, or a queue is listed twice.
        InvalidName, LimitExceeded: see `key_from_pb`.
    """
    tokens: dict[GroupQueue, int] = {}
    allowed: set[tuple[str, str, str]] = set()
    for hold in holds:
        check_positive("token", hold.token)
        queue = hold.queue.queue
        key = GroupQueue(hold.queue.group, queue.topic, queue.broker, queue.queue_id)
        if key[:3] not in allowed or key.queue_id > QUEUE_ID_MAX:
            allowed.add(key_from_pb(hold.queue)[:3])
        check_unique("holds", key, tokens)
        tokens[key] = hold.token
    return list(tokens.items())


def running_from_pb(holds: Iterable[pb.Hold]) -> dict[GroupQueue, RunningHandler]:
    """Return the handler calls that queues wait for.

    Raises:
        InvalidName, LimitExceeded: see `key_from_pb`.
        InvalidArgument: an offset or a time is negative.
    """
    handlers: dict[GroupQueue, RunningHandler] = {}
    for hold in holds:
        if hold.HasField("running"):
            call = hold.running
            key = key_from_pb(queue_pb2.GroupQueue(group=hold.queue.group, queue=call.queue))
            check_number("running.offset", call.offset)
            check_number("running.running_ms", call.running_ms)
            check_number("running.failed_count", call.failed_count)
            handlers[key_from_pb(hold.queue)] = RunningHandler(
                token=hold.token,
                queue=QueueRef(key.topic, key.broker, key.queue_id),
                offset=call.offset,
                running_ms=call.running_ms,
                abandoned=call.abandoned,
                ordering_key=call.ordering_key[:ORDERING_KEY_CHARACTERS_MAX],
                failed_count=call.failed_count,
                failed_reason=call.failed_reason[:FAILED_REASON_CHARACTERS_MAX],
            )
    return handlers


def lock_from_pb(stored: stored_lock_pb2.StoredLock) -> LockRecord:
    """Return a lock as etcd has it."""
    owner = stored.owner if stored.HasField("owner") else None
    return LockRecord(
        owner=Incarnation(owner.client_id, owner.incarnation_id, owner.owner) if owner else None,
        token=stored.token,
        acquire_seq=stored.acquire_seq,
        attempt=stored.attempt,
        generation=stored.generation,
        subscription_generation=stored.subscription_generation,
        forced_op_id=stored.forced_op_id,
    )


def lock_to_pb(key: GroupQueue, lock: LockRecord) -> stored_lock_pb2.StoredLock:
    """Return the message that etcd stores for a lock."""
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


def reports_to_pb(reports: Sequence[HoldReport], holds: Sequence[pb.Hold]) -> pb.KeepAliveResponse:
    """Return the answer to a keep-alive.

    Args:
        reports: One per hold, in order, then one per entry that the owner did not list.
    """
    response = pb.KeepAliveResponse()
    for number, (key, state, token, wanted) in enumerate(reports):
        queue = holds[number].queue if number < len(holds) else key_to_pb(key)
        line = response.reports.add(queue=queue, state=_HOLD_STATES[state], token=token)
        if wanted is not None:
            line.wanted_by = wanted.by
            line.wanted_reason = _WANTED_REASONS[wanted.reason]
    return response


def outcome_to_pb(decided: tuple[GroupQueue, pb.Grant | BatonError]) -> pb.AcquireResponse:
    """Return the outcome of one requested queue."""
    key, outcome = decided
    if isinstance(outcome, pb.Grant):
        return pb.AcquireResponse(queue=key_to_pb(key), grant=outcome)
    return pb.AcquireResponse(queue=key_to_pb(key), error=error_to_pb(outcome))


def notice_to_pb(notice: WatchNotice) -> pb.WatchResponse:
    """Return one event of a Watch stream."""
    key, token, wanted = notice
    queue = key_to_pb(key)
    if wanted is None:
        return pb.WatchResponse(freed=pb.Freed(queue=queue))
    reason = _WANTED_REASONS[wanted.reason]
    return pb.WatchResponse(wanted=pb.Wanted(queue=queue, token=token, by=wanted.by, reason=reason))


def denial_to_pb(denial: Denial, now_ms: int) -> pb.Denial:
    """Return one refusal, for Describe."""
    return pb.Denial(
        client_id=denial.client_id,
        error=error_to_pb(denial.error),
        age_ms=now_ms - denial.at_ms,
    )


def entry_to_pb(entry: LockEntry, now_ms: int, silence_ms: int) -> pb.LockEntry:
    """Return one entry, for List and Describe.

    Args:
        silence_ms: Time without a KeepAlive after which the lease of an owner has expired.
    """
    owner = entry.lock.owner
    lease_age_ms = now_ms - entry.lease_start_ms if owner else 0
    waiters = sorted(entry.waiters.items(), key=lambda item: (item[1].since_ms, item[0]))
    return pb.LockEntry(
        queue=key_to_pb(entry.key),
        state=_LOCK_STATES[entry.state],
        owner=incarnation_to_pb(owner) if owner else None,
        token=entry.lock.token,
        lease_age_ms=lease_age_ms,
        lease_expired=owner is not None and lease_age_ms >= silence_ms,
        held_ms=now_ms - entry.held_since_ms if owner else 0,
        waiters=[requester.client_id for requester, _ in waiters],
        generation=entry.lock.generation,
        acquire_seq=entry.lock.acquire_seq,
        subscription_generation=entry.lock.subscription_generation,
        running=_running_to_pb(entry, now_ms),
    )


def _running_to_pb(entry: LockEntry, now_ms: int) -> pb.RunningHandler | None:
    call = entry.running
    if call is None or entry.lock.owner is None or call.token != entry.lock.token:
        return None
    queue = queue_pb2.QueueRef(
        topic=call.queue.topic, broker=call.queue.broker, queue_id=call.queue.queue_id
    )
    return pb.RunningHandler(
        queue=queue,
        offset=call.offset,
        running_ms=call.running_ms + now_ms - entry.running_at_ms,
        abandoned=call.abandoned,
        ordering_key=call.ordering_key,
        failed_count=call.failed_count,
        failed_reason=call.failed_reason,
    )
