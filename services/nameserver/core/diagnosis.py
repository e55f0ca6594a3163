"""Diagnosis of a queue: the one reason why it is stuck, found from the evidence, and the remedy.

Several causes may exist at once; the reason that is returned is the one to fix first. A service
that does not answer is a reason, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from batonmq_server.nameserver.core.evidence import (
    HandlerEvidence,
    HeldState,
    ProgressEvidence,
    QueueEvidence,
    RemoteMessage,
)

LATELY_MS = 5_000
"""A queue is moving if its committed offset has changed within this time, or if its oldest message
is younger."""
SILENT_MS = 12_000
"""An owner that has not renewed its lease for this time is silent. A live owner renews its lease
and its long poll every 5 s."""


class StuckReason(StrEnum):
    """The values of the contract's `StuckReason`, which explains them, without their prefix."""

    MOVING = "MOVING"
    IDLE = "IDLE"
    NO_MEMBER = "NO_MEMBER"
    NOT_ASSIGNED = "NOT_ASSIGNED"
    REFUSED_SUBSCRIPTION = "REFUSED_SUBSCRIPTION"
    SUBSCRIPTION_DRAINING = "SUBSCRIPTION_DRAINING"
    HELD = "HELD"
    OWNER_SILENT = "OWNER_SILENT"
    HANDOVER_PENDING = "HANDOVER_PENDING"
    PHANTOM_TOKEN = "PHANTOM_TOKEN"
    HEAD_OF_LINE = "HEAD_OF_LINE"
    ACK_CAP = "ACK_CAP"
    NOT_PULLING = "NOT_PULLING"
    FILTERED = "FILTERED"
    PAUSED = "PAUSED"
    NOT_READABLE = "NOT_READABLE"
    OFFSET_AHEAD_OF_LOG = "OFFSET_AHEAD_OF_LOG"
    STORAGE_UNREACHABLE = "STORAGE_UNREACHABLE"
    OFFSETS_UNREACHABLE = "OFFSETS_UNREACHABLE"
    LOCKMGR_UNREACHABLE = "LOCKMGR_UNREACHABLE"
    NOT_ACQUIRED = "NOT_ACQUIRED"
    DATA_LOSS = "DATA_LOSS"
    OUTDATED_NODE = "OUTDATED_NODE"
    OUTPUTS_REFUSED = "OUTPUTS_REFUSED"

    @property
    def stuck(self) -> bool:
        """Whether the queue is stuck, so that something has to be fixed."""
        return self not in (StuckReason.MOVING, StuckReason.IDLE, StuckReason.FILTERED)


@dataclass(frozen=True, slots=True)
class Finding:
    """The reason why a queue is stuck, or that it is not.

    Attributes:
        message: The reason as a sentence, with its values.
        remedy: What the operator has to do; empty if nothing.
        values: Values of the reason by name, as the contract lists them.
    """

    reason: StuckReason
    message: str
    remedy: str = ""
    values: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueueDiagnosis:
    """The evidence about a queue, and what was found from it."""

    evidence: QueueEvidence
    finding: Finding


HOLDER_MATTERS = (
    StuckReason.HELD,
    StuckReason.HEAD_OF_LINE,
    StuckReason.ACK_CAP,
    StuckReason.NOT_PULLING,
)
"""Reasons that say more if the owner is a gateway and says which client holds the message."""


def diagnose(evidence: QueueEvidence) -> Finding:
    """Return the reason to fix first."""
    findings = (rule(evidence) for rule in _RULES)
    return next(finding for finding in findings if finding is not None)


def span(ms: int) -> str:
    """Return a time span for display, such as `3.2 s` or `4 min`."""
    if ms < 10_000:
        return f"{ms / 1000:.1f} s"
    seconds = ms // 1000
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def _offsets_unreachable(e: QueueEvidence) -> Finding | None:
    if not e.progress_error:
        return None
    return Finding(
        StuckReason.OFFSETS_UNREACHABLE,
        f"the offsets service does not answer, so nothing is delivered: {e.progress_error}",
        "Restore the offsets service: see its log and `baton cluster status`.",
        {"error": e.progress_error},
    )


