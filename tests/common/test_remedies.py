"""Goal: every error says what to do about it.

Method: all error classes of the library and of the services.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.common.v1 import error_pb2
from batonmq._producer.broker_sender import NotSent
from batonmq._producer.send_buffer import ProducerClosed
from batonmq.errors import BatonError, Retry
from tests.common.test_errors import modules

FOR_PRODUCERS = (NotSent, ProducerClosed)


def classes(kind: type[BatonError] = BatonError) -> Iterator[type[BatonError]]:
    for one in kind.__subclasses__():
        if not one.__name__.startswith("_"):
            yield one
            yield from classes(one)


def name_of(kind: type[BatonError]) -> str:
    """Return the name of the class for the test report."""
    return kind.__name__


assert all(modules()), "import every module, for its classes of errors"


@pytest.mark.parametrize("kind", list(dict.fromkeys(classes())), ids=name_of)
def test_every_error_has_a_remedy_a_cause_and_retry_advice(kind: type[BatonError]) -> None:
    error = kind("what happened")
    assert str(error) == error.message == "what happened"
    assert error.remedy[0].isupper()
    assert error.remedy.endswith(".")
    assert error.remedy != error.message
    assert isinstance(error.retry, Retry)
    assert error_pb2.Reason.Value(f"REASON_{error.reason}")
    assert kind.__doc__


def test_remedy_of_an_error_replaces_that_of_its_class() -> None:
    assert NotSent("x", remedy="Do that.").remedy == "Do that."


def test_errors_of_a_producer_state_whether_to_retry() -> None:
    assert [kind.retry for kind in FOR_PRODUCERS] == [Retry.SAME_CALL, Retry.NEVER]
