"""One run: arbitrary calls to each service of a cluster, while a producer measures its sends."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from random import Random

import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from baton.lockmgr.v1 import lockmgr_service_pb2
from baton.metrics.v1 import metrics_service_pb2
from baton.nameserver.v1 import access_service_pb2, nameserver_service_pb2
from baton.offsets.v1 import offsets_service_pb2
from baton.offsets.v1 import replication_service_pb2 as offsets_replication_pb2
from baton.settings.v1 import settings_service_pb2
from baton.storage.v1 import (
    query_service_pb2,
    schedule_service_pb2,
    storage_service_pb2,
    transaction_service_pb2,
)
from baton.storage.v1 import replication_service_pb2 as storage_replication_pb2
from batonmq import Producer
from batonmq.admin import Admin
from batonmq_server.local.cluster import LocalCluster
from tools.fuzz.requests import RequestGenerator
from tools.fuzz.verdict import OK, outcome_of

_CONTRACTS = {
    "storage": (
        storage_service_pb2, query_service_pb2, schedule_service_pb2, transaction_service_pb2,
        storage_replication_pb2,
    ),
    "offsets": (offsets_service_pb2, offsets_replication_pb2),
    "lockmgr": (lockmgr_service_pb2,),
    "nameserver": (nameserver_service_pb2, access_service_pb2),
}  # fmt: skip
SERVICES = tuple(_CONTRACTS)
TOPIC, GROUP, PROBE = "fuzzed", "fuzzers", "probe"
_IN_FLIGHT = 16
_CALL_S = 0.5
_ANSWERS_MAX = 3
_PROBE_PAUSE_S = 0.02


@dataclass(slots=True)
class ServiceResult:
    """Outcomes of the calls to one service, by name, and the calls that broke the contract."""

    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FuzzResult:
    """Result of a run.

    Attributes:
        probe_ms: Duration of each probing send during the calls, in milliseconds.
        restarted: Processes that ended during the run.
    """

    services: Mapping[str, ServiceResult]
    probe_ms: Sequence[float]
    restarted: Sequence[str]

    @property
    def ok(self) -> bool:
        """Whether no call broke the contract and no process ended."""
        return not self.restarted and not any(each.problems for each in self.services.values())


def methods_of(service: str) -> list[MethodDescriptor]:
    """Return the methods that the process of a service serves, in a fixed order."""
    modules = (*_CONTRACTS[service], metrics_service_pb2, settings_service_pb2)
    services: list[ServiceDescriptor] = [
        each for module in modules for each in module.DESCRIPTOR.services_by_name.values()
    ]
    return [method for each in services for method in each.methods]


async def run_fuzz(cluster: LocalCluster, seed: int, calls: int) -> FuzzResult:
    """Call each service of a running cluster with arbitrary requests.

    Args:
        seed: The same seed gives the same requests in the same order.
        calls: Number of calls to each service.
    """
    async with Admin(cluster.nameserver) as admin:
        await admin.create_topic(TOPIC, 4)
        await admin.create_topic(PROBE, 1)
    before = {name: cluster.pid(name) for name in cluster.addresses}
    results = {service: ServiceResult() for service in SERVICES}
    probe_ms: list[float] = []
    async with Producer(cluster.nameserver) as producer, asyncio.TaskGroup() as tasks:
        probing = tasks.create_task(_probe(producer, probe_ms))
        for service, result in results.items():
            await _call_service(
                service, _addresses_of(cluster, service), random_of(seed, service), calls, result
            )
        probing.cancel()
    restarted = [name for name, pid in before.items() if cluster.pid(name) != pid]
    return FuzzResult(results, probe_ms, restarted)


def random_of(seed: int, service: str) -> Random:
    """Return the generator of a run's calls to a service."""
    return Random(f"{seed} {service}")


def _addresses_of(cluster: LocalCluster, service: str) -> list[str]:
    """Return the addresses of all processes of a service, the leader's among them."""
    addresses = cluster.addresses.items()
    return [address for name, address in addresses if name.partition("-")[0] == service]


async def _call_service(
    service: str, addresses: Sequence[str], random: Random, calls: int, result: ServiceResult
) -> None:
    generator = RequestGenerator(random, (TOPIC, GROUP, "broker-0", "client", "storage"))
    methods = methods_of(service)
    slots = asyncio.Semaphore(_IN_FLIGHT)
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    async with AsyncExitStack() as exits, asyncio.TaskGroup() as tasks:
        channels = [
            await exits.enter_async_context(grpc.aio.insecure_channel(address, options))
            for address in addresses
        ]
        for _ in range(calls):
            channel = random.choice(channels)
            method = random.choice(methods)
            request = generator.request(method.input_type)
            await slots.acquire()
            call = tasks.create_task(_call(channel, method, request, result))
            call.add_done_callback(lambda _: slots.release())


async def _call(
    channel: grpc.aio.Channel, method: MethodDescriptor, request: bytes, result: ServiceResult
) -> None:
    path = f"/{method.containing_service.full_name}/{method.name}"
    try:
        await _answer(channel, path, request, streams=method.server_streaming)
    except grpc.aio.AioRpcError as error:
        name, problem = outcome_of(error)
        result.outcomes[name] += 1
        if problem:
            result.problems.append(f"{path} {request[:200].hex()}: {problem}")
    else:
        result.outcomes[OK] += 1


async def _answer(channel: grpc.aio.Channel, path: str, request: bytes, *, streams: bool) -> None:
    """Wait for the answer, or for the first answers of a stream; the bytes are not decoded."""
    if not streams:
        unary: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
        await unary(request, timeout=_CALL_S)
        return
    stream: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(path)
    call = stream(request, timeout=_CALL_S)
    count = 0
    async for _ in call:
        count += 1
        if count == _ANSWERS_MAX:
            call.cancel()
            return


async def _probe(producer: Producer, durations_ms: list[float]) -> None:
    """Send one message after the other, and add the duration of each send, until cancelled."""
    clock = asyncio.get_running_loop().time
    while True:
        began_s = clock()
        await producer.send(PROBE, b"probe")
        durations_ms.append((clock() - began_s) * 1_000)
        await asyncio.sleep(_PROBE_PAUSE_S)