def _storage_unreachable(e: QueueEvidence) -> Finding | None:
    if not e.log_error:
        return None
    return Finding(
        StuckReason.STORAGE_UNREACHABLE,
        f"broker {e.broker} does not answer for {e.name}: {e.log_error}",
        f"Restore {e.broker}: see its log and `baton cluster status`.",
        {"broker": e.broker, "error": e.log_error},
    )


def _offset_ahead_of_log(e: QueueEvidence) -> Finding | None:
    if e.log is None or e.committed_offset <= e.log.next_offset:
        return None
    return Finding(
        StuckReason.OFFSET_AHEAD_OF_LOG,
        f"the group has committed offset {e.committed_offset} of {e.name}, but the log ends at "
        f"{e.log.next_offset}: the broker has lost messages that were handled",
        "Find out which messages the broker lost; then run `baton group reset-offsets` to an "
        "offset that the queue has.",
        {"committed_offset": e.committed_offset, "next_offset": e.log.next_offset},
    )


def _idle(e: QueueEvidence) -> Finding | None:
    if e.log is None or e.lag_count != 0:
        return None
    return Finding(
        StuckReason.IDLE,
        f"all messages up to offset {e.log.next_offset} are handled",
        values={"next_offset": e.log.next_offset},
    )


def _not_readable(e: QueueEvidence) -> Finding | None:
    if "READ" in e.permission:
        return None
    return Finding(
        StuckReason.NOT_READABLE,
        f"topic {e.topic} can't be read: its permission is {e.permission}",
        "Change the permission of the topic to one that allows reading.",
        {"permission": e.permission},
    )


def _paused(e: QueueEvidence) -> Finding | None:
    pause = e.group.paused
    if pause is None:
        return None
    return Finding(
        StuckReason.PAUSED,
        f"{pause.by} paused the group {span(pause.since_ms)} ago"
        + (f": {pause.reason}" if pause.reason else ""),
        f"`baton group resume {e.group.name}` resumes deliveries.",
        {"by": pause.by, "reason": pause.reason, "since_ms": pause.since_ms},
    )


def _subscription_draining(e: QueueEvidence) -> Finding | None:
    change = e.group.change
    if change is None:
        return None
    return Finding(
        StuckReason.SUBSCRIPTION_DRAINING,
        "the subscription of the group is being changed, requested "
        f"{span(change.since_ms)} ago; queues not released yet: {change.open_grants}",
        "Wait; if it lasts, find the owners that do not release their queues (`baton lock list`).",
        {"since_ms": change.since_ms, "open_grants": change.open_grants},
    )


def _refused_subscription(e: QueueEvidence) -> Finding | None:
    if e.assigned or (e.group.broadcasting and e.group.member_count):
        return None
    of_topic = [c for c in e.group.excluded if any(m.topic == e.topic for m in c.mismatches)]
    others = e.group.excluded if e.expression is not None else ()
    excluded = next(iter((*of_topic, *others)), None)
    if excluded is None:
        return None
    values: dict[str, object] = {
        "client_id": excluded.client_id,
        "member_client_id": excluded.member_client_id,
    }
    for number, mismatch in enumerate(excluded.mismatches, 1):
        suffix = f"_{number}" if number > 1 else ""
        values |= {
            f"topic{suffix}": mismatch.topic,
            f"wants{suffix}": mismatch.wants,
            f"has{suffix}": mismatch.has,
        }
    points = "; ".join(
        f"{m.topic}: it wants {m.wants or 'nothing'}, the group has {m.has or 'nothing'}"
        for m in excluded.mismatches
    )
    state = "has a staged subscription" if excluded.staged else "is refused for its subscription"
    return Finding(
        StuckReason.REFUSED_SUBSCRIPTION,
        f"{e.name} is not assigned, and {excluded.client_id} {state}"
        + (f": {points}" if points else ""),
        f"Give {excluded.client_id} the subscription of "
        f"{excluded.member_client_id or 'the group'}, or its own group.",
        values,
    )


