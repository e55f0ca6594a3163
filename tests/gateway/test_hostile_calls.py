"""Goal: no request, however hostile, gets another answer than the contract knows.

Method: every call of the contract with arbitrary, mutated and damaged requests and headers, from a
fixed seed, some at once. Each answer has an official code other than those of internal errors; the
only other end is INVALID_ARGUMENT, for bytes that are no message. Afterwards the process is the
same, has not grown, and serves. BATON_FUZZ_CALLS sets the number of calls.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor

from apache.rocketmq.v2 import definition_pb2 as pb
from apache.rocketmq.v2 import service_pb2
from batonmq import Admin
from batonmq_server.gateway.access import SERVICE
from tests.gateway.remote_stub import RemoteStub, handle_of, remote_client
from tests.support.cluster import local_cluster
from tools.fuzz.requests import RequestGenerator

CALLS = int(os.environ.get("BATON_FUZZ_CALLS", "600"))  # noqa: TID251  a longer run by hand
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120 + CALLS // 20)]

AT_ONCE = 16
CALL_S = 5.0
STREAM_S = 0.3
GROWTH_BYTES_MAX = 96 * 1024 * 1024
INTERNAL = (pb.CODE_UNSPECIFIED, pb.INTERNAL_ERROR, pb.INTERNAL_SERVER_ERROR)
ENDS = {grpc.StatusCode.INVALID_ARGUMENT}
STREAM_ENDS = ENDS | {grpc.StatusCode.DEADLINE_EXCEEDED}
"""A stream or a long poll may also end at its client's deadline."""
HIDDEN = ("Internal error from Core", "Locally cancelled by application!")
"""gRPC's own ends at the client for a stream that ended while the client wrote."""
METHODS: Sequence[MethodDescriptor] = service_pb2.DESCRIPTOR.services_by_name[
    "MessagingService"
].methods
CLIENT_IDS = (*("client",) * 12, "a", " ", "x" * 255, "x" * 300, "")
NAMESPACES = (*("",) * 12, "tenant", "a/b", "%", "x" * 300)
CREDENTIALS = ("", "MQv2-HMAC-SHA1 Credential=a", "Bearer x", "x" * 900)
LANGUAGES = ("JAVA", "java", "NONE", "", "x" * 2_000)


def headers(random: Random) -> list[tuple[str, str | bytes]]:
    """Return the headers of a call: sometimes none, sometimes not those of a client."""
    drawn: list[tuple[str, str | bytes]] = [
        ("x-mq-client-id", random.choice((*CLIENT_IDS, f"client-{random.randrange(10_000)}"))),
        ("x-mq-namespace", random.choice(NAMESPACES)),
        ("x-mq-language", random.choice(LANGUAGES)),
        ("x-mq-client-version", random.choice(("5.0.7", "", "x" * 500))),
        ("authorization", random.choice(CREDENTIALS)),
        ("x-mq-bin", random.randbytes(9)),
    ]
    return [header for header in drawn if random.random() < 0.97]


class Caller:
    """Calls a gateway, and counts the codes and other ends of the calls."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self.ends: Counter[str] = Counter()
        self.problems: list[str] = []

    async def call(self, method: MethodDescriptor, requests: Sequence[bytes], more: Any) -> None:
        """Make one call with one or more requests, and judge its end."""
        streams = method.server_streaming
        try:
            statuses = await self._statuses(method, requests, more)
        except grpc.aio.AioRpcError as error:
            self.ends[error.code().name] += 1
            hidden = method.client_streaming and error.details() in HIDDEN
            if not hidden and error.code() not in (STREAM_ENDS if streams else ENDS):
                self._problem(method, requests, f"{error.code()}: {error.details()}")
            return
        self.ends["codes"] += 1
        for status in statuses:
            self.ends[pb.Code.Name(status.code)] += 1  # raises if the code is unknown
            if status.code in INTERNAL:
                self._problem(method, requests, f"{status}")

    async def _statuses(
        self, method: MethodDescriptor, requests: Sequence[bytes], more: Any
    ) -> list[pb.Status]:
        path = f"/{SERVICE}/{method.name}"
        read = getattr(service_pb2, method.output_type.name).FromString
        if not method.server_streaming:
            unary: Any = self._channel.unary_unary(path, response_deserializer=read)
            answer = await unary(requests[0], timeout=CALL_S, metadata=more)
            return [answer.status]
        if not method.client_streaming:
            frames: Any = self._channel.unary_stream(path, response_deserializer=read)
            call = frames(requests[0], timeout=STREAM_S, metadata=more)
        else:
            both: Any = self._channel.stream_stream(path, response_deserializer=read)
            call = both(_each(requests), timeout=STREAM_S, metadata=more)
        return [frame.status async for frame in call if frame.HasField("status")]

    def _problem(self, method: MethodDescriptor, requests: Sequence[bytes], what: str) -> None:
        shown = [request[:300].hex() for request in requests]
        self.problems.append(f"{method.name} {shown}: {what}")


async def _each(requests: Sequence[bytes]) -> Any:
    for request in requests:
        yield request


def resident_bytes(pid: int) -> int:
    """Return the memory that a process has in RAM."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def _known_texts(stub: RemoteStub) -> tuple[str, ...]:
    """Return names and handles that the gateway knows."""
    await stub.send("orders", b"a", b"b")
    messages = await stub.receive_until("billing", "orders", 2, invisible_ms=600_000)
    transaction_id = await stub.begin("orders", b"half")
    handles = [handle_of(one) for one in messages]
    return ("orders", "orders", "billing", "client", transaction_id, *handles)


@pytest.mark.long
async def test_every_hostile_call_gets_a_code_of_the_contract(tmp_path: Path) -> None:
    random = Random(18)
    async with (
        local_cluster(tmp_path, gateways=1) as cluster,
        Admin(cluster.nameserver) as admin,
        remote_client(cluster.addresses["gateway"], "client") as stub,
        grpc.aio.insecure_channel(cluster.addresses["gateway"]) as channel,
    ):
        await admin.create_topic("orders", 2)
        generator = RequestGenerator(random, await _known_texts(stub))
        caller, slots = Caller(channel), asyncio.Semaphore(AT_ONCE)
        pid = cluster.pid("gateway")
        assert pid is not None
        warm_bytes = 0
        async with asyncio.TaskGroup() as tasks:
            for number in range(CALLS):
                method = METHODS[number % len(METHODS)]
                count = random.randint(0, 4) if method.client_streaming else 1
                requests = [generator.request(method.input_type) for _ in range(count)]
                await slots.acquire()
                task = tasks.create_task(caller.call(method, requests, headers(random)))
                task.add_done_callback(lambda _: slots.release())
                if number == CALLS // 10:
                    warm_bytes = resident_bytes(pid)
        grown_bytes = resident_bytes(pid) - warm_bytes
        print(f"{CALLS} calls, grown by {grown_bytes / 2**20:.1f} MiB: {dict(caller.ends)}")
        assert not caller.problems, caller.problems[:5]
        assert cluster.pid("gateway") == pid, "the process has not ended"
        assert grown_bytes < GROWTH_BYTES_MAX
        wanted = {"OK", "ILLEGAL_TOPIC", "INVALID_ARGUMENT", "CLIENT_ID_REQUIRED"}
        assert wanted <= caller.ends.keys(), caller.ends
        assert await stub.send("orders", b"still here") == pb.Status(code=pb.OK, message="OK")
