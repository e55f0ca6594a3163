"""Compaction of etcd's history."""

from __future__ import annotations

import grpc.aio

from batonmq_server.etcd_api import rpc_pb2 as pb
from batonmq_server.etcd_api import rpc_pb2_grpc as pb_grpc


async def compact(endpoint: str, revision: int) -> None:
    """Drop the history up to `revision`: no watch can start before it any more."""
    async with grpc.aio.insecure_channel(endpoint) as channel:
        request = pb.CompactionRequest(revision=revision, physical=True)
        await pb_grpc.KVStub(channel).Compact(request, timeout=10)