def _no_member(e: QueueEvidence) -> Finding | None:
    if e.group.member_count:
        return None
    return Finding(
        StuckReason.NO_MEMBER,
        f"group {e.group.name} has no member (generation {e.group.generation})",
        "Start a consumer.",
        {"generation": e.group.generation},
    )


def _not_assigned(e: QueueEvidence) -> Finding | None:
    if e.group.broadcasting or e.assigned:
        return None
    values = {"generation": e.group.generation, "members": e.group.member_count}
    if e.expression is None:
        return Finding(
            StuckReason.NOT_ASSIGNED,
            f"group {e.group.name} does not subscribe to {e.topic}",
            f"If the group should read {e.topic}, let its members subscribe to it.",
            values,
        )
    return Finding(
        StuckReason.NOT_ASSIGNED,
        f"{e.name} is assigned to none of the {e.group.member_count} members of the group "
        f"(generation {e.group.generation})",
        "Wait a second: new queues are assigned at once. If it lasts, see the nameserver's log.",
        values,
    )


def _data_loss(e: QueueEvidence) -> Finding | None:
    if e.damage is None:
        return None
    return Finding(
        StuckReason.DATA_LOSS,
        f"the next message of {e.name} can't be read: {e.damage.error}",
        f"Run `baton fsck` on {e.broker}; then `baton group reset-offsets` to an offset after the "
        "damaged messages.",
        {"position": e.damage.position, "error": e.damage.error},
    )


def _tier_unreachable(e: QueueEvidence) -> Finding | None:
    if not e.tier_error:
        return None
    return Finding(
        StuckReason.STORAGE_UNREACHABLE,
        f"the next message of {e.name} is in the object store, which {e.broker} can't read: "
        f"{e.tier_error}",
        f"Restore the object store, or the access of {e.broker} to it; delivery then continues by "
        "itself, and no message is skipped.",
        {"broker": e.broker, "error": e.tier_error},
    )


def _moving(e: QueueEvidence) -> Finding | None:
    if e.group.broadcasting:
        return Finding(
            StuckReason.MOVING,
            f"group {e.group.name} is broadcasting: each member keeps its own progress, and the "
            "cluster does not stop it from reading",
        )
    if e.moved and 0 <= e.unmoved_ms <= LATELY_MS:
        return Finding(
            StuckReason.MOVING,
            f"committed offset {e.committed_offset} was reached within the last "
            f"{span(e.unmoved_ms)}; {_messages(e.lag_count)} waiting",
        )
    if 0 <= e.lag_ms < LATELY_MS:
        return Finding(
            StuckReason.MOVING,
            f"{_messages(e.lag_count)} waiting, of which the oldest is only {span(e.lag_ms)} old",
        )
    return None


def _lockmgr_unreachable(e: QueueEvidence) -> Finding | None:
    if not e.group.owned or not e.lock_error:
        return None
    return Finding(
        StuckReason.LOCKMGR_UNREACHABLE,
        f"the lock manager does not answer, so no queue can get an owner: {e.lock_error}",
        "Restore the lock manager: see its log and `baton cluster status`.",
        {"error": e.lock_error},
    )


def _handover_pending(e: QueueEvidence) -> Finding | None:
    if e.lock is None or not e.lock.step:
        return None
    return Finding(
        StuckReason.HANDOVER_PENDING,
        f"a hand-over of {e.name} is pending; step: {e.lock.step}",
        "Wait a second. If it lasts, the lock manager can't reach the offsets service or etcd: see "
        "its log.",
        {"step": e.lock.step, "attempt": e.lock.attempt},
    )


def _not_acquired(e: QueueEvidence) -> Finding | None:
    if not e.group.owned or e.owner:
        return None
    denial = f"; last denial: {e.lock.denial}" if e.lock and e.lock.denial else ""
    return Finding(
        StuckReason.NOT_ACQUIRED,
        f"{e.name} is assigned to {e.assigned}, which has not acquired it{denial}",
        f"See the log of {e.assigned}. If it does not run, it is removed when its lease expires.",
        {"assigned": e.assigned},
    )


