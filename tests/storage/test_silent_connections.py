"""Goal: connections of strangers cost no file descriptor that storage needs for its files.

Method: a real storage process with a small limit of open files; hundreds of TCP connections that
send nothing, while messages are appended through the ends of several segments.
"""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import grpc.aio
import pytest

from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2_grpc as pb_grpc
from batonmq._connection.channels import connect
from batonmq_server.local.child_process import ChildProcess
from tests.storage.batches import batch
from tests.storage.test_process import output, process_site
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
TIMEOUT_S = 30
DESCRIPTORS = 256
SILENT = 600
STRANGERS = "127.0.0.2"


def connect_silently(exits: ExitStack, address: str) -> None:
    """Open connections that send nothing, from an address of the strangers' own.

    Those that the server refuses count too. Of connections of one address that come at once, any
    may be closed, also that of the test.
    """
    host, _, port = address.rpartition(":")
    for _ in range(SILENT):
        one = exits.enter_context(socket.socket())
        one.setblocking(False)
        one.bind((STRANGERS, 0))
        one.connect_ex((host, int(port)))


def threads_of(process: ChildProcess) -> int:
    return len(list(Path(f"/proc/{process.pid}/task").iterdir()))


async def test_storage_serves_while_strangers_hold_more_connections_than_it_has_descriptors(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with process_site(etcd_endpoint, tmp_path) as site:
        limited = f"ulimit -n {DESCRIPTORS}; exec {sys.executable} -m batonmq_server.storage"
        process = site.start_command("/bin/bash", "-c", limited)
        node = await site.serving()
        with ExitStack() as exits:
            async with connect(node.address) as channel:
                stub = pb_grpc.StorageServiceStub(channel)
                await channel.channel_ready()
                for address in (node.address, node.metrics_address):
                    connect_silently(exits, address)
                offsets = []
                for _ in range(40):  # each second batch begins a segment
                    answer = await stub.Append(
                        pb.AppendRequest(batches=[batch(bytes(40_000))]), timeout=TIMEOUT_S
                    )
                    (outcome,) = answer.outcomes
                    assert outcome.WhichOneof("outcome") == "receipt", await output(process)
                    offsets.append(outcome.receipt.first_offset)
                assert offsets == list(range(40))
            assert threads_of(process) < 100, "silent connections hold no threads"

            async def serves_a_new_client() -> bool:
                async with connect(node.address) as another:
                    request = pb.AppendRequest(batches=[batch(b"late")])
                    try:
                        answer = await pb_grpc.StorageServiceStub(another).Append(
                            request, timeout=2
                        )
                    except grpc.aio.AioRpcError:
                        return False
                    return answer.outcomes[0].HasField("receipt")

            await until(serves_a_new_client, timeout_s=40)
        assert process.pid is not None, "the process has not ended"
