"""Elections that are held although the leader lives: it gets no CPU for a while."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager

from batonmq.admin.admin import Admin
from batonmq_server.local.child_process import start_program
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.cluster_state import leader_process
from batonmq_server.local.layout import ClusterOptions, highly_available
from bench.figures import Figure, Goal, figure
from bench.setup import Setup

STARVED_S = 2
_REST_S = 3
"""Time between two pauses of one leader, in which it renews its lease."""
SERVICES = {"storage": "broker-0", "offsets": "", "lockmgr": ""}


async def starvation(setup: Setup) -> list[Figure]:
    """The leader of each service is paused for 2 s, again and again, while all cores are busy."""
    options = highly_available(ClusterOptions(auto_restart=False, log_level="WARNING"))
    rounds = setup.sized(50, 1)
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(
            LocalCluster(setup.folder / "cluster", options, start=start_program)
        )
        admin = await stack.enter_async_context(Admin(cluster.nameserver))
        before = await _epochs(admin)
        stack.enter_context(_busy_cores())
        for number in range(rounds):
            setup.say(f"pause {number + 1} of {rounds}")
            paused = [await leader_process(admin, cluster, *one) for one in SERVICES.items()]
            for name in filter(None, paused):
                cluster.pause(name)
            await asyncio.sleep(STARVED_S)
            for name in filter(None, paused):
                cluster.resume(name)
            await asyncio.sleep(_REST_S)
        after = await _epochs(admin)
    elections = sum(after[name] != before[name] for name in before)
    text = f"leaders replaced, {rounds} pauses of {STARVED_S} s of each, busy cores"
    return [figure(text, elections, "", Goal(value_max=0))]


async def _epochs(admin: Admin) -> dict[tuple[str, str], tuple[str, int]]:
    """Return node and epoch of the leader of each service and replica set."""
    return {
        (node.service, node.replica_set): (node.node_id, node.epoch)
        for node in (await admin.cluster()).nodes
        if node.leader
    }


@contextmanager
def _busy_cores() -> Iterator[None]:
    """Keep every core busy with processes that compete with those of the cluster."""
    spinning = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(2 * (os.cpu_count() or 1))
    ]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()