def _owner_silent(e: QueueEvidence) -> Finding | None:
    if e.lock is None or e.lock.lease_age_ms < SILENT_MS:
        return None
    if e.progress is not None and e.progress.idle_ms < SILENT_MS:
        return None  # It pulls or commits: only its calls to the lock manager are missing.
    left = e.lock.lease_left_ms
    expiry = f"its lease expires in {span(left)}" if left > 0 else "its lease has expired"
    return Finding(
        StuckReason.OWNER_SILENT,
        f"{e.owner}, which owns {e.name}, last renewed its lease "
        f"{span(e.lock.lease_age_ms)} ago; {expiry}"
        + (f"; waiting: {', '.join(e.lock.waiters)}" if e.lock.waiters else ""),
        f"Check whether {e.owner} runs. When its lease has expired, another member acquires the "
        "queue.",
        {"owner": e.owner, "lease_left_ms": max(0, left)},
    )


def _phantom_token(e: QueueEvidence) -> Finding | None:
    if e.lock is None or e.progress is None or e.lock.token >= e.progress.token:
        return None
    return Finding(
        StuckReason.PHANTOM_TOKEN,
        f"the offsets service has token {e.progress.token} for {e.name}, the lock manager has "
        f"{e.lock.token}: {e.owner} has to acquire the queue again",
        f"Wait: {e.owner} acquires it again, or if it is dead, its lease expires. If it lasts, "
        "`baton lock release --force` takes the queue away.",
        {"lock_token": e.lock.token, "offsets_token": e.progress.token},
    )


def _held(e: QueueEvidence) -> Finding | None:
    if e.lock is None or e.owner == e.assigned:
        return None
    waiters = ", ".join(e.lock.waiters)
    in_flight = _messages_in_flight(e.progress) if e.progress else _messages(0)
    return Finding(
        StuckReason.HELD,
        f"{e.owner} has owned {e.name} for {span(e.lock.held_ms)} and has not released it, with "
        f"{in_flight} in flight; the queue is assigned to {e.assigned}"
        + (f"; {_remote_clause(e)}" if _remote_head(e) else ""),
        f"Wait until {e.owner} has handled its messages in flight, or stop it. `baton lock release "
        "--force` takes the queue away; messages in flight are then delivered again, flagged.",
        {
            "owner": e.owner,
            "held_ms": e.lock.held_ms,
            "token": e.lock.token,
            "waiters": waiters,
        }
        | _remote_values(e),
    )


def _ack_cap(e: QueueEvidence) -> Finding | None:
    if e.progress is None or not e.progress.capped:
        return None
    return Finding(
        StuckReason.ACK_CAP,
        f"{e.progress.acked_range_count} ranges are acknowledged after offset {e.head_offset}, "
        f"which is not: deliveries stop until {e.owner} acknowledges {_head(e)}{_of_key(e)}",
        f"Handle or skip that message: see the log of {e.owner}.",
        _in_flight(e) | _running(e) | {"ranges": e.progress.acked_range_count},
    )


def _gateway_ack_cap(e: QueueEvidence) -> Finding | None:
    if e.gateway is None or e.progress is None or not e.progress.capped:
        return None
    return Finding(
        StuckReason.ACK_CAP,
        f"{e.progress.acked_range_count} ranges are acknowledged after offset {e.head_offset}, "
        f"which is not: deliveries stop until it is; {_remote_clause(e)}",
        _remote_remedy(e),
        _in_flight(e) | _remote_values(e) | {"ranges": e.progress.acked_range_count},
    )


def _gateway_head_of_line(e: QueueEvidence) -> Finding | None:
    progress = e.progress
    if e.gateway is None or progress is None:
        return None
    if _remote_head(e) is None and not progress.in_flight_count:
        return None
    return Finding(
        StuckReason.HEAD_OF_LINE,
        f"{_remote_clause(e)}; {_messages_in_flight(progress)} in flight at {e.owner}; "
        f"{progress.acked_count} after offset {e.head_offset} are acknowledged",
        _remote_remedy(e),
        _in_flight(e) | _remote_values(e),
    )


