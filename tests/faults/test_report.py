"""Goal: the report describes a history, and the plot is drawn from it.

Method: a history of half a second with a fault in the middle.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tools.faults.history import FaultRecord, HandlerCall, History, Send, SendOutcome
from tools.faults.page import write_page
from tools.faults.report import Stall, describe, stall, unseen
from tools.faults.runner import write_report

MS = 1_000
A, B = ("broker-0", 0), ("broker-1", 0)


def sent(number: int, begin_ms: int, end_ms: int, queue: tuple[str, int], offset: int) -> Send:
    return Send(number, "", begin_ms * MS, end_ms * MS, SendOutcome.OK, queue, offset)


def handled(send: Send, start_ms: int) -> HandlerCall:
    assert send.queue is not None
    return HandlerCall(
        "a", send.queue, send.offset, 1, False, send.number, start_ms * MS, start_ms * MS + MS
    )


SENDS = [
    sent(0, 10, 20, A, 0),
    sent(1, 10, 20, B, 0),
    sent(2, 210, 230, A, 1),
    sent(3, 210, 350, B, 1),
    Send(4, "", 220 * MS, 300 * MS, SendOutcome.INDETERMINATE, reason="Unreachable"),
    Send(5, "", 220 * MS, 300 * MS, SendOutcome.FAIL, reason="NotSent"),
]
HISTORY = History(
    sends=SENDS,
    handler_calls=[
        handled(one, at_ms) for one, at_ms in zip(SENDS, (30, 130, 240, 410), strict=False)
    ],
    faults=[
        FaultRecord(
            what="kill storage-0-a",
            kinds=[("kill", "storage")],
            begin_us=200 * MS,
            end_us=300 * MS,
            healed_us=350 * MS,
        )
    ],
    end_us=500 * MS,
)


def seconds(*times: float) -> list[int]:
    return [round(1_000 * MS * one) for one in times]


def test_stall_is_that_of_the_slowest_queue() -> None:
    done = {A: seconds(1, 2.1, 3.5, 4), B: seconds(1.9, 2.5, 5.5, 6)}
    assert stall(done, *seconds(2, 5)) == Stall(longest_ms=3_000, over_after_ms=3_500)


def test_stall_may_begin_with_the_fault_or_later() -> None:
    assert stall({A: seconds(1.9, 4, 5)}, *seconds(2, 5)) == Stall(2_000, 2_000)
    assert stall({A: seconds(2.5, 3.1, 4.6, 5)}, *seconds(2, 5)) == Stall(1_500, 2_600)


def test_moving_queue_has_no_stall() -> None:
    assert stall({A: seconds(2.5, 3, 3.8, 4.5, 5)}, *seconds(2, 5)) == Stall(800, 0)


def test_stall_that_begins_after_the_next_fault_is_not_counted() -> None:
    assert stall({A: seconds(2.5, 3.2, 9)}, *seconds(2, 3)) == Stall(500, 0)
    assert stall({A: seconds(2.5, 2.9, 9)}, *seconds(2, 3)) == Stall(500, 0)


def test_stall_that_lasts_beyond_the_next_fault_is_counted() -> None:
    assert stall({A: seconds(2.5, 9)}, *seconds(2, 4)) == Stall(6_500, 7_000)


def test_queue_that_never_recovers_is_reported() -> None:
    assert stall({A: seconds(2, 3, 4, 5), B: seconds(1)}, *seconds(2, 5)) == Stall(3_000, None)


def test_unseen_messages_have_a_receipt_and_no_finished_handler_call() -> None:
    assert unseen(HISTORY) == [(0, 0), (100, 1), (200, 0), (300, 0), (400, 1), (500, 0)]


def test_outcomes_are_counted_separately() -> None:
    report = describe(HISTORY, [], "7")
    assert report["sends"] == {"ok": 4, "fail": 1, "indeterminate": 1}
    assert report["indeterminate_stored"] == 0
    assert report["lag_ms_max"] == 111
    assert report["valid"] is True


def test_report_of_an_invalid_history_has_reasons_and_a_picture(tmp_path: Path) -> None:
    assert write_report(HISTORY, "7", tmp_path)
    lost = [*SENDS, sent(6, 400, 410, A, 2)]
    history = History(sends=lost, handler_calls=HISTORY.handler_calls, end_us=500 * MS)
    assert not write_report(history, "8", tmp_path)
    report = json.loads((tmp_path / "8.json").read_text())
    assert report["name"] == "8"
    assert report["valid"] is False
    assert report["reasons"]["lost"]["count"] == 1
    assert report["unseen_at_end"] == 1
    assert (tmp_path / "8.png").stat().st_size > 1_000


def test_recovery_is_reported_by_service_and_kind() -> None:
    repeats = [*HISTORY.faults, replace(HISTORY.faults[0], healed_us=None)]
    report = describe(replace(HISTORY, faults=repeats), [], "7")
    recovery = report["recovery"]
    assert isinstance(recovery, dict)
    assert recovery["storage"]["kill"]["count"] == 2
    assert recovery["storage"]["kill"]["in_sync_after_ms"] == {"p50": 50, "max": None}
    assert recovery["storage"]["kill"]["sends_resumed_after_ms"] == {"p50": 0, "max": 0}


def test_page_contains_the_report_and_picture_and_is_listed(tmp_path: Path) -> None:
    runs, pages = tmp_path / "runs", tmp_path / "pages"
    write_report(replace(HISTORY, notes=["a note"]), "7", runs)
    assert not write_report(replace(HISTORY, problems=["no"]), "8", runs)
    write_page([runs / "7.json"], pages)
    listed = write_page([runs / "8.json"], pages).read_text()
    assert "[7](7.md) | valid | 0.0 | 1 | 4, 1, 1 |" in listed
    assert "[8](8.md) | **not valid** |" in listed
    page = (pages / "7.md").read_text()
    assert "| storage | kill | 1 | 0.0 s, 0.0 s | 0.0 s, 0.0 s | 0.1 s, 0.1 s |" in page
    assert "- a note" in page
    assert "## Not valid: run, 1 times" in (pages / "8.md").read_text()
    assert {one.name for one in pages.glob("*.png")} == {"7.png", "8.png"}
