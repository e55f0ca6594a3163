"""Goal: output is readable for people, parsable for programs, and harmless for terminals.

Method: print known items in all formats, and check the text.
"""

from __future__ import annotations

import json

import pytest

from batonmq.cli.output import Columns, Item, Output, OutputFormat, duration, printable, wall_time
from batonmq.errors import Difference, SubscriptionConflict, TopicNotFound

ITEMS: list[Item] = [
    {"topic": "orders", "broker": "broker-0", "lag": 3},
    {"topic": "[red]x", "broker": None, "lag": 0},
]
COLUMNS: Columns = {"TOPIC": "topic", "BROKER": "broker", "TWICE": lambda item: 2 * item["lag"]}


def test_table_has_one_row_per_item_and_dashes_for_missing_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Output(OutputFormat.TABLE).items(ITEMS, COLUMNS)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["TOPIC", "BROKER", "TWICE"],
        ["orders", "broker-0", "6"],
        ["[red]x", "-", "0"],
    ]


def test_long_cells_are_neither_cut_nor_wrapped_when_piped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Output(OutputFormat.TABLE).items([{"topic": "t" * 300}], {"TOPIC": "topic"})
    assert "t" * 300 in capsys.readouterr().out.splitlines()


def test_json_has_every_key_of_the_items(capsys: pytest.CaptureFixture[str]) -> None:
    Output(OutputFormat.JSON).items(ITEMS, COLUMNS)
    assert json.loads(capsys.readouterr().out) == ITEMS


def test_wide_has_more_columns_and_a_table_has_not(capsys: pytest.CaptureFixture[str]) -> None:
    more: Columns = {"LAG": "lag"}
    Output(OutputFormat.TABLE).items(ITEMS, COLUMNS, more)
    assert capsys.readouterr().out.split()[: len(COLUMNS)] == list(COLUMNS)
    Output(OutputFormat.WIDE).detail({}, ITEMS, COLUMNS, more)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[:2] == [[*COLUMNS, "LAG"], ["orders", "broker-0", "6", "3"]]
    Output(OutputFormat.WIDE).note("for people")
    assert capsys.readouterr().out == "for people\n"


def test_empty_list_is_headings_or_an_empty_array(capsys: pytest.CaptureFixture[str]) -> None:
    Output(OutputFormat.TABLE).items([], COLUMNS)
    assert capsys.readouterr().out.split() == list(COLUMNS)
    Output(OutputFormat.JSON).items([], COLUMNS)
    assert json.loads(capsys.readouterr().out) == []


def test_line_is_text_or_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    Output(OutputFormat.TABLE).line({"a": "x\ny"}, "text")
    Output(OutputFormat.JSON).line({"a": "x\ny"}, "text")
    first, second = capsys.readouterr().out.splitlines()
    assert first == "text"
    assert json.loads(second) == {"a": "x\ny"}


def test_note_is_not_printed_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    Output(OutputFormat.JSON).note("3 messages")
    assert capsys.readouterr().out == ""
    Output(OutputFormat.TABLE).note("3 messages")
    assert capsys.readouterr().out == "3 messages\n"


def test_error_prints_reason_message_and_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    Output(OutputFormat.TABLE).error(TopicNotFound("topic a does not exist"))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "error: TOPIC_NOT_FOUND: topic a does not exist",
        "  Check the name (baton topic list), or create the topic: baton topic create NAME.",
    ]


def test_error_in_json_has_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    difference = Difference("t", "expression", "new", "a", "old", "b")
    error = SubscriptionConflict("no", facts={"group": "g"}, differences=(difference,))
    Output(OutputFormat.JSON).error(error)
    assert json.loads(capsys.readouterr().err)["error"] == {
        "reason": "SUBSCRIPTION_CONFLICT",
        "message": "no",
        "remedy": error.remedy,
        "retry": "NEVER",
        "retry_after_ms": 0,
        "facts": {"group": "g"},
        "differences": [
            {
                "topic": "t",
                "setting": "expression",
                "newcomer_client_id": "new",
                "newcomer_value": "a",
                "member_client_id": "old",
                "member_value": "b",
            }
        ],
    }


def test_conflict_names_both_clients(capsys: pytest.CaptureFixture[str]) -> None:
    difference = Difference("t", "expression", "new", "a", "old", "b")
    Output(OutputFormat.TABLE).error(SubscriptionConflict("no", differences=(difference,)))
    assert "t expression: new has 'a', old has 'b'" in capsys.readouterr().err


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b[31mb\x00\n\tü€") == "a\\x1b[31mb\\x00\\n\tü€"


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (-5, "0ms"),
        (0, "0ms"),
        (999, "999ms"),
        (1_000, "1s"),
        (61_000, "1m1s"),
        (3_600_000, "1h"),
        (90_061_000, "1d1h"),
    ],
)
def test_duration_shows_its_two_largest_units(milliseconds: int, text: str) -> None:
    assert duration(milliseconds) == text


def test_wall_time_is_utc_to_the_millisecond() -> None:
    assert wall_time(1_385_873_999_007) == "2013-12-01T04:59:59.007Z"


def test_failure_with_text_of_another_program_does_not_control_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = Output(OutputFormat.TABLE)
    output.failure("REQUEST_FAILED", "no \x1b[2J", "a\nb\x07")
    output.error(TopicNotFound("topic \x9b2J"))
    printed = capsys.readouterr().err
    assert "error: REQUEST_FAILED: no \\x1b[2J\n  a\nb\\x07\n" in printed
    assert "topic \\x9b2J" in printed