_REFUSED_OUTPUTS = {
    "OUTPUT_MISMATCH": (
        "makes other outputs of {message} than those that are stored",
        "Let the version of the handler that made the stored outputs handle the message. Or skip "
        "it: compare the stored outputs with the new ones, and run `baton group reset-offsets` to "
        "the offset after it.",
    ),
    "OUTPUTS_FORGOTTEN": (
        "makes outputs of {message}, and it is not known whether they are stored",
        "Check whether the outputs are stored. Then run `baton group reset-offsets`: to the offset "
        "after the message to skip it, or to the message to produce its outputs again.",
    ),
}
"""What the handler does, and the remedy, by the reason for which outputs are refused."""


def _outputs_refused(e: QueueEvidence) -> Finding | None:
    call, progress = _delaying_call(e), e.progress
    if progress is None or call is None or call.queue != e.queue or call.abandoned:
        return None
    refused = _REFUSED_OUTPUTS.get(call.failed_reason)
    if refused is None:
        return None
    what, remedy = refused
    times = "once" if call.failed_count == 1 else f"{call.failed_count} times"
    return Finding(
        StuckReason.OUTPUTS_REFUSED,
        f"the handler of {e.owner} {what.format(message=_message_of(e, call))} "
        f"({call.failed_reason}): refused {times}, the last time {span(call.running_ms)} ago; "
        f"{_messages_in_flight(progress)} in flight",
        remedy,
        _in_flight(e) | _running(e) | {"failed_reason": call.failed_reason},
    )


def _head_of_line(e: QueueEvidence) -> Finding | None:
    progress = e.progress
    if progress is None:
        return None
    if not progress.unacked_count and (e.group.owned or not progress.acked_count):
        return None
    call = _delaying_call(e)
    if call is None and not progress.in_flight_count and progress.unsure_count:
        return None  # the oldest message may never have been delivered
    if call is not None:
        return Finding(
            StuckReason.HEAD_OF_LINE,
            f"{_handles(e, call)}; {_messages_in_flight(progress)} in flight; "
            f"{progress.acked_count} after offset {e.head_offset} are acknowledged",
            _handler_remedy(e, call),
            _in_flight(e) | _running(e),
        )
    return Finding(
        StuckReason.HEAD_OF_LINE,
        f"{e.owner} has {_messages_in_flight(progress)} in flight and does not acknowledge "
        f"{_head(e)}; {progress.acked_count} after it are acknowledged",
        f"Find out what the handler of {e.owner} does with that message.",
        _in_flight(e),
    )


def _filtered(e: QueueEvidence) -> Finding | None:
    if e.filtered is None or (e.progress is not None and e.progress.idle_ms >= SILENT_MS):
        return None
    return Finding(
        StuckReason.FILTERED,
        f"{_messages(e.filtered.scanned_count)} waiting, of which none passes the filter "
        f"{e.expression!r}; the next pull of {e.owner} skips them",
        values={"expression": e.expression, "scanned": e.filtered.scanned_count},
    )


def _outdated_node(e: QueueEvidence) -> Finding | None:
    node = e.progress.waiting_at if e.progress else ""
    if not node or not e.leader or node == e.leader or e.lag_count <= 0:
        return None
    if e.progress is None or e.progress.idle_ms >= SILENT_MS:
        return None  # It no longer waits there.
    return Finding(
        StuckReason.OUTDATED_NODE,
        f"{e.owner} waits for messages of {e.name} at storage node {node}, which has none for it; "
        f"the leader is {e.leader}; {_messages(e.lag_count)} waiting",
        f"Wait 5 s: a client looks the leader up. If it lasts, {node} is cut off from etcd and "
        f"{e.leader}: see its log, restore its network or stop it.",
        {"owner": e.owner, "node": node, "leader": e.leader},
    )


