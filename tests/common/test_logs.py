"""Goal: one line per event with logger and fields; exceptions stay readable.

Method: configure, log through the standard library, read standard error.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from batonmq._process import logs


@pytest.fixture(autouse=True)
def _root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def fail() -> None:
    raise ValueError("on purpose")


def test_json_line_has_event_level_logger_time_and_fields(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure("INFO", "json", service="storage", node="broker-a")
    logging.getLogger("batonmq_server.storage.disk").warning("disk slow ms=%d", 17)
    line = json.loads(capsys.readouterr().err)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "disk slow ms=17",
        "level": "warning",
        "logger": "batonmq_server.storage.disk",
        "service": "storage",
        "node": "broker-a",
    }


def test_auto_is_json_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("INFO", "auto")
    logging.getLogger("x").info("hello")
    assert json.loads(capsys.readouterr().err)["event"] == "hello"


def test_lower_levels_are_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("warning", "json")
    logging.getLogger("x").info("hello")
    assert capsys.readouterr().err == ""


def test_json_line_of_an_exception_is_one_line_with_its_trace(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure("INFO", "json")
    try:
        fail()
    except ValueError:
        logging.getLogger("x").exception("it failed")
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "ValueError: on purpose" in json.loads(err)["exception"]


def test_text_shows_event_fields_and_trace(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("INFO", "text", service="storage")
    try:
        fail()
    except ValueError:
        logging.getLogger("x").exception("it failed n=%d", 3)
    err = capsys.readouterr().err
    assert "it failed n=3" in err
    assert "storage" in err
    assert "ValueError: on purpose" in err


def test_second_configure_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("INFO", "json")
    logs.configure("INFO", "json")
    logging.getLogger("x").info("hello")
    assert capsys.readouterr().err.count("\n") == 1
