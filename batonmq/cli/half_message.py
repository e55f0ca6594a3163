"""What `baton message trace` shows of a half message: it waits for the end of its transaction."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from batonmq.admin._broker_names import broker_names
from batonmq.admin.admin import Admin
from batonmq.admin.transactions import TransactionDetail
from batonmq.cli.output import Columns, Prose, counted, wall_time
from batonmq.cli.session import CommandSession

_ID = re.compile(r"(?P<broker>[a-z0-9-]{1,63})-[0-9a-f]{1,16}")
_COLUMNS: Columns = {
    "TIME": lambda item: "now" if item["unix_ms"] is None else wall_time(item["unix_ms"]),
    "EVENT": "event",
    "DETAIL": Prose("detail"),
}


async def is_transaction_id(admin: Admin, name: str) -> bool:
    """Return whether a name is the id of a transaction, not of a message: broker and one number.

    Raises:
        Unreachable: No nameserver responds.
    """
    found = _ID.fullmatch(name)
    return found is not None and found["broker"] in await broker_names(admin)


def show_half_message(session: CommandSession, half: TransactionDetail) -> None:
    """Show since when a half message waits, and why."""
    events = _events(half)
    item = asdict(half) | {
        "keys": list(half.keys),
        "queue": None if half.queue is None else str(half.queue),
        "state": "open",
        "why_open": half.why_open,
        "events": events,
    }
    session.output.detail(item, events, _COLUMNS)


def _events(half: TransactionDetail) -> list[dict[str, Any]]:
    broker = half.transaction_id.rpartition("-")[0]
    place = "an unknown queue" if half.queue is None else str(half.queue)
    keys = f", keys {','.join(half.keys)}" if half.keys else ""
    stored = (
        f"as a half message of transaction {half.transaction_id} for {place}, by producer group "
        f"{half.group}{keys}, on the disk of {broker}"
    )
    due = f"the next one is due at {wall_time(half.next_check_unix_ms)}"
    if not half.live_producers:
        due += ", and waits for a live producer of the group"
    return [
        _event(half.begin_unix_ms or None, "begun", stored),
        _event(None, "checked", f"{counted(half.checks, 'check')} so far; {due}"),
        _event(None, "open", f"no consumer sees it: {half.why_open}"),
    ]


def _event(unix_ms: int | None, event: str, detail: str) -> dict[str, Any]:
    return {"unix_ms": unix_ms, "event": event, "detail": detail}
