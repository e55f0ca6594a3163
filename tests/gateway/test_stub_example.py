"""The examples of plain stubs run as a reader would run them."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import PIPE

import pytest

from batonmq import Admin
from tests.gateway.official_clients import REPO, STUBS, official_client
from tests.support.cluster import local_cluster

EXAMPLES = REPO / "examples" / "stubs"


def program(language: str, folder: Path) -> tuple[Sequence[str], Mapping[str, str] | None]:
    """Return the command of a stub and its environment, None for that of this process."""
    if language == "node":
        node = official_client("node")  # its packages contain gRPC for Node.js
        return ("node", str(EXAMPLES / "send_receive_ack.js")), node.environment
    # A copy as deep below the protos as the original: the generated code stays out of the tree.
    shutil.copytree(REPO / "protos" / "apache", folder / "protos" / "apache")
    module = folder / "examples" / "stubs" / "go"
    shutil.copytree(EXAMPLES / "go", module, ignore=shutil.ignore_patterns("bin", "rocketmq"))
    protoc = {"PROTOC": f"{sys.executable} -m grpc_tools.protoc"}
    environment = {**os.environ, **protoc}  # noqa: TID251  Go finds its caches by it
    for command in (["./generate.sh"], ["go", "vet", "."], ["go", "build", "-o", "stub", "."]):
        subprocess.run(command, cwd=module, env=environment, check=True, timeout=600)
    return (str(module / "stub"),), None


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.timeout(900 if "go" in STUBS else 300)  # gRPC for Go is compiled
@pytest.mark.parametrize("language", STUBS)
async def test_stub_without_client_library_sends_receives_and_acknowledges(
    tmp_path: Path, language: str
) -> None:
    command, environment = await asyncio.to_thread(program, language, tmp_path / "stub")
    async with local_cluster(tmp_path / "data", gateways=1) as cluster:
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic("orders", 2)
        for _ in range(2):
            process = await asyncio.create_subprocess_exec(
                *(*command, cluster.addresses["gateway"]),
                env=environment,
                stdout=PIPE,
                stderr=PIPE,
            )
            out, error = await process.communicate()
            assert process.returncode == 0, error.decode()
            assert out.startswith(b"sent, received and acknowledged: paid")
        async with Admin(cluster.nameserver) as admin:
            group = "stubs" if language == "node" else f"{language}-stubs"
            rows = (await admin.group_progress(group)).queues
        assert sum(row.committed_offset or 0 for row in rows if row.topic == "orders") == 2
