"""Goal: the history of a message has its known events, and marks others as possible only.

Method: written holds and progress, as offsets returns them.
"""

from __future__ import annotations

from batonmq._core.message_trace import (
    CurrentProgress,
    Hold,
    MessageState,
    MessageTrace,
    TraceEventKind,
    trace_message,
)

STORED = 1_000


def hold(
    token: int,
    client_id: str | None,
    begin: int,
    end: int = 0,
    cause: str = "",
    *,
    committed: int = 0,
    acked: tuple[tuple[int, int], ...] = (),
    complete: bool = True,
    delivered: int = 0,
    possible: int = 0,
) -> Hold:
    return Hold(
        token=token,
        client_id=client_id,
        begin_unix_ms=begin,
        end_unix_ms=end,
        end=cause,
        committed_offset=committed,
        acked=acked,
        acked_complete=complete,
        delivered_offset=delivered,
        delivered_offset_max=max(delivered, possible),
    )


def current(
    committed: int = 0,
    acked: tuple[tuple[int, int], ...] = (),
    client_id: str | None = "b",
    *,
    complete: bool = True,
) -> CurrentProgress:
    return CurrentProgress(
        committed_offset=committed,
        acked=acked,
        acked_complete=complete,
        client_id=client_id,
        token=9,
        owned=True,
    )


def events_of(trace: MessageTrace) -> list[tuple[str, int, int, int]]:
    return [(s.what.value, s.begin_unix_ms, s.end_unix_ms, s.token) for s in trace.events]


def test_message_in_flight_was_delivered_under_the_current_token() -> None:
    trace = trace_message([hold(1, "b", 2_000, delivered=6)], current(), 5, STORED)
    assert events_of(trace) == [("delivered", 2_000, 0, 1)]
    assert trace.state is MessageState.IN_FLIGHT


def test_delivery_is_not_before_storage() -> None:
    trace = trace_message([hold(1, "b", 500, delivered=6)], current(), 5, STORED)
    assert events_of(trace) == [("delivered", STORED, 0, 1)]


def test_message_beyond_the_delivered_offset_waits() -> None:
    trace = trace_message([hold(1, "b", 2_000, delivered=5)], current(), 5, STORED)
    assert (events_of(trace), trace.state) == ([], MessageState.WAITING)


def test_delivery_around_a_restart_is_only_possible() -> None:
    trace = trace_message([hold(1, "b", 2_000, delivered=5, possible=2_005)], current(), 5, STORED)
    assert events_of(trace) == [("maybe_delivered", 2_000, 0, 1)]
    assert trace.state is MessageState.MAYBE_IN_FLIGHT


def test_ack_event_has_the_token_of_the_ack() -> None:
    holds = [
        hold(2, "b", 4_000, committed=6, delivered=6),
        hold(1, "a", 2_000, 4_000, "passed", delivered=6),
    ]
    trace = trace_message(holds, current(committed=6), 5, STORED)
    assert events_of(trace) == [("delivered", 2_000, 4_000, 1), ("acked", 2_000, 4_000, 1)]
    assert trace.state is MessageState.ACKED


def test_message_delivered_to_two_owners_has_both_events() -> None:
    holds = [
        hold(2, "b", 4_000, committed=2, acked=((3, 4),), delivered=6),
        hold(1, "a", 2_000, 4_000, "timed_out", delivered=6),
    ]
    trace = trace_message(holds, current(committed=6), 5, STORED)
    assert events_of(trace) == [
        ("delivered", 2_000, 4_000, 1),
        ("delivered", 4_000, 0, 2),
        ("acked", 4_000, 0, 2),
    ]


def test_message_acked_before_a_token_is_not_delivered_under_it() -> None:
    holds = [
        hold(2, "b", 4_000, committed=2, acked=((5, 6),), delivered=9),
        hold(1, "a", 2_000, 4_000, "passed", delivered=9),
    ]
    trace = trace_message(holds, current(committed=9), 5, STORED)
    assert events_of(trace) == [("delivered", 2_000, 4_000, 1), ("acked", 2_000, 4_000, 1)]


def test_owner_that_acquires_again_keeps_its_messages_in_flight() -> None:
    holds = [
        hold(2, "a", 4_000, delivered=6),
        hold(1, "a", 2_000, 4_000, "renewed", delivered=6),
    ]
    trace = trace_message(holds, current(client_id="a"), 5, STORED)
    assert events_of(trace) == [("delivered", 2_000, 4_000, 1), ("kept", 4_000, 0, 2)]
    assert trace.state is MessageState.IN_FLIGHT


def test_reset_that_skips_a_message_is_not_an_ack() -> None:
    holds = [
        hold(2, None, 4_000, committed=9, delivered=9),
        hold(1, "a", 2_000, 4_000, "reset", delivered=5),
    ]
    trace = trace_message(holds, current(committed=9, client_id=None), 5, STORED)
    assert events_of(trace) == [("skipped", 4_000, 4_000, 1)]


def test_ack_before_a_reset_is_not_distinguished_from_the_reset() -> None:
    holds = [
        hold(2, None, 4_000, committed=9, delivered=9),
        hold(1, "a", 2_000, 4_000, "reset", delivered=6),
    ]
    trace = trace_message(holds, current(committed=9, client_id=None), 5, STORED)
    assert [event.what for event in trace.events] == [
        TraceEventKind.DELIVERED,
        TraceEventKind.ACKED_OR_SKIPPED,
    ]


def test_reset_makes_a_message_not_handled() -> None:
    holds = [
        hold(3, "b", 5_000, committed=0, delivered=2),
        hold(2, None, 4_000, 5_000, "passed", committed=0, delivered=0),
        hold(1, "a", 2_000, 4_000, "reset", committed=6, delivered=6),
    ]
    trace = trace_message(holds, current(), 5, STORED)
    assert events_of(trace) == [("brought_back", 4_000, 4_000, 1)]
    assert (trace.state, trace.handled_before) == (MessageState.WAITING, True)


def test_ack_before_the_oldest_record_has_no_owner() -> None:
    trace = trace_message([hold(9, "b", 4_000, committed=6)], current(committed=6), 5, STORED)
    assert (events_of(trace), trace.state, trace.handled_before) == ([], MessageState.ACKED, True)


def test_state_beyond_incomplete_acked_ranges_is_unknown() -> None:
    holds = [hold(2, "b", 4_000, acked=((2, 3),), complete=False, delivered=9)]
    one = current(acked=((2, 3),), complete=False)
    trace = trace_message(holds, one, 5, STORED)
    assert events_of(trace) == [("maybe_delivered", 4_000, 0, 2)]
    assert trace.state is MessageState.UNKNOWN


def test_message_of_a_queue_without_records_is_maybe_in_flight() -> None:
    assert trace_message([], current(), 5, STORED).state is MessageState.MAYBE_IN_FLIGHT
    assert trace_message([], current(client_id=None), 5, STORED).state is MessageState.WAITING
    assert trace_message([], current(committed=6), 5, STORED) == MessageTrace(
        (), MessageState.ACKED, True
    )