def _not_pulling(e: QueueEvidence) -> Finding:
    idle_ms = e.progress.idle_ms if e.progress else -1
    since = f" for {span(idle_ms)}" if idle_ms >= 0 else ""
    call = _delaying_call(e)
    if call is not None:
        return Finding(
            StuckReason.NOT_PULLING,
            f"{_handles(e, call)}; {_messages(e.lag_count)} waiting",
            _handler_remedy(e, call),
            {"owner": e.owner, "idle_ms": idle_ms} | _running(e),
        )
    in_flight = "no message"
    if e.progress is not None and e.progress.unacked_count:
        in_flight = _messages_in_flight(e.progress)
    return Finding(
        StuckReason.NOT_PULLING,
        f"{e.owner} has {in_flight} in flight and has not pulled {e.name}{since}; "
        f"{_messages(e.lag_count)} waiting",
        f"See the log of {e.owner}: it may be busy with other queues, stalled, or unable to reach "
        f"{e.broker}.",
        {"owner": e.owner, "idle_ms": idle_ms} | _remote_values(e),
    )


def _messages(count: int) -> str:
    return "1 message" if count == 1 else f"{count} messages"


def _messages_in_flight(progress: ProgressEvidence) -> str:
    """Return the number of messages in flight, or its bounds while offsets can't tell."""
    most = _messages(progress.unacked_count)
    if not progress.unsure_count:
        return most
    least = progress.in_flight_count
    return f"{least} to {most}" if least else f"up to {most}"


def _head(e: QueueEvidence) -> str:
    if e.head is None:
        return f"offset {e.head_offset}"
    return f"offset {e.head.offset} (message {e.head.message_id}, {span(e.head.age_ms)} old)"


def _of_key(e: QueueEvidence) -> str:
    call = _delaying_call(e)
    return f" of ordering key {call.ordering_key!r}" if call and call.ordering_key else ""


def _delaying_call(e: QueueEvidence) -> HandlerEvidence | None:
    """Return the handler call that delays the oldest message; None if unknown.

    A call of a later message of the queue does not: the oldest one waits to be handled again.
    """
    call = e.lock.running if e.lock and e.gateway is None else None
    if call is None or call.queue != e.queue or call.abandoned:
        return call
    return call if call.offset <= e.head_offset else None


def _handles(e: QueueEvidence, call: HandlerEvidence) -> str:
    """Return what the owner handles, and since when, as a clause."""
    own, message = call.queue == e.queue, _message_of(e, call)
    if call.failed_count:
        times = "once" if call.failed_count == 1 else f"{call.failed_count} times"
        return (
            f"the handler of {e.owner} has failed {times} with {message}, the last time "
            f"{span(call.running_ms)} ago, and is called again after a delay"
        )
    if not own or call.abandoned:
        message = f"{message} of {call.queue}"
    text = f"{e.owner} has been handling {message} for {span(call.running_ms)}"
    if call.abandoned:
        text += " (abandoned: its result is discarded, but a thread can't be cancelled)"
    return text if own and not call.abandoned else f"{text}, and has no handler free"


def _message_of(e: QueueEvidence, call: HandlerEvidence) -> str:
    """Return the message of a call, as it is named in sentences."""
    message = f"offset {call.offset}"
    if call.queue == e.queue and e.head is not None and e.head.offset == call.offset:
        message = _head(e)
    return f"{message} of ordering key {call.ordering_key!r}" if call.ordering_key else message


def _handler_remedy(e: QueueEvidence, call: HandlerEvidence) -> str:
    if call.abandoned:
        return f"Restart {e.owner}, or give it more `concurrency`."
    if call.queue != e.queue:
        return f"Find out what {e.owner} does with that message, or give it more `concurrency`."
    if call.failed_count:
        return (
            f"See the log of {e.owner} for the error. To give up such messages, set `retries_max`."
        )
    return f"Find out what the handler of {e.owner} does with that message."


def _remote_head(e: QueueEvidence) -> RemoteMessage | None:
    """Return the oldest message that is not handled, if the gateway has started it."""
    oldest = e.gateway.oldest if e.gateway else None
    return oldest if oldest is not None and oldest.offset <= e.head_offset else None


