"""Goal: a hand-over is one row with its phases, and the page shows them without other files.

Method: events as services publish them, decoded as Spark decodes them; a parser reads the page, and
Chromium opens it if it is installed.
"""

from __future__ import annotations

import re
import subprocess
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import SparkSession

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonspark.handover_page import page
from batonspark.handovers import PHASES, handovers, owners, report
from batonspark.reports import ReportScope
from tests.spark.metric_events import NOON, event, rows
from tests.support.browser import CHROMIUM

QUEUE: dict[str, Any] = {"group": "g", "topic": "orders"}
MANNERS = ("GRACEFUL", "UNFINISHED", "LEASE_EXPIRED", "DRAIN_TIMED_OUT", "FORCED")


def at(second: float) -> datetime:
    return datetime.fromtimestamp(NOON / 1000 + second, UTC).replace(tzinfo=None)


def handed(at_ms: int, token: int, drain_ms: int, **more: Any) -> pb.MetricEvent:
    return event(
        "handed_over", at_ms, **QUEUE, token=token, previous_token=token - 1,
        client_id=f"c{token}", previous_client_id=f"c{token - 1}",
        manner=pb.HandedOver.MANNER_GRACEFUL, contend_ms=10, drain_ms=drain_ms, fence_ms=2,
        persist_ms=3, **more,
    )  # fmt: skip


EVENTS = [
    event("lock_granted", 500, **QUEUE, client_id="c1", token=1),
    event("lock_released", 4_900, **QUEUE, client_id="c1", token=1),
    event("lock_granted", 5_000, **QUEUE, client_id="c2", token=2),
    handed(5_000, 2, 20),
    event("delivered", 5_700, **QUEUE, token=2, message_count=1),
    event("delivered", 5_100, **QUEUE, queue_id=1, token=2, message_count=1),
    event("lock_granted", 9_000, **QUEUE, client_id="c3", token=3),
    handed(9_000, 3, 30),
    event("delivered", 90_000, **QUEUE, token=3, message_count=1),
    event("lock_forced", 12_000, **QUEUE, previous_client_id="c3", token=4),
    handed(15_000, 5, 25_000),
]


@pytest.mark.spark
def test_hand_over_has_its_phases_its_first_pull_and_its_outliers(spark: SparkSession) -> None:
    rows_by_token = handovers(rows(spark, EVENTS), ReportScope()).orderBy("token").collect()
    values = [(one.token, one.drain_ms, one.total_ms, one.first_pull_ms) for one in rows_by_token]
    assert values == [(2, 20, 35, 700), (3, 30, 45, None), (5, 25_000, 25_015, None)]
    assert [(rows_by_token[0].previous_client_id, rows_by_token[0].manner)] == [("c1", "GRACEFUL")]
    many = [*EVENTS, *(handed(20_000 + token, token, 20) for token in range(6, 30))]
    marked = handovers(rows(spark, many), ReportScope()).where("outlier").collect()
    assert [one.token for one in marked] == [5]


@pytest.mark.spark
def test_ownership_ends_with_a_release_or_a_takeover(spark: SparkSession) -> None:
    ownerships = owners(rows(spark, EVENTS), ReportScope()).orderBy("token").collect()
    assert [(one.client_id, one.begin, one.end) for one in ownerships] == [
        ("c1", at(0.5), at(4.9)),
        ("c2", at(5), at(9)),
        ("c3", at(9), at(12)),
    ]
    later = owners(rows(spark, EVENTS), ReportScope(since=at(6), until=at(8.9))).collect()
    assert [one.client_id for one in later] == ["c2"]


@pytest.mark.spark
def test_report_has_percentiles_of_each_phase_and_a_page(spark: SparkSession) -> None:
    hand_over_report = report(rows(spark, EVENTS), ReportScope())
    assert (hand_over_report.summary["count"], hand_over_report.summary["manners"]) == (
        3,
        {"GRACEFUL": 3},
    )
    phases = {one["phase"]: one for one in hand_over_report.summary["phases"]}
    assert (phases["drain"]["p50"], phases["drain"]["max"]) == (30, 25_000)
    assert (phases["first_pull"]["count"], phases["first_pull"]["p99"]) == (1, 700)
    assert hand_over_report.lines[0] == "hand-overs: 3, 0 of them outliers"
    assert "<svg" in hand_over_report.page
    empty = report(rows(spark, EVENTS[:2]), ReportScope())
    assert empty.summary["count"] == 0
    assert "no hand-over in this time" in empty.page


def many(count: int) -> str:
    """Return a page with hand-overs of all kinds."""
    hand_overs, spans = [], []
    for number in range(count):
        queue = dict(consumer_group="g<1>", topic="orders", broker="b", queue_id=number % 8)
        manner = MANNERS[number % 11 % 5]
        drain_ms = 20 + 37 * number % 90 + (28_000 if manner == "LEASE_EXPIRED" else 0)
        phases = dict(zip(PHASES, (5, drain_ms, 2, 3), strict=True))
        owner = {"client_id": f"member-{number % 5}", "token": number}
        hand_overs.append({
            **queue, **owner, **phases, "time": pd.Timestamp(at(7 * number)),
            "previous_client_id": f"member-{(number + 1) % 5}", "manner": manner,
            "total_ms": sum(phases.values()), "outlier": drain_ms > 28_000,
            "first_pull_ms": None if number % 9 == 0 else 40.0 * (number % 7),
        })  # fmt: skip
        end = pd.NaT if number > count - 9 else pd.Timestamp(at(7 * number + 54))
        spans.append({**queue, **owner, "begin": pd.Timestamp(at(7 * number)), "end": end})
    table = pd.DataFrame(hand_overs)
    phase_rows = [
        {"phase": name.removesuffix("_ms"), "count": len(table), "max": table[name].max()}
        | {f"p{p}": table[name].quantile(p / 100) for p in (50, 95, 99)}
        for name in (*PHASES, "first_pull_ms", "total_ms")
    ]
    summary = {
        "asked": {"group": "g<1>"},
        "count": count,
        "outlier_count": int(table["outlier"].sum()),
        "manners": dict(table["manner"].value_counts()),
        "phases": phase_rows,
    }
    return page(table, pd.DataFrame(spans), summary)


class Seen(HTMLParser):
    """A parser that collects unclosed tags and the addresses that the page loads from."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        self.loads += [v for k, v in attrs if v and k in ("src", "href") and v[0] != "#"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.remove(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_complete_and_loads_nothing() -> None:
    text, seen = many(120), Seen()
    seen.feed(text)
    assert seen.open == []
    assert {one.partition(",")[0] for one in seen.loads} <= {"data:", "data:image/png;base64"}
    assert text.count("<svg") == 4
    assert "<script" not in text
    assert "g<1>" not in text
    assert "g&lt;1&gt;" in text


@pytest.mark.timeout(120)
def test_page_opens_in_a_browser_without_errors(tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("NO CHROMIUM ON PATH: the page of hand-overs was not opened in a browser")
    file = tmp_path / "report.html"
    file.write_text(many(60))
    command = [
        "env", f"HOME={tmp_path}", CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--v=0",
        "--virtual-time-budget=2000", "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "<title>BatonMQ hand-overs</title>" in shown.stdout
    assert shown.stdout.count("<svg") == 4
    assert re.findall(r"CONSOLE.*", shown.stderr) == []
