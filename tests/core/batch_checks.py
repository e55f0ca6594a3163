"""`check_batch` of the client and of the services, compared at every call of a test."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

from batonmq._core import records
from batonmq._core.records import Header
from batonmq.errors import BatonError

try:
    from batonmq._columns import batch_columns
except ModuleNotFoundError:  # an environment with the dependencies of the client only
    batch_columns = None  # type: ignore[assignment]


def check_batch(batch: bytes, *, stamped: bool) -> Header:
    """Return the header, or raise the error, on which both implementations agree."""
    expected = _outcome(records.check_batch, batch, stamped=stamped)
    if batch_columns is not None:
        with mock.patch.object(batch_columns, "LOOP_RECORDS_MAX", 0):
            assert _outcome(batch_columns.check_batch, batch, stamped=stamped) == expected
    return records.check_batch(batch, stamped=stamped)


def _outcome(check: Callable[..., Header], batch: bytes, *, stamped: bool) -> object:
    try:
        return check(batch, stamped=stamped)
    except BatonError as error:
        return type(error), error.facts
