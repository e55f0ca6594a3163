"""Page of access: identities with their grants, tokens and keys, and blocks."""

from __future__ import annotations

from typing import Any

from batonmq.admin.access import AccessControl, Role
from batonmq_server.console.core.paging import page_of
from batonmq_server.console.visit import PageSpec, Visit


async def _load(visit: Visit) -> dict[str, Any]:
    viewer = visit.viewer
    control, reports = AccessControl(viewer.admin), viewer.reports
    identities = await reports.get("access", control.list)
    blocks = await reports.get("blocks", control.blocks)
    page = page_of(
        identities,
        lambda one: f"{one.identity} {' '.join(f'{g.role} {g.resource}' for g in one.grants)}",
        search=visit.text("q"),
        number=visit.number("page", 1),
    )
    return {
        "page": page,
        "blocks": blocks,
        "access_on": viewer.access_on,
        "may_change": visit.console.settings.changes and await viewer.may(Role.ADMIN, "cluster"),
        "now_unix_ms": visit.now_unix_ms,
    }


PAGES = (PageSpec("/access", "access.html", "access", _load, live=False),)
