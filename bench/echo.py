"""`python -m bench.echo PORT_FILE`: a storage service that does nothing.

It answers `Append` with empty receipts, and `Pull` with the requested number of bytes, always the
same ones. So it measures the cost of gRPC and protobuf, which is the reference for storage. Memory
is set up as in a storage process.
"""

from __future__ import annotations

import asyncio
import os
import sys
from functools import lru_cache
from pathlib import Path

import grpc.aio

from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2_grpc as pb_grpc
from batonmq._connection.channels import OPTIONS
from batonmq_server.runtime.malloc_settings import keep_freed_memory
from bench.setup import BATCH_BYTES


class EchoServicer(pb_grpc.StorageServiceServicer):
    """A storage service that does nothing; see the module."""

    async def Append(self, request: pb.AppendRequest, context: object) -> pb.AppendResponse:
        """Return empty receipts."""
        outcome = pb.AppendOutcome(receipt=pb.AppendReceipt(first_offset=1, position=1))
        return pb.AppendResponse(outcomes=[outcome] * len(request.batches))

    async def Pull(self, request: pb.PullRequest, context: object) -> pb.PullResponse:
        """Return batches of 512 KiB, `bytes_max` bytes in all."""
        return _answer(request.bytes_max)


@lru_cache
def _answer(bytes_count: int) -> pb.PullResponse:
    return pb.PullResponse(batches=[os.urandom(BATCH_BYTES)] * (bytes_count // BATCH_BYTES))


async def main(port_file: Path) -> None:
    """Serve until killed; write the port to `port_file`."""
    keep_freed_memory()
    server = grpc.aio.server(options=OPTIONS)
    pb_grpc.add_StorageServiceServicer_to_server(EchoServicer(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    fresh = port_file.with_suffix(".new")
    fresh.write_text(str(port))
    fresh.replace(port_file)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
