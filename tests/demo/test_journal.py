"""Goal: the delivery report is right, above all if deliveries are wrong.

Method: hand-made journals, each with one fault; real files for reading them back.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.session import OwnershipEvent
from batonmq._core.queues import QueueRef
from batonmq._core.records import BatchBuilder, Message, decode_records, encode_record, read_header
from batonmq_server.demo.delivery_report import DeliveryReport, compare_deliveries, handovers_ms
from batonmq_server.demo.journal import HandledMessage, Journal, OwnershipRecord, read

SENT = {f"k{place}": place for place in range(6)}
CLEAN = [HandledMessage(f"a/{place % 2}", place // 2, 1, False, f"k{place}") for place in range(6)]


def test_clean_run_has_no_problems() -> None:
    assert compare_deliveries(CLEAN, SENT) == DeliveryReport(6, 0, 0, 0, 0, 0)


def test_unhandled_message_is_lost() -> None:
    verdict = compare_deliveries(CLEAN[:-1], SENT)
    assert (verdict.consumed, verdict.lost) == (5, 1)


def test_second_delivery_is_a_duplicate_and_unflagged_unless_redelivered() -> None:
    again = replace(CLEAN[0], token=2)
    assert compare_deliveries([*CLEAN, again], SENT).duplicated == 1
    assert compare_deliveries([*CLEAN, again], SENT).unflagged == 1
    assert compare_deliveries([*CLEAN, replace(again, redelivered=True)], SENT).unflagged == 0


def test_three_deliveries_of_a_message_are_two_duplicates() -> None:
    assert compare_deliveries([*CLEAN, CLEAN[1], CLEAN[1]], SENT).duplicated == 2


def test_message_after_a_later_one_of_its_queue_is_misordered() -> None:
    swapped = [CLEAN[2], CLEAN[0], CLEAN[4], CLEAN[1], CLEAN[3], CLEAN[5]]
    assert compare_deliveries(swapped, SENT).misordered == 1


def test_queues_of_two_brokers_with_the_same_id_are_distinct() -> None:
    places = {handled.key: place for place, handled in enumerate(CLEAN)}
    spread = [replace(h, queue=f"{'ab'[places[h.key] % 2]}/0") for h in CLEAN]
    assert compare_deliveries([*spread[1::2], *spread[::2]], SENT).misordered == 0
    one = [replace(h, queue="a/0") for h in CLEAN]
    assert compare_deliveries([*one[1::2], *one[::2]], SENT).misordered == 3


def test_owners_are_ordered_by_token() -> None:
    second_owner = [replace(h, token=2) for h in CLEAN[4:]]
    assert compare_deliveries([*second_owner, *CLEAN[:4]], SENT).misordered == 0
    first_owner_last = [replace(h, token=3) for h in CLEAN[:4]]
    assert compare_deliveries([*second_owner, *first_owner_last], SENT).misordered == 4


def test_redelivery_is_not_misordered() -> None:
    assert (
        compare_deliveries([*CLEAN, replace(CLEAN[0], token=2, redelivered=True)], SENT).misordered
        == 0
    )


def test_message_of_another_group_is_foreign() -> None:
    verdict = compare_deliveries([*CLEAN, HandledMessage("a/0", 9, 1, False, "other")], SENT)
    assert (verdict.foreign, verdict.consumed, verdict.duplicated) == (1, 6, 0)


def test_handover_lasts_from_draining_to_the_next_grant() -> None:
    events = [
        OwnershipRecord("a", "granted", "a/0", 1, 0),
        OwnershipRecord("a", "draining", "a/0", 1, 100),
        OwnershipRecord("a", "released", "a/0", 1, 120),
        OwnershipRecord("b", "granted", "a/0", 2, 150),
        OwnershipRecord("b", "draining", "a/0", 2, 300),
        OwnershipRecord("b", "granted", "a/0", 3, 310),
        OwnershipRecord("c", "granted", "a/1", 1, 5),
    ]
    assert handovers_ms(events) == [50]


def test_journal_is_read_back_without_an_incomplete_line(tmp_path: Path) -> None:
    builder = BatchBuilder()
    message = Message(b"body", "AA", ("k0",))
    builder.add(message, encode_record(message))
    batch = builder.encode(topic="flights", queue_id=3)
    header = read_header(batch)
    (record,) = decode_records(batch, header, [0])
    queue = QueueRef("flights", "broker-0", 3)
    path = tmp_path / "member.journal"
    with Journal(path) as journal:
        journal.handled(ReceivedMessage(queue, 7, header, record, redelivered=True))
        journal.ownership(OwnershipEvent("granted", queue, 7, 1234))
    with path.open("a") as file:
        file.write("H flights/broker-0/3 1 7 0 k")
    handled, events = read([path])
    assert handled == [HandledMessage("flights/broker-0/3", 0, 7, True, "k0")]
    assert events == [OwnershipRecord("member", "granted", "flights/broker-0/3", 7, 1234)]


@pytest.mark.parametrize("line", ["H a/1 2 3\n", "E granted a/1\n"])
def test_damaged_line_in_the_middle_is_an_error(tmp_path: Path, line: str) -> None:
    path = tmp_path / "member.journal"
    path.write_text(line)
    with pytest.raises((ValueError, IndexError)):
        read([path])


def test_queues_of_two_topics_are_two_queues(tmp_path: Path) -> None:
    """A member owns the queue of its retry topic, too, which has the same broker and number."""
    path = tmp_path / "member.journal"
    topics = ("flights", "%RETRY%desk")
    with Journal(path) as journal:
        for topic in topics:
            journal.ownership(OwnershipEvent("granted", QueueRef(topic, "broker-0", 0), 1, 5))
    _, events = read([path])
    assert [event.queue for event in events] == [f"{topic}/broker-0/0" for topic in topics]
