"""The tests of Kombu for transports, with connections to BatonMQ; run by `tools.kombu_suite`."""

from __future__ import annotations

import os

import kombu
import pytest
from t.integration import common

import batonmq.kombu  # noqa: F401  makes the URL scheme known

URL = f"batonmq://{os.getenv('BATON_NAMESERVER', '')}"
DEAD_URL = "batonmq://127.0.0.1:1"

AUTO_DELETE = "a SimpleBuffer is an auto_delete queue, and a topic does not vanish"
PRIORITY = "a queue is a log, its messages have an order already"
REFUSED = {
    "TestBasicFunctionality::test_simple_buffer_publish_consume": AUTO_DELETE,
    "TestFailover::test_simple_buffer_publish_consume": AUTO_DELETE,
    "TestTimeToLive::test_simple_buffer_publish_consume": AUTO_DELETE,
    "TestExchangeTypes::test_fanout": "a sender does not know the queues of other programs",
    "TestPriority::test_publish_consume": PRIORITY,
    "TestPriority::test_publish_requeue_consume": PRIORITY,
    "TestPriority::test_simple_queue_publish_consume": PRIORITY,
    "TestPriority::test_simple_buffer_publish_consume": PRIORITY,
}
"""Tests of what the transport refuses, and the reason; each has to fail by a ChannelError."""


@pytest.fixture(autouse=True)
def _refused(request: pytest.FixtureRequest) -> None:
    reason = REFUSED.get(request.node.nodeid.partition("::")[2])
    if reason is not None:
        error = kombu.exceptions.ChannelError
        request.applymarker(pytest.mark.xfail(reason=reason, raises=error, strict=True))


@pytest.fixture
def connection() -> kombu.Connection:
    """A connection to the cluster."""
    return kombu.Connection(URL)


@pytest.fixture
def invalid_connection() -> kombu.Connection:
    """A connection to an address where nothing listens."""
    return kombu.Connection(DEAD_URL, connect_timeout=1)


@pytest.fixture
def failover_connection() -> kombu.Connection:
    """A connection to an address where nothing listens, or else to the cluster."""
    return kombu.Connection(f"{DEAD_URL};{URL}", connect_timeout=1)


class TestBasicFunctionality(common.BasicFunctionality):
    """Connections, channels, simple queues."""


class TestExchangeTypes(common.BaseExchangeTypes):
    """Direct, topic and fanout."""


class TestTimeToLive(common.BaseTimeToLive):
    """Messages that expire."""


class TestPriority(common.BasePriority):
    """Messages with a priority."""


class TestMessage(common.BaseMessage):
    """Acknowledgements, rejections and requeues."""


class TestEventLoop(common.BaseEventLoop):
    """The event loop of Kombu."""


class TestFailover(common.BaseFailover):
    """A second URL."""
