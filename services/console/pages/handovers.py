"""Pages of hand-overs: choose a group; its queues with owners as bars on a time line."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from batonmq._core.message_trace import Hold
from batonmq._core.queues import QueueRef
from batonmq.admin.holds import queue_holds
from batonmq.errors import BatonError
from batonmq_server.console.core.handover_view import handover_view
from batonmq_server.console.core.paging import page_of
from batonmq_server.console.core.topic_view import kind_of
from batonmq_server.console.visit import PageSpec, Visit

RANGES = {"5m": 300_000, "15m": 900_000, "1h": 3_600_000, "6h": 21_600_000, "24h": 86_400_000}
QUEUES_PER_PAGE = 20
EVENTS_SHOWN = 25
_AT_ONCE = 8


async def _choose(visit: Visit) -> dict[str, Any]:
    reports = visit.viewer.reports
    groups = await reports.get("groups", visit.viewer.admin.list_groups)
    page = page_of(
        [group for group in groups if group.model != "broadcasting" and group.ownership == "on"],
        lambda group: group.name,
        search=visit.text("q"),
        number=visit.number("page", 1),
    )
    return {"page": page}


async def _show(visit: Visit) -> dict[str, Any]:
    viewer, name = visit.viewer, visit.names["group"]
    reports, admin = viewer.reports, viewer.admin
    progress = await reports.get(("progress", name), lambda: admin.group_progress(name))
    queues = [QueueRef(q.topic, q.broker, q.queue_id) for q in progress.queues]
    queues.sort(key=lambda queue: (kind_of(queue.topic) != "topic", queue))
    page = page_of(
        queues,
        str,
        search=visit.text("q"),
        number=visit.number("page", 1),
        page_size=QUEUES_PER_PAGE,
    )
    chosen = visit.text("range") if visit.text("range") in RANGES else "15m"
    wanted = tuple(page.items)
    holds, problems = await reports.get(("holds", name, wanted), lambda: _holds(visit, wanted))
    log = visit.console.events.log_of(viewer)
    shown = set(wanted)
    view = handover_view(
        holds,
        [event for event in log.of(name) if event.queue in shown],
        now_unix_ms=visit.now_unix_ms,
        range_ms=RANGES[chosen],
    )
    return {
        "group": name,
        "view": view,
        "page": page,
        "ranges": tuple(RANGES),
        "chosen": chosen,
        "events": view.events[:EVENTS_SHOWN],
        "watching": visit.console.events.is_watching(viewer),
        "problems": (*progress.problems, *problems),
    }


async def _holds(
    visit: Visit, queues: Sequence[QueueRef]
) -> tuple[dict[QueueRef, Sequence[Hold]], tuple[str, ...]]:
    room, problems = asyncio.Semaphore(_AT_ONCE), list[str]()
    group = visit.names["group"]

    async def read(queue: QueueRef) -> Sequence[Hold]:
        async with room:
            try:
                return await queue_holds(visit.viewer.admin, group, queue)
            except BatonError as error:
                if error.kind != "NOT_FOUND":  # a queue without progress has no owner yet
                    problems.append(f"{queue}: {error.reason}: {error.message}")
                return ()

    async with asyncio.TaskGroup() as tasks:
        reading = {queue: tasks.create_task(read(queue)) for queue in queues}
    return {queue: task.result() for queue, task in reading.items()}, tuple(problems)


PAGES = (
    PageSpec("/hand-overs", "handover_groups.html", "hand-overs", _choose),
    PageSpec("/hand-overs/{group}", "handovers.html", "hand-overs", _show),
)
