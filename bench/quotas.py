"""What a tenant at ten times its quota takes of another tenant's throughput.

    python -m bench.quotas

A secure cluster of one broker on this machine. The tenant `polite` keeps storage saturated with
encoded batches. In every second window the tenant `rude`, in a process of its own, tries to send
ten times its quota of bytes and does not wait when it is told to: in large calls, in small ones,
and in small ones without a bound of its calls in flight. Storage works in one event loop, so what
`rude` takes is measured by the messages of `polite` for each second of CPU time of that loop,
beside `rude` and alone: other work of the machine has little effect. The messages for each second
of the clock are printed, too.
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

WINDOW_S, WINDOWS = 4.0, 7
MESSAGES, BODY, IN_FLIGHT = 100, bytes(1_024), 32
"""Messages of a call of the polite tenant, their bodies, and its calls in flight."""
QUOTA, TIMES = 1_000_000, 10
"""Quota of the rude tenant in bytes per second, and what it sends of that."""
SHAPES = ((100_000, 32), (10_000, 32), (10_000, 100_000))
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
    address: str, security: Security, call_bytes: int, in_flight_max: int
) -> Counter[str]:
    """Send without waiting for a quota; return the outcomes."""
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

        begin, interval = loop.time(), call_bytes / (QUOTA * TIMES)
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
            await Quotas(admin).set("rude", QuotaLimits(produce_bytes_per_s=QUOTA))
        token_file = folder / "rude.token"
        await asyncio.to_thread(token_file.write_text, tokens["rude"].reveal())
        own = replace(security, token=tokens["polite"])
        async with connector(own)(cluster.addresses["storage"]) as channel:
            stub = pb_grpc.StorageServiceStub(channel)
            pid = cluster.pid("storage")
            await _polite(stub, pid)
            for shape in SHAPES:
                await _compare(stub, pid, cluster.addresses["storage"], folder, shape)


async def _compare(
    stub: pb_grpc.StorageServiceAsyncStub,
    pid: int | None,
    address: str,
    folder: Path,
    shape: tuple[int, int],
) -> None:
    """Measure windows with and without the rude tenant, in turns."""
    call_bytes, in_flight = shape
    ratios, outcomes = [], Counter[str]()
    for number in range(WINDOWS):
        alone = await _polite(stub, pid)
        rude = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.quotas", "--rude", address),
            *(str(folder / "tls"), str(folder / "rude.token"), str(call_bytes), str(in_flight)),
            stdout=asyncio.subprocess.PIPE,
        )
        assert rude.stdout is not None
        await rude.stdout.readline()  # it has imported what it needs
        beside = await _polite(stub, pid)
        said = (await rude.stdout.read()).decode().split()
        await rude.wait()
        outcomes += Counter(dict(zip(said[::2], map(int, said[1::2]), strict=True)))
        ratios.append((beside.per_cpu_s / alone.per_cpu_s, beside.count / alone.count))
        print(
            f"{call_bytes:,} B, {in_flight:,} in flight, window {number}: "
            f"{alone.count / alone.seconds:,.0f} msg/s alone, "
            f"{beside.count / beside.seconds:,.0f} beside; {alone.per_cpu_s:,.0f} and "
            f"{beside.per_cpu_s:,.0f} per second of CPU time; storage had work "
            f"{alone.saturation:.0%} and {beside.saturation:.0%} of the time"
        )
    accepted = outcomes["receipt"] * call_bytes / (WINDOWS * (WINDOW_S + 1))
    print(f"rude tenant: {dict(outcomes)}, {accepted:,.0f} B/s stored of a quota of {QUOTA:,}")
    by_cpu, by_clock = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(
        f"calls of {call_bytes:,} B, {in_flight:,} in flight: the polite tenant keeps {by_cpu:.1%} "
        f"of its throughput by CPU time of storage, {by_clock:.1%} by the clock (medians)"
    )


def main() -> None:
    """Measure, or be the rude tenant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rude", nargs=5, metavar=("ADDRESS", "TLS", "TOKEN_FILE", "BYTES", "IN_FLIGHT")
    )
    chosen = parser.parse_args().rude
    if not chosen:
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            asyncio.run(_measure(Path(folder)))
        return
    address, tls, token_file, call_bytes, in_flight = chosen
    print("ready", flush=True)
    security = _security(Path(tls), token_file)
    outcomes = asyncio.run(_rude(address, security, int(call_bytes), int(in_flight)))
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
