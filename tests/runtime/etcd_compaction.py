"""Makes an etcd forget its history."""

from __future__ import annotations

import grpc.aio
from aetcd import rpc


async def compact(endpoint: str, revision: int) -> None:
    """From now on nobody can watch from `revision` or before."""
    async with grpc.aio.insecure_channel(endpoint) as channel:
        request = rpc.CompactionRequest(revision=revision, physical=True)
        await rpc.KVStub(channel).Compact(request, timeout=10)
