"""Columns of the metrics streams, and the columns that each kind of event fills.

docs/reference/metrics-streams.md explains the kinds. A column has one meaning in all kinds that
fill it, and is null in the others. Values without a column are in `attrs`, as text. Empty text is
null; `attrs` has no value that is 0, false or empty. Any object with the fields of a message is
accepted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ColumnType = Literal["string", "int", "bigint", "timestamp", "bigints", "texts", "binary"]


@dataclass(frozen=True, slots=True)
class Total:
    """A getter of the sum of a repeated field.

    Attributes:
        path: Path of the field, joined by dots.
    """

    path: str

    def __call__(self, event: Any) -> int:
        """Return the sum in one message."""
        for name in self.path.split("."):
            event = getattr(event, name)
        return sum(event)


Getter = str | Total | Callable[[Any], Any]
"""Path of a field in the message of a kind, joined by dots; or a function of the message."""

BATCH_COLUMNS: Mapping[str, ColumnType] = {
    "source": "string",
    "producer_id": "string",
    "seq": "bigint",
    "event_index": "int",
    "vocabulary": "int",
}
"""Columns with values of the batch."""

EVENT_COLUMNS: Mapping[str, ColumnType] = {
    "kind": "string",
    "time": "timestamp",
    "topic": "string",
    "consumer_group": "string",
    "broker": "string",
    "queue_id": "int",
    "client_id": "string",
    "previous_client_id": "string",
    "token": "bigint",
    "generation": "bigint",
    "first_offset": "bigint",
    "next_offset": "bigint",
    "committed_offset": "bigint",
    "delivered_offset": "bigint",
    "count": "bigint",
    "byte_count": "bigint",
    "filtered_count": "bigint",
    "redelivered_count": "bigint",
    "reason": "string",
    "duration_ms": "bigint",
    "operation": "string",
    "first_bucket": "int",
    "buckets": "bigints",
    "value_sum": "bigint",
    "runs": "bigints",
    "attrs": "texts",
    "payload": "binary",
}
"""Columns with values of the event, in order. `texts` is a map of text to text."""

DROPPED = "dropped"
"""Kind of the row of a batch with the number of events that its source has dropped so far."""
DROPPED_INDEX = -1
"""`event_index` of that row."""
STARTED, STOPPED = "process_started", "process_stopped"
"""Kinds of the first and the last event of a process that stopped gracefully."""
PREVIOUS = "previous_incarnation"
"""Name in `attrs` of the incarnation that a started process follows, as `producer_id` ends."""
NO_KIND = "none"
"""Kind of an event without a kind in its message."""
UNREADABLE = "unreadable"
"""Kind of a row for bytes that are not an event or a batch; the bytes are in `payload`."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The values of a kind of event, beside `kind`, `time` and the columns of its queue.

    Attributes:
        columns: Getter of each column. A getter of an enumeration returns a number; the column has
            the name without its prefix.
        attrs: Getter of each name in `attrs`.
    """

    columns: Mapping[str, Getter] = field(default_factory=dict)
    attrs: Mapping[str, Getter] = field(default_factory=dict)


def producer_id(source: str, incarnation_id: int) -> str:
    """Return the id of one run of a source; together with `seq` it identifies a batch."""
    return f"{source}/{_hex(incarnation_id)}"


def unknown_kind(field_number: int) -> str:
    """Return the kind of an event of a newer version; its bytes are in `payload`."""
    return f"field_{field_number}"


def _hex(incarnation_id: int) -> str:
    return f"{incarnation_id:016x}"


def _previous(event: Any) -> str:
    return _hex(event.previous_incarnation_id) if event.previous_incarnation_id else ""


def _times(event: Any) -> int:
    return event.count or 1


def _known(age_ms: int) -> int | None:
    return None if age_ms < 0 else age_ms


def _differences(event: Any) -> str:
    names = (
        "topic", "setting", "newcomer_client_id", "newcomer_value", "member_client_id",
        "member_value",
    )  # fmt: skip
    rows = [{name: getattr(one, name) for name in names} for one in event.differences]
    return json.dumps(rows) if rows else ""


def _needs(event: Any) -> str:
    return ", ".join(event.needs)


def _moves(event: Any) -> str:
    rows = [
        {
            "topic": move.queue.queue.topic,
            "broker": move.queue.queue.broker,
            "queue_id": move.queue.queue.queue_id,
            "from_client_id": move.from_client_id,
            "to_client_id": move.to_client_id,
        }
        for move in event.moves
    ]
    return json.dumps(rows) if rows else ""


_CLIENT: Mapping[str, Getter] = {"client_id": "client_id", "count": "message_count"}

KINDS: Mapping[str, Kind] = {
    "appended": Kind(
        {"count": "message_count", "byte_count": "byte_count", "next_offset": "next_offset"}
    ),
    "delivered": Kind(
        {
            "client_id": "client_id",
            "token": "token",
            "first_offset": "range.first_offset",
            "next_offset": "range.next_offset",
            "count": "message_count",
            "byte_count": "byte_count",
            "filtered_count": "filtered_count",
            "redelivered_count": "redelivered_count",
            "runs": "runs",
        },
        {"lost_count": "lost_count"},
    ),
    "remote_delivered": Kind(
        {
            "client_id": "client_id",
            "token": "token",
            "first_offset": "range.first_offset",
            "next_offset": "range.next_offset",
            "count": "message_count",
            "redelivered_count": "redelivered_count",
            "runs": "runs",
        },
    ),
    "committed": Kind(
        {
            "client_id": "client_id",
            "token": "token",
            "committed_offset": "committed_offset",
            "delivered_offset": "delivered_offset",
        },
        {"closed": "closed", "acked_beyond_count": "acked_beyond_count"},
    ),
    "lock_granted": Kind(
        {
            "client_id": "client_id",
            "previous_client_id": "previous_client_id",
            "token": "token",
            "duration_ms": "wait_ms",
        },
        {"stolen": "stolen"},
    ),
    "lock_denied": Kind({"client_id": "client_id", "reason": "reason", "count": _times}),
    "lock_released": Kind({"client_id": "client_id", "token": "token"}),
    "group_changed": Kind(
        {"consumer_group": "group", "generation": "generation", "count": "member_count"}
    ),
    "subscription_refused": Kind(
        {"consumer_group": "group", "client_id": "client_id"}, {"differences": _differences}
    ),
    "subscription_changed": Kind(
        {
            "consumer_group": "group",
            "client_id": "client_id",
            "generation": "subscription_generation",
        },
        {"differences": _differences},
    ),
    "lock_forced": Kind(
        {"previous_client_id": "previous_client_id", "token": "token", "reason": "reason"},
        {"by": "by"},
    ),
    "progress_reset": Kind(
        {"committed_offset": "to_offset", "reason": "reason"},
        {"op_id": "op_id", "from_offset": "from_offset", "by": "by"},
    ),
    "stuck_changed": Kind({"reason": "reason"}, {"message": "message"}),
    "handed_over": Kind(
        {
            "client_id": "client_id",
            "previous_client_id": "previous_client_id",
            "token": "token",
            "reason": "manner",
            "duration_ms": lambda e: e.contend_ms + e.drain_ms + e.fence_ms + e.persist_ms,
        },
        {
            "previous_token": "previous_token",
            "contend_ms": "contend_ms",
            "drain_ms": "drain_ms",
            "fence_ms": "fence_ms",
            "persist_ms": "persist_ms",
        },
    ),
    "fenced": Kind(
        {"client_id": "client_id", "token": "token", "count": _times},
        {"current_token": "current_token", "call": "call"},
    ),
    "member_seen": Kind({"client_id": "client_id", "generation": "generation"}),
    "member_expired": Kind(
        {"client_id": "client_id", "generation": "generation", "duration_ms": "silent_ms"}
    ),
    "rebalanced": Kind(
        {"generation": "generation", "count": "member_count"},
        {"queue_count": "queue_count", "moves": _moves},
    ),
    "latency": Kind(
        {
            "operation": "operation",
            "first_bucket": "us.first_bucket",
            "buckets": "us.counts",
            "count": Total("us.counts"),
            "value_sum": "us.sum",
        }
    ),
    "retried": Kind(_CLIENT),
    "dead_lettered": Kind(_CLIENT),
    "queue_lag": Kind(
        {
            "client_id": "client_id",
            "committed_offset": "committed_offset",
            "delivered_offset": "delivered_offset",
            "next_offset": "next_offset",
            "duration_ms": lambda e: _known(e.oldest_unacked_ms),
        },
        {"acked_beyond_count": "acked_beyond_count"},
    ),
    "volume_state": Kind({"byte_count": "used_bytes"}, {"free_bytes": "free_bytes"}),
    "handled": Kind(_CLIENT, {"failed_count": "failed_count"}),
    "sent": Kind({**_CLIENT, "byte_count": "byte_count"}, {"failed_count": "failed_count"}),
    "access_refused": Kind(
        {"reason": "reason", "count": "count"},
        {"call": "call", "identity": "identity", "message": "message"},
    ),
    "operator_called": Kind(
        {"reason": "outcome", "count": "count"},
        {"call": "call", "identity": "identity", "needs": _needs, "request": "request"},
    ),
    "queue_rebuilt": Kind(
        {"first_offset": "range.first_offset", "next_offset": "range.next_offset"}
    ),
    "key_index_rebuilt": Kind(
        {}, {"first_position": "first_position", "next_position": "next_position"}
    ),
    "transactions": Kind(
        {},
        {
            "producer_group": "group",
            "opened_count": "opened_count",
            "committed_count": "committed_count",
            "rolled_back_count": "rolled_back_count",
            "checked_count": "checked_count",
            "discarded_count": "discarded_count",
            "damaged_count": "damaged_count",
            "open_count": "open_count",
        },
    ),
    STARTED: Kind({}, {PREVIOUS: _previous}),
    STOPPED: Kind(),
}
"""Kinds by the name of the field in the oneof of MetricEvent."""
