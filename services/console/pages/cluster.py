"""Page of the cluster: nodes, replica sets and disks."""

from __future__ import annotations

from typing import Any

from batonmq_server.console.visit import PageSpec, Visit


async def _load(visit: Visit) -> dict[str, Any]:
    return {"cluster": await visit.viewer.reports.cluster()}


PAGES = (PageSpec("/", "cluster.html", "cluster", _load),)
