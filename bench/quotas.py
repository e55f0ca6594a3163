"""What a tenant at ten times its quota takes of another tenant's throughput.

    python -m bench.quotas

A secure cluster of one broker on this machine. The tenant `polite` writes as fast as it can, in
windows of a few seconds. In every second window the tenant `rude`, in a process of its own, sends
ten times the bytes of its quota and does not wait when it is told to. Storage works in one event
loop, so what `rude` takes of the throughput of others is the share of a second of CPU time that its
calls cost: what storage uses beside it, without what the messages of `polite` cost alone. So other
work of the machine has little effect.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import grpc.aio

from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2_grpc as pb_grpc
from batonmq import Admin, Message, Producer, ProducerSettings, Security
from batonmq._common.rpc import from_rpc_error
from batonmq._connection.channels import connector
from batonmq._core.records import BatchBuilder, encode_record
from batonmq.admin.access import AccessControl, Role, RoleGrant
from batonmq.admin.quotas import QuotaLimits, Quotas
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions

WINDOW_S, WINDOWS = 4.0, 8
BODY, IN_FLIGHT = bytes(1_024), 2_000
QUOTA, TIMES, BATCH = 1_000_000, 10, 100_000
"""Quota of the rude tenant in bytes per second, what it sends of that, and bytes of one call."""


def _cpu_s(pid: int | None) -> float:
    """Return the CPU time that the event loop of a process, its first thread, has used."""
    times = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Window:
    """What happened in a window: messages stored, CPU time of storage, and time."""

    count: int
    cpu_s: float
    seconds: float


async def _polite(producer: Producer, pid: int | None, seconds: float) -> Window:
    """Write for a time, as fast as possible."""
    loop = asyncio.get_running_loop()
    begin, count, begin_cpu_s = loop.time(), 0, _cpu_s(pid)
    while loop.time() - begin < seconds:
        pending = [await producer.submit("polite", Message(BODY)) for _ in range(IN_FLIGHT)]
        for receipt in pending:
            await receipt
        count += len(pending)
    return Window(count, _cpu_s(pid) - begin_cpu_s, loop.time() - begin)


async def _rude(address: str, security: Security, seconds: float) -> Counter[str]:
    """Send without waiting for a quota; return the outcomes."""
    loop, outcomes = asyncio.get_running_loop(), Counter[str]()
    builder, message = BatchBuilder(), Message(bytes(BATCH))
    builder.add(message, encode_record(message))
    request = pb.AppendRequest(batches=[builder.encode(topic="rude", queue_id=0)])
    async with connector(security)(address) as channel, asyncio.TaskGroup() as tasks:
        stub = pb_grpc.StorageServiceStub(channel)

        async def send() -> None:
            try:
                answer = await stub.Append(request, timeout=10)
                outcomes[answer.outcomes[0].WhichOneof("outcome") or "none"] += 1
            except grpc.aio.AioRpcError as error:
                outcomes[from_rpc_error(error).reason] += 1

        begin, interval = loop.time(), BATCH / (QUOTA * TIMES)
        number = 0
        while loop.time() - begin < seconds:
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
        own = replace(security, token=tokens["polite"])
        taken, outcomes = [], Counter[str]()
        token_file = folder / "rude.token"
        await asyncio.to_thread(token_file.write_text, tokens["rude"].reveal())
        async with Producer(cluster.nameserver, ProducerSettings(security=own)) as producer:
            pid = cluster.pid("storage")
            await _polite(producer, pid, WINDOW_S)
            for number in range(WINDOWS):
                alone = await _polite(producer, pid, WINDOW_S)
                rude = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "bench.quotas", "--rude"),
                    *(cluster.addresses["storage"], str(folder / "tls"), str(token_file)),
                    stdout=asyncio.subprocess.PIPE,
                )
                assert rude.stdout is not None
                await rude.stdout.readline()  # it has imported what it needs
                beside = await _polite(producer, pid, WINDOW_S)
                said = (await rude.stdout.read()).decode().split()
                await rude.wait()
                outcomes += Counter(dict(zip(said[::2], map(int, said[1::2]), strict=True)))
                expected_s = alone.cpu_s * beside.count / alone.count
                taken.append((beside.cpu_s - expected_s) / beside.seconds)
                rates = [one.count / one.seconds for one in (alone, beside)]
                print(
                    f"window {number}: {rates[0]:,.0f} msg/s alone, {rates[1]:,.0f} beside it; "
                    f"it takes {taken[-1]:.1%} of storage"
                )
    accepted = outcomes["receipt"] * BATCH / (WINDOWS * (WINDOW_S + 1))
    print(f"rude tenant: {dict(outcomes)}, {accepted:,.0f} B/s stored of a quota of {QUOTA:,}")
    print(f"it takes {statistics.median(taken):.1%} of the throughput of storage (median)")


def main() -> None:
    """Measure, or be the rude tenant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rude", nargs=3, metavar=("ADDRESS", "TLS", "TOKEN_FILE"))
    chosen = parser.parse_args().rude
    if not chosen:
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            asyncio.run(_measure(Path(folder)))
        return
    address, tls, token_file = chosen
    print("ready", flush=True)
    outcomes = asyncio.run(_rude(address, _security(Path(tls), token_file), WINDOW_S + 1))
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
