"""Makes an etcd forget its history."""

from __future__ import annotations

import grpc.aio

from batonmq_server.etcd_api import rpc_pb2 as pb
from batonmq_server.etcd_api import rpc_pb2_grpc as pb_grpc


async def compact(endpoint: str, revision: int) -> None:
    """From now on nobody can watch from `revision` or before."""
    async with grpc.aio.insecure_channel(endpoint) as channel:
        request = pb.CompactionRequest(revision=revision, physical=True)
        await pb_grpc.KVStub(channel).Compact(request, timeout=10)
