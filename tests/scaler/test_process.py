"""Goal: a scaler beside a real cluster with TLS and access control scales a group by its lag, and
sees only the groups that it has a grant for.

Method: real processes; the test calls as KEDA does, with a client certificate, and takes it for the
number of replicas that KEDA would compute.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from batonmq import Consumer, ConsumerSettings, Producer, ProducerSettings
from batonmq._connection.security import Security
from batonmq.admin import AccessControl, Admin, Role, RoleGrant
from batonmq_server.local.certificates import CertificateAuthority, CertificateSubject
from batonmq_server.local.child_process import ChildProcess, Program
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from batonmq_server.local.ports import keep_ports
from keda.externalscaler import externalscaler_pb2 as pb
from keda.externalscaler import externalscaler_pb2_grpc
from tests.support.cluster import SEGMENT_BYTES, fork_server
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
QUEUES, TARGET = 3, 5
METADATA = {"group": "billing", "lagMessages": str(TARGET), "scalerAddress": "scaler:9879"}


def credentials(security: Security) -> grpc.ChannelCredentials:
    files = (security.ca_file, security.key_file, security.cert_file)
    ca, key, cert = (Path(file).read_bytes() for file in files)
    return grpc.ssl_channel_credentials(ca, key, cert)


@asynccontextmanager
async def scaler(folder: Path, nameserver: str, identity: Security) -> AsyncIterator[str]:
    """Start a scaler; yield host:port."""
    port = keep_ports(folder / "ports.json", ["scaler"], {})["scaler"]
    settings = {
        "nameserver": nameserver,
        "port": port,
        "age_ms": 100,
        "tls_ca_file": identity.ca_file,
        "tls_cert_file": identity.cert_file,
        "tls_key_file": identity.key_file,
    }

    async def is_ready() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.close()
        return True

    child = ChildProcess(
        Program(
            name="scaler",
            command=[sys.executable, "-m", "batonmq_server.scaler"],
            drop=("BATON_",),
            env={f"BATON_SCALER_{key}".upper(): str(value) for key, value in settings.items()},
            log_path=folder / "scaler.log",
            is_ready=is_ready,
        )
    )
    child.spawn()
    await child.ready(60)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        assert await child.stop(30), "it ends by itself"
        assert child.returncode == 0


@pytest.mark.long
async def test_replicas_follow_the_lag_of_a_group_of_a_cluster_with_access_control(
    tmp_path: Path,
) -> None:
    options = ClusterOptions(
        secure=True,
        access=True,
        etcd_fsync=False,
        settings={"storage": {"segment_bytes": SEGMENT_BYTES}},
    )
    async with LocalCluster(tmp_path / "c", options, start=fork_server().start) as cluster:
        security = cluster.security
        assert security is not None
        settings = ConsumerSettings(security=security, consume_from="first")
        authority = CertificateAuthority(Path(security.ca_file).parent)
        own = authority.issue(CertificateSubject(name="scaler", hosts=["127.0.0.1"]))
        async with (
            scaler(tmp_path / "scaler", cluster.nameserver, own) as address,
            grpc.aio.secure_channel(address, credentials(security)) as channel,
            Admin(cluster.nameserver, security=security) as admin,
            Producer(cluster.nameserver, ProducerSettings(security=security)) as producer,
        ):
            stub = externalscaler_pb2_grpc.ExternalScalerStub(channel)
            ref = pb.ScaledObjectRef(name="billing", namespace="shop", scalerMetadata=METADATA)

            async def replicas() -> int:
                """Return what KEDA computes: none without activity, otherwise value by target."""
                if not (await stub.IsActive(ref)).result:
                    return 0
                asked = pb.GetMetricsRequest(scaledObjectRef=ref, metricName="lag-messages")
                (value,) = (await stub.GetMetrics(asked)).metricValues
                return max(1, math.ceil(value.metricValueFloat / TARGET))

            await admin.create_topic("orders", queue_count=QUEUES)
            consumer = Consumer(cluster.nameserver, "billing", {"orders": "*"}, settings)
            async with consumer:
                pass
            with pytest.raises(grpc.aio.AioRpcError, match="lacks consume on group:billing"):
                await stub.IsActive(ref)
            await AccessControl(admin).grant("scaler", RoleGrant(Role.CONSUME, "group:billing"))
            await until(lambda: is_permitted(replicas()))
            assert await replicas() == 0
            await producer.send_many("orders", [b"paid"] * (TARGET + 1))
            await until(lambda: is_equal(replicas(), 2))
            await producer.send_many("orders", [b"paid"] * 500)
            await until(lambda: is_equal(replicas(), QUEUES))
            consumer = Consumer(cluster.nameserver, "billing", {"orders": "*"}, settings)
            async with consumer, asyncio.TaskGroup() as tasks:

                async def handle(_: object) -> None:
                    return

                running = tasks.create_task(consumer.run(handle))
                await until(lambda: is_equal(replicas(), 0))
                running.cancel()
            assert "TLS IS OFF" not in (tmp_path / "scaler" / "scaler.log").read_text()
            with pytest.raises(grpc.aio.AioRpcError) as strange:
                async with grpc.aio.insecure_channel(address) as plain:
                    await externalscaler_pb2_grpc.ExternalScalerStub(plain).IsActive(ref)
            assert strange.value.code() is grpc.StatusCode.UNAVAILABLE


async def is_equal(value: Awaitable[int], expected: int) -> bool:
    return await value == expected


async def is_permitted(call: Awaitable[object]) -> bool:
    """Return whether the call succeeds: the services read a new grant within a moment."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED
        return False
    return True
