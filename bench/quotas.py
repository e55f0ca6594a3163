"""What a tenant at ten times its quota takes of another tenant's throughput.

    python -m bench.quotas

A secure cluster of one broker on this machine. The tenant `rude`, in a process of its own, tries to
send ten times its quota of bytes or calls and does not wait when it is told to: in large calls, in
small ones, and in small and tiny ones without a bound of its calls in flight. Storage works in one
event loop, so what `rude` takes is a share of the time of that loop. It is measured twice:

- without another tenant: CPU time of the loop per second, beside that of a tenant that sends just
  its quota. What it takes beyond that is not its own;
- beside the tenant `polite`, which keeps storage saturated with encoded batches: messages of
  `polite` for each second of CPU time of the loop alone, beside a tenant that sends just its quota,
  and beside `rude`, in turns. Other work of the machine changes these figures, and the messages for
  each second of the clock more than those for each second of CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import grpc.aio

from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2_grpc as pb_grpc
from batonmq import Admin, Message, Security
from batonmq._common.rpc import from_rpc_error
from batonmq._connection.channels import connector
from batonmq._core.records import BatchBuilder, encode_record
from batonmq.admin.access import AccessControl, Role, RoleGrant
from batonmq.admin.quotas import QuotaLimits, Quotas
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions

WINDOW_S, WINDOWS = 4.0, 5
MESSAGES, BODY, IN_FLIGHT = 100, bytes(1_024), 32
"""Messages of a call of the polite tenant, their bodies, and its calls in flight."""
QUOTA, CALLS_QUOTA, TIMES = 1_000_000, 100, 10
"""Quotas of the rude tenant in bytes and calls per second, and what it sends of them."""
SHAPES = ((100_000, 32), (10_000, 32), (10_000, 100_000), (100, 100_000))
"""Bytes of a call of the rude tenant, and its maximum number of calls in flight."""


@dataclass(frozen=True, slots=True)
class LoopTime:
    """Time of the event loop of a process, its first thread, in seconds.

    Attributes:
        wanted: CPU time, and the time that it has waited for a CPU.
    """

    cpu: float
    wanted: float

    @classmethod
    def of(cls, pid: int | None) -> LoopTime:
        """Return the time that it has used."""
        cpu_ns, waited_ns, _ = map(
            int, Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
        )
        return cls(cpu_ns / 1e9, (cpu_ns + waited_ns) / 1e9)


@dataclass(frozen=True, slots=True)
class Window:
    """What happened in a window: messages stored, and times in seconds."""

    count: int
    loop: LoopTime
    seconds: float

    @property
    def per_cpu_s(self) -> float:
        """Messages for each second of CPU time."""
        return self.count / self.loop.cpu

    @property
    def saturation(self) -> float:
        """Share of the time in which the event loop had work."""
        return self.loop.wanted / self.seconds


def _append(topic: str, queue_id: int, count: int, body: bytes) -> pb.AppendRequest:
    builder, message = BatchBuilder(), Message(body)
    for _ in range(count):
        builder.add(message, encode_record(message))
    return pb.AppendRequest(batches=[builder.encode(topic=topic, queue_id=queue_id)])


async def _polite(stub: pb_grpc.StorageServiceAsyncStub, pid: int | None) -> Window:
    """Write for a window, as fast as storage answers."""
    loop, count = asyncio.get_running_loop(), 0
    begin, before = loop.time(), LoopTime.of(pid)
    requests = [_append("polite", number % 4, MESSAGES, BODY) for number in range(IN_FLIGHT)]

    async def send(request: pb.AppendRequest) -> None:
        nonlocal count
        while loop.time() - begin < WINDOW_S:
            answer = await stub.Append(request, timeout=30)
            assert answer.outcomes[0].HasField("receipt"), answer
            count += MESSAGES

    async with asyncio.TaskGroup() as tasks:
        for request in requests:
            tasks.create_task(send(request))
    after = LoopTime.of(pid)
    used = LoopTime(after.cpu - before.cpu, after.wanted - before.wanted)
    return Window(count, used, loop.time() - begin)


async def _rude(
    address: str, security: Security, call_bytes: int, in_flight_max: int, times: float
) -> Counter[str]:
    """Send `times` the quota without waiting for it; return the outcomes."""
    loop, outcomes = asyncio.get_running_loop(), Counter[str]()
    request = _append("rude", 0, 1, bytes(call_bytes))
    async with connector(security)(address) as channel, asyncio.TaskGroup() as tasks:
        stub, in_flight = pb_grpc.StorageServiceStub(channel), asyncio.Semaphore(in_flight_max)

        async def send() -> None:
            try:
                answer = await stub.Append(request, timeout=10)
                outcomes[answer.outcomes[0].WhichOneof("outcome") or "none"] += 1
            except grpc.aio.AioRpcError as error:
                outcomes[from_rpc_error(error).reason] += 1
            finally:
                in_flight.release()

        begin, interval = loop.time(), max(call_bytes / QUOTA, 1 / CALLS_QUOTA) / times
        number = 0
        while loop.time() - begin < WINDOW_S + 1:
            await in_flight.acquire()
            tasks.create_task(send())
            number += 1
            await asyncio.sleep(max(0.0, begin + number * interval - loop.time()))
    return outcomes


async def _measure(folder: Path) -> None:
    options = ClusterOptions(secure=True, access=True)
    async with LocalCluster(folder, options) as cluster:
        security = cluster.security
        assert security is not None
        async with Admin(cluster.nameserver, security=security) as admin:
            control = AccessControl(admin)
            tokens = {}
            for name in ("polite", "rude"):
                await admin.create_topic(name, 4)
                await control.grant(name, RoleGrant(Role.ADMIN, f"topic:{name}"))
                tokens[name] = (await control.create_token(name)).token
            limits = QuotaLimits(produce_bytes_per_s=QUOTA, produce_calls_per_s=CALLS_QUOTA)
            await Quotas(admin).set("rude", limits)
        token_file = folder / "rude.token"
        await asyncio.to_thread(token_file.write_text, tokens["rude"].reveal())
        own = replace(security, token=tokens["polite"])
        async with connector(own)(cluster.addresses["storage"]) as channel:
            stub = pb_grpc.StorageServiceStub(channel)
            pid = cluster.pid("storage")
            await _polite(stub, pid)
            for shape in SHAPES:
                tenant = _RudeTenant(cluster.addresses["storage"], folder, *shape)
                await _load(tenant, pid)
                await _compare(stub, pid, tenant)


@dataclass(frozen=True, slots=True)
class _RudeTenant:
    """The rude tenant, which sends calls of one shape.

    Attributes:
        address: Of storage.
        folder: Where its certificate and its token are.
    """

    address: str
    folder: Path
    call_bytes: int
    in_flight: int

    def __str__(self) -> str:
        return f"{self.call_bytes:,} B, {self.in_flight:,} in flight"

    async def start(self, times: float) -> asyncio.subprocess.Process:
        """Start sending `times` its quota, in another process."""
        rude = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.quotas", "--rude", self.address),
            *(str(self.folder / "tls"), str(self.folder / "rude.token")),
            *(str(self.call_bytes), str(self.in_flight), str(times)),
            stdout=asyncio.subprocess.PIPE,
        )
        assert rude.stdout is not None
        await rude.stdout.readline()  # it has imported what it needs
        return rude


async def _end(rude: asyncio.subprocess.Process) -> Counter[str]:
    """Wait until the tenant ends; return the outcomes of its calls."""
    assert rude.stdout is not None
    words = (await rude.stdout.read()).decode().split()
    await rude.wait()
    return Counter(dict(zip(words[::2], map(int, words[1::2]), strict=True)))


async def _load(tenant: _RudeTenant, pid: int | None) -> None:
    """Measure what the tenant takes of the event loop without another tenant."""
    for times in (1, TIMES, TIMES, TIMES):
        rude = await tenant.start(times)
        before = LoopTime.of(pid)
        outcomes = await _end(rude)
        share = (LoopTime.of(pid).cpu - before.cpu) / (WINDOW_S + 1)
        print(f"{tenant}, {times} times its quota, alone: {share:.1%} of the loop {dict(outcomes)}")


async def _compare(
    stub: pb_grpc.StorageServiceAsyncStub, pid: int | None, tenant: _RudeTenant
) -> None:
    """Measure windows with and without the rude tenant, in turns."""
    ratios, outcomes = [], Counter[str]()
    for number in range(WINDOWS):
        alone = await _polite(stub, pid)
        waiting = await tenant.start(1)
        beside_waiting = await _polite(stub, pid)
        await _end(waiting)
        rude = await tenant.start(TIMES)
        beside = await _polite(stub, pid)
        outcomes += await _end(rude)
        ratios.append(
            (
                beside.per_cpu_s / alone.per_cpu_s,
                beside.per_cpu_s / beside_waiting.per_cpu_s,
                beside.count / alone.count,
            )
        )
        print(
            f"{tenant}, window {number}: "
            f"{alone.count / alone.seconds:,.0f} msg/s alone, "
            f"{beside.count / beside.seconds:,.0f} beside; {alone.per_cpu_s:,.0f} and "
            f"{beside.per_cpu_s:,.0f} per second of CPU time; storage had work "
            f"{alone.saturation:.0%} and {beside.saturation:.0%} of the time"
        )
    accepted = outcomes["receipt"] / (WINDOWS * (WINDOW_S + 1))
    print(
        f"rude tenant: {dict(outcomes)}, {accepted:,.0f} calls/s and "
        f"{accepted * tenant.call_bytes:,.0f} B/s stored of {CALLS_QUOTA} and {QUOTA:,}"
    )
    by_cpu, of_waiting, by_clock = (
        statistics.median(column) for column in zip(*ratios, strict=True)
    )
    print(
        f"calls of {tenant}: the polite tenant keeps {by_cpu:.1%} "
        f"of its throughput by CPU time of storage, {of_waiting:.1%} of that beside a tenant that "
        f"sends just its quota, {by_clock:.1%} by the clock (medians)"
    )


def main() -> None:
    """Measure, or be the rude tenant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rude",
        nargs=6,
        metavar=("ADDRESS", "TLS", "TOKEN_FILE", "BYTES", "IN_FLIGHT", "TIMES"),
    )
    chosen = parser.parse_args().rude
    if not chosen:
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            asyncio.run(_measure(Path(folder)))
        return
    address, tls, token_file, call_bytes, in_flight, times = chosen
    print("ready", flush=True)
    security = _security(Path(tls), token_file)
    sending = _rude(address, security, int(call_bytes), int(in_flight), float(times))
    outcomes = asyncio.run(sending)
    print(" ".join(f"{reason} {count}" for reason, count in outcomes.items()))


def _security(tls: Path, token_file: str) -> Security:
    return Security(
        ca_file=str(tls / "ca.pem"),
        cert_file=str(tls / "admin.pem"),
        key_file=str(tls / "admin.key"),
        token_file=token_file,
    )


if __name__ == "__main__":
    main()
