"""Pages of groups: the list with verdicts, and one group with its queues and members."""

from __future__ import annotations

from typing import Any

from batonmq.admin.access import Role
from batonmq.admin.resets import RecordedReset, Resets
from batonmq_server.console.core.group_view import group_row, group_view
from batonmq_server.console.core.paging import page_of
from batonmq_server.console.reports import SLOW_MS
from batonmq_server.console.visit import PageSpec, Visit

GROUPS_PER_PAGE = 25
QUEUES_PER_PAGE = 100
RESETS_SHOWN = 10


async def _list(visit: Visit) -> dict[str, Any]:
    reports = visit.viewer.reports
    groups = await reports.get("groups", visit.viewer.admin.list_groups)
    page = page_of(
        groups,
        lambda group: f"{group.name} {' '.join(s.topic for s in group.subscriptions)}",
        search=visit.text("q"),
        number=visit.number("page", 1),
        page_size=GROUPS_PER_PAGE,
    )
    lags = await reports.lags(tuple(group.name for group in page.items))
    rows = [group_row(group, lags.get(group.name)) for group in page.items]
    return {"page": page, "rows": rows}


async def _group(visit: Visit) -> dict[str, Any]:
    viewer, name = visit.viewer, visit.names["group"]
    reports, admin = viewer.reports, viewer.admin
    progress = await reports.get(("progress", name), lambda: admin.group_progress(name))
    diagnoses = await reports.get(("why stuck", name), lambda: admin.why_stuck(name))
    view = group_view(progress, diagnoses)
    page = page_of(
        view.queues,
        lambda row: f"{row.queue} {row.progress.client_id if row.progress else ''}",
        search=visit.text("q"),
        number=visit.number("page", 1),
        page_size=QUEUES_PER_PAGE,
    )
    allowed = visit.console.settings.changes and await viewer.may(Role.ADMIN, f"group:{name}")
    resets = await reports.get(("resets", name), lambda: _resets(visit, name), SLOW_MS)
    return {"view": view, "page": page, "may_change": allowed, "resets": resets}


async def _resets(visit: Visit, name: str) -> tuple[RecordedReset, ...]:
    """Return the newest recorded resets; none for a group without progress."""
    found = list[RecordedReset]()
    async for recorded in Resets(visit.viewer.admin).iter_history(name):
        found.append(recorded)
        if len(found) == RESETS_SHOWN:
            break
    return tuple(found)


PAGES = (
    PageSpec("/groups", "groups.html", "groups", _list),
    PageSpec("/groups/{group}", "group.html", "groups", _group),
)
