"""Goal: the fixture `baton` gives each test a broker, with the options of its marker.

Method: tests that use it as an application's tests do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from batonmq_server.testing import MemoryBroker


async def queues(broker: MemoryBroker) -> int:
    """Return the number of brokers with queues of a new topic."""
    created = await broker.create_topic("orders", 4)
    return len(created.topic.queue_counts)


def test_fixture_has_one_broker_without_a_marker(baton: Callable[..., Any]) -> None:
    assert baton(queues) == 1


@pytest.mark.baton(broker_count=2)
def test_marker_has_the_options(baton: Callable[..., Any]) -> None:
    assert baton(queues) == 2


def test_each_call_has_a_broker_of_its_own(baton: Callable[..., Any]) -> None:
    assert [baton(queues), baton(queues)] == [1, 1]


def test_error_of_the_scenario_is_raised(baton: Callable[..., Any]) -> None:
    async def fail(_: MemoryBroker) -> None:
        raise LookupError("no order")

    with pytest.raises(LookupError, match="no order"):
        baton(fail)
