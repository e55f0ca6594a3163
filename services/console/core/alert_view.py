"""View of the alerts: those of Prometheus, or what the cluster itself reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from batonmq.admin.group_lag import GroupLag
from batonmq_server.console.core.cluster_view import ClusterView

_LEVELS = {"critical": "bad", "page": "bad", "error": "bad", "info": ""}


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert that fires.

    Attributes:
        level: bad, warn or empty.
        subject: What it is about.
        remedy: What to do; empty if it is not known.
        since_unix_ms: 0 if it is not known.
        path: Page of the console about its subject; empty for none.
    """

    name: str
    level: str
    subject: str
    text: str
    remedy: str
    since_unix_ms: int
    path: str = ""


def alerts_of_prometheus(answer: Mapping[str, Any]) -> tuple[Alert, ...]:
    """Return the firing alerts in an answer of Prometheus to `/api/v1/alerts`, worst first.

    Raises:
        ValueError: The answer has another form.
    """
    try:
        alerts = [_alert(one) for one in answer["data"]["alerts"] if one["state"] == "firing"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no list of alerts: {error}") from error
    return _sorted(alerts)


def alerts_of_cluster(cluster: ClusterView, lags: Iterable[GroupLag]) -> tuple[Alert, ...]:
    """Return what needs attention by the state of the nodes and the diagnosis of the groups."""
    alerts = [
        Alert("NoLeader", "bad", one, f"{one} has no leader", "", 0, "/") for one in cluster.missing
    ]
    alerts += [Alert("Problem", "bad", "cluster", one, "", 0, "/") for one in cluster.problems]
    alerts += [
        Alert(
            "ReplicaBehind", "warn", f"{row.node.service} {row.node.node_id}",
            f"{row.node.node_id} is not in sync with its leader", "See its log.", 0, "/",
        )
        for row in cluster.nodes
        if row.in_sync is False
    ]  # fmt: skip
    alerts += [
        Alert(
            "Disk", disk.level, disk.broker,
            f"the disk is {disk.state}, {disk.used_percent:.0f} % used; "
            f"{disk.damaged_count:,} damaged batches", "", 0, "/",
        )
        for disk in cluster.disks
        if disk.level != "good"
    ]  # fmt: skip
    alerts += [
        Alert(
            lag.verdict,
            "bad",
            f"group {lag.group}",
            lag.message,
            lag.remedy,
            0,
            f"/groups/{lag.group}",
        )
        for lag in lags
        if lag.stuck
    ]
    return _sorted(alerts)


def _alert(one: Mapping[str, Any]) -> Alert:
    labels, notes = one["labels"], one["annotations"]
    hidden = ("alertname", "severity")
    subject = ", ".join(f"{k}={v}" for k, v in sorted(labels.items()) if k not in hidden)
    group = labels.get("group", "")
    return Alert(
        name=labels["alertname"],
        level=_LEVELS.get(labels.get("severity", ""), "warn"),
        subject=subject,
        text=notes.get("summary") or notes.get("description") or "",
        remedy=notes.get("runbook_url", ""),
        since_unix_ms=_unix_ms(one.get("activeAt", "")),
        path=f"/groups/{group}" if group else "",
    )


def _unix_ms(text: str) -> int:
    """Return an RFC 3339 time, as Prometheus writes it, in Unix milliseconds; 0 if it is none."""
    head, _, rest = text.removesuffix("Z").partition(".")
    zone = "+00:00" if text.endswith("Z") else rest.lstrip("0123456789")
    try:
        stamp = datetime.fromisoformat(f"{head}{zone}")
    except ValueError:
        return 0
    return round(stamp.timestamp() * 1000) if stamp.tzinfo else 0


def _sorted(alerts: Sequence[Alert]) -> tuple[Alert, ...]:
    rank = {"bad": 0, "warn": 1, "": 2}
    return tuple(sorted(alerts, key=lambda one: (rank[one.level], one.name, one.subject)))
