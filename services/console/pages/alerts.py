"""Page of the alerts that fire."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

from batonmq.admin.group_lag import GroupLag, group_lags
from batonmq.errors import Unreachable
from batonmq_server.console.core.alert_view import (
    Alert,
    alerts_of_cluster,
    alerts_of_prometheus,
)
from batonmq_server.console.visit import PageSpec, Visit

LOOK_MS = 15_000
"""Time between two diagnoses of all groups."""
GROUPS_MAX = 500
_TIMEOUT_S = 5.0
_ANSWER_BYTES_MAX = 8 * 1024 * 1024


async def _load(visit: Visit) -> dict[str, Any]:
    reports, url = visit.viewer.reports, visit.console.settings.prometheus
    if url:
        # A viewer that may see the nodes may see the alerts; others get the error of this call.
        await reports.cluster()
        alerts = await reports.get("alerts", lambda: asyncio.to_thread(_of_prometheus, url))
        return {"alerts": alerts, "source": f"Prometheus at {url}", "cut": 0}
    cluster = await reports.cluster()
    groups = await reports.get("groups", visit.viewer.admin.list_groups)
    names = tuple(group.name for group in groups)
    lags = await reports.get("all lags", lambda: _lags(visit, names[:GROUPS_MAX]), LOOK_MS)
    return {
        "alerts": alerts_of_cluster(cluster, lags),
        "source": "the state of the nodes, and the diagnosis of each group every 15 seconds",
        "cut": max(0, len(names) - GROUPS_MAX),
    }


async def _lags(visit: Visit, names: tuple[str, ...]) -> tuple[GroupLag, ...]:
    return await group_lags(visit.viewer.admin, names)


def _of_prometheus(url: str) -> tuple[Alert, ...]:
    """Return the alerts of a Prometheus.

    Raises:
        Unreachable: It does not answer, or not with a list of alerts.
    """
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{url.rstrip('/')}/api/v1/alerts", timeout=_TIMEOUT_S) as response:
            return alerts_of_prometheus(json.loads(response.read(_ANSWER_BYTES_MAX)))
    except (OSError, ValueError) as error:
        raise Unreachable(
            f"Prometheus at {url} has no list of alerts: {error}",
            remedy="Check BATON_CONSOLE_PROMETHEUS, and that Prometheus runs.",
        ) from error


PAGES = (PageSpec("/alerts", "alerts.html", "alerts", _load),)
