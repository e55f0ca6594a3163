"""Goal: an unknown caller costs little: its requests are not read.

Method: every method of every contract behind the real edge, with health checks and reflection; the
requests that are parsed are recorded. Then large requests, which gRPC would keep in memory if they
were read.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import grpc.aio
import pytest

from batonmq._common.rpc import from_rpc_error
from batonmq.errors import BatonError, Unauthenticated
from batonmq_server.runtime.access.rules import COMMON_RULES
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.access.edge_scene import METHODS, TIMEOUT_S, Scene, request_of, scene
from tests.support.conditions import until

APPEND = "/baton.storage.v1.StorageService/Append"
FOREIGN = [path for path in COMMON_RULES if not path.startswith("/baton.")]
PATHS = [*METHODS, *FOREIGN]
LARGE_BYTES = 32 * 1024 * 1024


async def refusal(made: Scene, path: str, identity: str) -> BatonError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        if path in METHODS:
            await made.call(path, request_of(METHODS[path]), identity)
        else:
            # The same on the wire as `stream_stream`, whose write may fail with INTERNAL when the
            # call is refused before: https://github.com/grpc/grpc/issues/36066
            call: Any = made.channel.unary_stream(path)
            call = call(b"", metadata=made.metadata(identity), timeout=TIMEOUT_S)
            assert not [answer async for answer in call]
    return from_rpc_error(refused.value)


@pytest.mark.parametrize(
    ("certificates", "identity"), [(False, ""), (False, "unknown"), (True, "unknown")]
)
async def test_request_of_an_unknown_caller_is_not_read(
    etcd: EtcdSession, certificates: bool, identity: str
) -> None:
    async with scene(etcd, certificates=certificates) as made:
        for path in PATHS:
            assert isinstance(await refusal(made, path, identity), Unauthenticated)
        assert not made.read
        assert not made.served
        counted = sum(
            made.refused_count(service, "UNAUTHENTICATED")
            for service in {path.split("/")[1].rpartition(".")[2] for path in PATHS}
        )
        assert counted == len(PATHS)
        name, reason = APPEND.split("/")[2], "UNAUTHENTICATED"
        labels = {"service": "StorageService", "method": name, "reason": reason}
        value = partial(made.registry.get_sample_value, "baton_rpc_calls_total", labels)
        await until(lambda: value() == 1)


@pytest.mark.parametrize("path", [APPEND, *FOREIGN])
async def test_large_request_of_an_unknown_caller_ends_before_it_arrives(
    etcd: EtcdSession, path: str
) -> None:
    async with scene(etcd, certificates=False) as made:
        channel: Any = made.channel
        call = channel.channel.unary_unary(path)  # not over the stream of small calls
        async with asyncio.timeout(TIMEOUT_S):
            under_way = call(bytes(LARGE_BYTES), timeout=TIMEOUT_S)
            assert (await under_way.code()).name == "UNAUTHENTICATED"
        assert made.read == []


async def test_request_with_a_token_is_read_without_a_certificate(etcd: EtcdSession) -> None:
    async with scene(etcd, certificates=False) as made:
        await made.know("shop", ("produce", "topic:orders"))
        await made.call(APPEND, request_of(METHODS[APPEND]), "shop")
        assert made.read == [APPEND]
