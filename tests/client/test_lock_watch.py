"""Goal: a notice about a queue that the consumer does not know is not lost.

Method: notices are given to the watch directly.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from batonmq._consumer.lock_watch import LockWatch
from batonmq._core.queues import QueueRef

QUEUE = QueueRef("orders", "broker-a", 0)


@pytest.mark.parametrize(
    ("queue", "keep_alive"),
    [
        (None, True),
        (SimpleNamespace(token=0, assigned=False), True),
        (SimpleNamespace(token=0, assigned=True), False),
        (SimpleNamespace(token=7, assigned=False), False),
        (SimpleNamespace(token=8, assigned=True), False),
    ],
)
def test_notice_of_an_unknown_grant_causes_a_keep_alive(queue: Any, keep_alive: bool) -> None:
    """The keep-alive is answered with the grant, which is then released."""
    session: Any = SimpleNamespace(keep_alive_soon=asyncio.Event(), heartbeat_soon=asyncio.Event())
    watch = LockWatch(session, {} if queue is None else {QUEUE: queue})
    watch.wanted(QUEUE, 8, pb.WANTED_REASON_WAITER)
    assert session.keep_alive_soon.is_set() is keep_alive
