"""Goal: a producer watches the brokers that are listed, and forgets those that were removed.

Method: a directory whose brokers the test lists, in virtual time; no stream can be opened.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, NoReturn

import pytest

from batonmq._producer.check_watcher import FAILURES_MAX, CheckWatcher
from batonmq.errors import BatonError, Unreachable
from batonmq_server.testing import run_virtual


class Brokers:
    """The part of a directory that the watcher uses.

    Attributes:
        listed: The brokers.
        tries: Broker of each attempt to open a stream.
    """

    def __init__(self, *listed: str) -> None:
        self.listed = set(listed)
        self.tries: list[str] = []

    async def brokers(self) -> set[str]:
        return set(self.listed)

    async def transactions(self, broker: str) -> NoReturn:
        self.tries.append(broker)
        raise Unreachable(f"no storage node {broker} is registered")

    async def pause(self, error: BatonError, failures: int) -> None:
        await asyncio.sleep(1)


def test_removed_broker_is_forgotten_and_watched_again_when_it_is_listed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "batonmq")

    async def scene() -> None:
        directory: Any = Brokers("a", "b")
        async with asyncio.TaskGroup() as tasks:
            running: list[asyncio.Task[None]] = []

            def start(work: Any) -> asyncio.Task[None]:
                running.append(tasks.create_task(work))
                return running[-1]

            start(CheckWatcher(directory, start, "shop", lambda _: None).run())
            await asyncio.sleep(100)
            assert directory.tries.count("b") >= 99, "a broker that is listed is tried on"
            directory.listed = {"a"}
            await asyncio.sleep(20)
            tried = directory.tries.count("b")
            await asyncio.sleep(100)
            assert directory.tries.count("b") == tried
            assert directory.tries.count("a") >= 200
            directory.listed = {"a", "b"}
            await asyncio.sleep(20)
            assert directory.tries.count("b") > tried
            directory.listed = {"a"}
            await asyncio.sleep(FAILURES_MAX / 2)
            assert directory.tries.count("b") > tried + 25, "it may only be away"
            for task in running:
                task.cancel()

    run_virtual(scene())
    lost = [one for one in caplog.messages if one.startswith("stream of checks lost broker=b")]
    assert len(lost) == 2, "each loss is logged once"
