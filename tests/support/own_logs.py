"""What our code has logged in a test; gRPC logs too, of the closed loop of an earlier test."""

from __future__ import annotations

import logging

import pytest


def own_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the records of the library and the services, in order."""
    return [record for record in caplog.records if record.name.startswith("batonmq")]


def own_warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return those that are warnings or worse."""
    return [record for record in own_records(caplog) if record.levelno >= logging.WARNING]
