"""Pages of topics: the list, and one topic with its queues."""

from __future__ import annotations

from typing import Any

from batonmq.admin.topic_stats import TopicStats
from batonmq_server.console.core.paging import page_of
from batonmq_server.console.core.topic_view import totals, visible
from batonmq_server.console.visit import PageSpec, Visit

TOPICS_PER_PAGE = 50
QUEUES_PER_PAGE = 100


async def _list(visit: Visit) -> dict[str, Any]:
    reports = visit.viewer.reports
    show_all = visit.text("all") == "1"
    topics = visible(await reports.topics(), show_all=show_all)
    page = page_of(
        topics,
        lambda topic: topic.name,
        search=visit.text("q"),
        number=visit.number("page", 1),
        page_size=TOPICS_PER_PAGE,
    )
    rows = await reports.topic_rows(tuple(page.items))
    return {"page": page, "rows": rows, "show_all": show_all}


async def _topic(visit: Visit) -> dict[str, Any]:
    reports, name = visit.viewer.reports, visit.names["topic"]
    stats = await reports.get(("stats", name), lambda: _stats(visit, name), 10 * 60_000)
    queues, problems = await reports.get(("queues", name), stats.look)
    topic = await reports.get(("topic", name), lambda: visit.viewer.admin.describe_topic(name))
    page = page_of(
        queues,
        lambda one: f"{one.queue.broker}/{one.queue.queue_id}",
        search=visit.text("q"),
        number=visit.number("page", 1),
        page_size=QUEUES_PER_PAGE,
    )
    groups = await reports.get("groups", visit.viewer.admin.list_groups)
    readers = [g for g in groups if any(s.topic == name for s in g.subscriptions)]
    return {
        "topic": topic.topic,
        "page": page,
        "totals": totals(queues),
        "problems": problems,
        "readers": readers,
    }


async def _stats(visit: Visit, name: str) -> TopicStats:
    return TopicStats(visit.viewer.admin, name)


PAGES = (
    PageSpec("/topics", "topics.html", "topics", _list),
    PageSpec("/topics/{topic}", "topic.html", "topics", _topic),
)
