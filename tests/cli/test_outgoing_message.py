"""Goal: a line of input becomes its message, or an error with the number of the line.

Method: lines as bytes, and the parsed messages.
"""

from __future__ import annotations

import json

import pytest

from batonmq._core.queues import QueueRef
from batonmq._core.records import Message
from batonmq.cli.outgoing_message import OutgoingMessage, from_json, from_text, parse_properties
from batonmq.errors import InvalidArgument

TEMPLATE = OutgoingMessage(
    Message(b"", "T", ("k",), {"a": "1", "b": "2"}), "o", QueueRef("t", "b", 0), {"delay_level": 3}
)


def _read(**line: object) -> OutgoingMessage:
    return from_json("t", TEMPLATE)(7, json.dumps(line).encode())


def test_text_line_is_a_body_and_the_template_has_the_rest() -> None:
    parcel = from_text(TEMPLATE)(1, b"\xff{}")
    assert parcel.message.body == b"\xff{}"
    assert (parcel.message.tag, parcel.ordering_key, parcel.when) == ("T", "o", {"delay_level": 3})


def test_object_takes_missing_fields_from_the_options() -> None:
    parcel = _read(body="ü")
    assert parcel.message == Message("ü".encode(), "T", ("k",), {"a": "1", "b": "2"})
    assert (parcel.ordering_key, parcel.queue) == ("o", QueueRef("t", "b", 0))
    assert parcel.when == {"delay_level": 3}


def test_object_wins_over_the_options() -> None:
    parcel = _read(
        body_base64="/w==", tag="", keys=["x", "y"], properties={"b": "3"}, ordering_key="p",
        queue="c/2", delay="2s",
    )  # fmt: skip
    assert parcel.message == Message(b"\xff", "", ("x", "y"), {"a": "1", "b": "3"})
    assert (parcel.ordering_key, parcel.queue) == ("p", QueueRef("t", "c", 2))
    assert parcel.when == {"delay_ms": 2_000}


@pytest.mark.parametrize("time", [5, "5", "1970-01-01T00:00:00.005Z"])
def test_delivery_time_is_a_number_or_a_date(time: object) -> None:
    assert _read(body="", deliver_at=time).when == {"deliver_at_unix_ms": 5}


def test_output_of_consume_can_be_sent_again() -> None:
    printed = {
        "topic": "s", "broker": "b", "queue_id": 1, "offset": 5, "store_unix_ms": 1, "tag": "A",
        "keys": [], "properties": {"p": "q"}, "redelivered": False, "body": "x",
    }  # fmt: skip
    assert _read(**printed).message == Message(b"x", "A", (), {"a": "1", "b": "2", "p": "q"})


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"", "Expecting value"),
        (b"5", "JSON object"),
        (b"\xff", "codec"),
        (b"{}", "one of body and body_base64"),
        (b'{"body": "", "body_base64": ""}', "one of body and body_base64"),
        (b'{"body_base64": "?"}', "body_base64"),
        (b'{"body": 5}', "body: "),
        (b'{"body": "", "colour": 1}', "colour: "),
        (b'{"body": "", "queue": "3"}', "queue: "),
        (b'{"body": "", "properties": {"a": 1}}', "properties.a: "),
        (b'{"body": "", "delay": "soon"}', "'soon' is not a duration"),
        (b'{"body": "", "delay": "1s", "delay_level": 1}', "only one"),
        (b'{"body": "\\udcff"}', "surrogates not allowed"),
        (b'{"body": "", "deliver_at": "tomorrow"}', "'tomorrow' is not a time"),
    ],
)
def test_invalid_line_is_named_with_the_problem(line: bytes, problem: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        from_json("t", TEMPLATE)(7, line)
    assert refused.value.message.startswith("line 7: ")
    assert problem in refused.value.message


def test_properties_are_parsed_from_name_and_value() -> None:
    assert parse_properties(["a=1", "b=", "c=d=e"]) == {"a": "1", "b": "", "c": "d=e"}
    for bad in ("a", "=1", ""):
        with pytest.raises(InvalidArgument):
            parse_properties([bad])


def test_line_that_is_nested_too_deep_is_named() -> None:
    with pytest.raises(InvalidArgument, match="line 7: its values are nested too deep"):
        from_json("t", TEMPLATE)(7, b'{"body": ' + b"[" * 200_000)
