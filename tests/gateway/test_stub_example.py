"""The example of a plain stub runs as a reader would run it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from subprocess import PIPE

import pytest

from batonmq import Admin
from tests.gateway.official_clients import REPO, official_client
from tests.support.cluster import local_cluster

EXAMPLE = REPO / "examples" / "stubs" / "send_receive_ack.js"


@pytest.mark.e2e
@pytest.mark.timeout(300)
async def test_stub_without_client_library_sends_receives_and_acknowledges(tmp_path: Path) -> None:
    node = official_client("node")  # its packages contain gRPC for Node.js
    async with local_cluster(tmp_path, gateways=1) as cluster:
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic("orders", 2)
        for _ in range(2):
            process = await asyncio.create_subprocess_exec(
                *("node", str(EXAMPLE), cluster.addresses["gateway"]),
                env=node.environment,
                stdout=PIPE,
                stderr=PIPE,
            )
            out, error = await process.communicate()
            assert process.returncode == 0, error.decode()
            assert out.startswith(b"sent, received and acknowledged: paid")
        async with Admin(cluster.nameserver) as admin:
            rows = (await admin.group_progress("stubs")).queues
        assert sum(row.committed_offset or 0 for row in rows if row.topic == "orders") == 2
