"""Goal: outcomes of one moment are answered together, within bounds, and before an error.

Method: the pure function that takes them from the queue of a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from baton.common.v1 import queue_pb2
from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from batonmq._core.queues import GroupQueue
from batonmq.errors import Held
from batonmq_server.lockmgr.leader import TOGETHER_MAX, Decided, taken_together

MANY = 1 << 20


def decided(number: int, outcome: pb.Grant | Exception) -> Decided:
    return GroupQueue("g", "t", "b", number), outcome


def taken(outcomes: Sequence[Decided], bytes_max: int = MANY) -> tuple[int, Exception | None, int]:
    """Return the number of outcomes that are taken, the error, and how many are left."""
    waiting: asyncio.Queue[Decided] = asyncio.Queue()
    for one in outcomes[1:]:
        waiting.put_nowait(one)
    together, failure = taken_together(outcomes[0], waiting, bytes_max)
    assert together == list(outcomes[: len(together)])
    return len(together), failure, waiting.qsize()


async def test_all_that_is_decided_is_taken() -> None:
    outcomes = [decided(n, Held("held") if n % 2 else pb.Grant(token=n)) for n in range(30)]
    assert taken(outcomes) == (30, None, 0)


async def test_count_is_bounded() -> None:
    outcomes = [decided(n, pb.Grant(token=n)) for n in range(TOGETHER_MAX + 1)]
    assert taken(outcomes) == (TOGETHER_MAX, None, 1)


async def test_bytes_are_bounded() -> None:
    acked = [
        queue_pb2.OffsetRange(first_offset=2 * n, next_offset=2 * n + 1) for n in range(10_000)
    ]
    large = pb.Grant(token=1, acked=acked)
    count, failure, left = taken([decided(n, large) for n in range(60)])
    assert (failure, count + left) == (None, 60)
    assert MANY <= count * large.ByteSize() < MANY + large.ByteSize()


async def test_client_of_an_earlier_version_gets_each_alone() -> None:
    assert taken([decided(n, pb.Grant(token=n)) for n in range(3)], bytes_max=0) == (1, None, 2)


async def test_outcomes_before_an_error_are_not_lost() -> None:
    error = ValueError("a defect")
    outcomes = [decided(0, pb.Grant(token=1)), decided(1, error), decided(2, pb.Grant(token=2))]
    assert taken(outcomes) == (1, error, 1)
    assert taken(outcomes[1:]) == (0, error, 1)
