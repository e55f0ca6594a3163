"""Pages of dead letters: the groups that have some, and those of one group."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from batonmq.admin.access import Role
from batonmq.admin.dead_letters import DeadLetter, DeadLetters
from batonmq_server.console.changes import criteria_of
from batonmq_server.console.core.message_view import body_view
from batonmq_server.console.viewers import Viewer
from batonmq_server.console.visit import PageSpec, Visit

SHOWN_MAX = 100
_CRITERIA = ("cause", "tag", "key", "expression")


async def _groups(visit: Visit) -> dict[str, Any]:
    reports = visit.viewer.reports
    found = await reports.get("dead letters", DeadLetters(visit.viewer.admin).groups)
    return {"summaries": found.groups, "problems": found.problems}


async def _letters(visit: Visit) -> dict[str, Any]:
    viewer, group = visit.viewer, visit.names["group"]
    letters, more = list[DeadLetter](), False
    reading = DeadLetters(viewer.admin).read(group, criteria_of(visit.query))
    skip = visit.number("skip", 0)
    passed = 0
    async for letter in reading:
        passed += 1
        if passed <= skip:
            continue
        if len(letters) == SHOWN_MAX:
            more = True
            break
        letters.append(letter)
    await reading.aclose()
    allowed = visit.console.settings.changes and await viewer.may(Role.ADMIN, f"group:{group}")
    return {
        "group": group,
        "letters": [(letter, body_view(letter.body)) for letter in letters],
        "criteria": {name: visit.text(name) for name in _CRITERIA},
        "skip": skip,
        "next_skip": skip + SHOWN_MAX if more else None,
        "may_change": allowed,
    }


async def export(viewer: Viewer, group: str, fields: dict[str, str]) -> AsyncIterator[bytes]:
    """Yield the dead letters of a group as JSON lines; a body that is no text is in hex."""
    async for letter in DeadLetters(viewer.admin).read(group, criteria_of(fields)):
        body = body_view(letter.body)
        binary = body.form == "hex" or body.cut
        line = {
            "message_id": letter.message_id,
            "queue": str(letter.queue),
            "offset": letter.offset,
            "dead_unix_ms": letter.dead_unix_ms,
            "reason": letter.reason,
            "error": letter.error,
            "attempts": letter.attempts,
            "client_id": letter.client_id,
            "tag": letter.tag,
            "keys": list(letter.keys),
            "properties": dict(letter.properties),
            "redriven": letter.redriven,
            "body_hex" if binary else "body": letter.body.hex() if binary else letter.body.decode(),
        }
        yield json.dumps(line, ensure_ascii=False).encode() + b"\n"


PAGES = (
    PageSpec("/dead-letters", "dead_groups.html", "dead-letters", _groups),
    PageSpec("/dead-letters/{group}", "dead_letters.html", "dead-letters", _letters, live=False),
)