def _remote_clause(e: QueueEvidence) -> str:
    """Return where the oldest message is at the gateway, as a clause."""
    assert e.gateway is not None
    gateway, remote = e.gateway.gateway, _remote_head(e)
    if remote is not None and remote.state is HeldState.LEASED:
        ends = "is renewed" if remote.renewed else "expires"
        return (
            f"{_head(e)} has been at client {remote.client_id}{remote.client} for "
            f"{span(remote.held_ms)}, attempt {remote.attempt}; its lease {ends} in "
            f"{span(remote.lease_left_ms)}"
        )
    if remote is not None and remote.state is HeldState.ENDING:
        return f"the outcome of {_head(e)} is being stored by {gateway}"
    if remote is not None and remote.state is HeldState.WAITING:
        return f"{_head(e)} waits at {gateway} for an earlier message of its message group"
    waiting = e.gateway.waiting_count
    calls = f"{waiting} receive calls of the group wait" if waiting else "no receive call waits"
    return f"{_head(e)} is ready at {gateway}, and {calls}"


def _remote_remedy(e: QueueEvidence) -> str:
    assert e.gateway is not None
    remote = _remote_head(e)
    if remote is not None and remote.state is HeldState.LEASED:
        return (
            f"Find out what client {remote.client_id} does with that message. It is delivered "
            "again when the lease expires"
            + (", which is renewed while the client is alive." if remote.renewed else ".")
        )
    if remote is not None and remote.state is HeldState.ENDING:
        return f"Wait; if it lasts, see the log of {e.gateway.gateway}."
    return (
        f"Check that clients of the group receive at {e.gateway.gateway}: `baton gateway clients "
        f"--group {e.group.name}`."
    )


def _remote_values(e: QueueEvidence) -> dict[str, object]:
    if e.gateway is None:
        return {}
    values: dict[str, object] = {
        "gateway": e.gateway.gateway,
        "remote_waiting": e.gateway.waiting_count,
    }
    remote = _remote_head(e)
    if remote is not None:
        values |= {"remote_state": remote.state.value, "remote_attempt": remote.attempt}
    if remote is not None and remote.state is HeldState.LEASED:
        values |= {
            "remote_client_id": remote.client_id,
            "remote_held_ms": remote.held_ms,
            "remote_lease_left_ms": remote.lease_left_ms,
        }
    return values


def _running(e: QueueEvidence) -> dict[str, object]:
    call = _delaying_call(e)
    if call is None:
        return {}
    return {
        "running_queue": str(call.queue),
        "running_offset": call.offset,
        "running_ms": call.running_ms,
        "running_abandoned": str(call.abandoned).lower(),
        "running_ordering_key": call.ordering_key,
        "running_failed_count": call.failed_count,
    }


def _in_flight(e: QueueEvidence) -> dict[str, object]:
    values: dict[str, object] = {
        "owner": e.owner,
        "unacked": e.progress.unacked_count if e.progress else 0,
        "offset": e.head_offset,
    }
    if e.head is not None:
        values |= {"message_id": e.head.message_id, "age_ms": e.head.age_ms}
    return values


_RULES: tuple[Callable[[QueueEvidence], Finding | None], ...] = (
    _offsets_unreachable,
    _storage_unreachable,
    _offset_ahead_of_log,
    _idle,
    _not_readable,
    _paused,
    _subscription_draining,
    _refused_subscription,
    _no_member,
    _not_assigned,
    _data_loss,
    _tier_unreachable,
    _moving,
    _lockmgr_unreachable,
    _handover_pending,
    _not_acquired,
    _owner_silent,
    _phantom_token,
    _held,
    _gateway_ack_cap,
    _outputs_refused,
    _ack_cap,
    _gateway_head_of_line,
    _head_of_line,
    _filtered,
    _outdated_node,
    _not_pulling,
)
"""In the order in which causes have to be fixed; the last one finds a reason for every queue."""
