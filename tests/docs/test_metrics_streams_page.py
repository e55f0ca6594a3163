"""Goal: docs/reference/metrics-streams.md lists every kind and field of the contract, with the
services that publish it; the code of these services publishes it.

Method: compare the page with the contract and the sources; planted errors are detected.
"""

from __future__ import annotations

import re

import pytest

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._telemetry.event_hub import EVENT_BYTES_MAX, EVENTS_MAX, VOCABULARY
from batonmq_server.nameserver.group_events import MOVES_MAX
from batonmq_server.storage.core.delivered_range import ISLANDS_MAX
from batonspark.metric_columns import KINDS
from tools.docs import event_kinds as vocabulary
from tools.docs.event_kinds import PAGE, PROTO, ROOT

_ROW = re.compile(r"^\| `(\w+)` \| ([^|]+) \|", re.MULTILINE)
_WHERE = {
    "storage": "services/storage",
    "offsets": "services/offsets",
    "lockmgr": "services/lockmgr",
    "nameserver": "services/nameserver",
    "gateway": "services/gateway",
    "clients": "batonmq",
    "each service": "services/runtime",
}


def emitters() -> dict[str, set[str]]:
    """Return the publishers of each kind, from the table of the page."""
    table = PAGE.read_text().partition("| Kind | Published by |")[2].partition("\n\n")[0]
    return {
        kind: {name for name in _WHERE if re.search(rf"\b{name}\b", publishers)}
        for kind, publishers in _ROW.findall(table)
    }


def publishes(service: str, kind: str) -> bool:
    """Return True if a source file of the service creates such an event."""
    making = re.compile(rf"(?:MetricEvent\(|\s|\(){kind}=|\.latencies|_latencies\.events\(\)")
    wanted = re.compile(rf"\b{kind}=") if kind != "latency" else making
    files = (ROOT / _WHERE[service]).rglob("*.py")
    return any(wanted.search(text) for file in files if "MetricEvent" in (text := file.read_text()))


def test_list_of_kinds_and_fields_is_that_of_the_contract() -> None:
    page = PAGE.read_text()
    assert page == vocabulary.rewritten(page), "run: python -m tools.docs.event_kinds"


@pytest.mark.parametrize("change", [("### appended", "### append"), ("`runs` |", "`run` |")])
def test_changed_kind_or_field_is_detected(change: tuple[str, str]) -> None:
    page = PAGE.read_text()
    planted = page.replace(*change)
    assert planted != page
    assert vocabulary.rewritten(planted) != planted


def test_table_names_the_publishers_of_every_kind() -> None:
    assert emitters().keys() == vocabulary.kinds().keys()
    assert all(emitters().values())


@pytest.mark.parametrize("kind", vocabulary.kinds())
def test_publishers_in_the_table_publish_the_kind(kind: str) -> None:
    assert all(publishes(service, kind) for service in emitters()[kind])
    others = _WHERE.keys() - emitters()[kind] - {"clients"}
    assert not any(publishes(service, kind) for service in others)


def test_missing_publisher_is_detected() -> None:
    assert not publishes("offsets", "appended")
    assert not publishes("lockmgr", "queue_lag")


def test_columns_know_every_kind() -> None:
    assert KINDS.keys() == vocabulary.kinds().keys()


def test_every_comment_of_the_contract_is_found() -> None:
    said = vocabulary.comments(PROTO.read_text())
    for message in vocabulary.kinds().values():
        assert said[message.name].endswith((".", ":"))
        for field in message.fields:
            assert said[f"{message.name}.{field.name}"], field.full_name


def test_unknown_kind_is_preserved() -> None:
    newer = pb.MetricEvent(unix_ms=7).SerializeToString() + b"\xfa\x3f\x03\x0a\x01x"
    event = pb.MetricEvent.FromString(newer)
    assert event.WhichOneof("kind") is None
    batch = pb.MetricBatch(events=[event])
    assert pb.MetricBatch.FromString(batch.SerializeToString()).events[0] == event
    assert b"\xfa\x3f\x03\x0a\x01x" in batch.SerializeToString()


def test_numbers_on_the_page_are_those_of_the_code() -> None:
    page = PAGE.read_text()
    assert f"{EVENTS_MAX:,} events and {EVENT_BYTES_MAX >> 20} MiB" in page
    assert f"more than {ISLANDS_MAX:,} runs" in page
    assert f"{MOVES_MAX:,} moves an event" in page
    assert f"`vocabulary` of the batch: {VOCABULARY}." in page
