"""A real cluster that the tests of this folder share; each uses topics and groups of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from tests.support.cluster import local_cluster


@pytest.fixture(scope="package")
def nameserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return host:port of its nameserver; the cluster runs in a thread and a task of its own."""
    started: Future[tuple[str, Callable[[], object]]] = Future()

    async def live() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        try:
            async with local_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
                started.set_result(
                    (cluster.nameserver, lambda: loop.call_soon_threadsafe(stop.set))
                )
                await stop.wait()
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    try:
        address, stop = started.result(60)
        yield address
        stop()
    finally:
        thread.join(60)
