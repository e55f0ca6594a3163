"""Goal: with the TLS options a client connects to servers that require TLS.

Method: certificates made for the test; health checks at a real gRPC server that requires client
certificates.
"""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from batonmq._connection.channels import connector
from batonmq._connection.security import Security
from batonspark.options import read_options

NAME = "storage.example"


def openssl(*arguments: str, folder: Path) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def certify(name: str, folder: Path) -> None:
    """Create a key, and a certificate of the authority in the folder."""
    request = ["req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"]
    openssl(*request, "-keyout", f"{name}.key", "-out", f"{name}.csr", folder=folder)
    (folder / f"{name}.ext").write_text(f"subjectAltName=DNS:{name}\n")
    signing = ["x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"]
    given = ["-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext", "-out", f"{name}.pem"]
    openssl(*signing, *given, folder=folder)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create certificates of an authority, a server and a client; return their folder."""
    folder = tmp_path_factory.mktemp("tls")
    authority = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=authority"]
    openssl(*authority, "-days", "2", "-keyout", "ca.key", "-out", "ca.pem", folder=folder)
    certify(NAME, folder)
    certify("client", folder)
    return folder


@asynccontextmanager
async def serving(certificates: Path) -> AsyncIterator[str]:
    """Yield the address of a server that accepts only clients with a certificate."""
    key, chain, root = (
        (certificates / name).read_bytes() for name in (f"{NAME}.key", f"{NAME}.pem", "ca.pem")
    )
    server = grpc.aio.server()
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    credentials = grpc.ssl_server_credentials([(key, chain)], root, require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def tls(certificates: Path, **more: str) -> Security:
    options = {"nameserver": "ns:1", "topic": "t", "tlsCaFile": str(certificates / "ca.pem")} | more
    security = read_options(options).connection.security
    assert security is not None
    return security


async def status(security: Security, address: str) -> int:
    async with connector(security)(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
        return int(answer.status)


async def test_call_with_valid_certificates_succeeds(certificates: Path) -> None:
    own = {
        "tlsCertFile": str(certificates / "client.pem"),
        "tlsKeyFile": str(certificates / "client.key"),
    }
    async with serving(certificates) as address:
        wanted = tls(certificates, tlsServerName=NAME, **own)
        assert await status(wanted, address) == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("missing", ["client", "name"])
async def test_call_without_client_certificate_or_server_name_fails(
    certificates: Path, missing: str
) -> None:
    own = {
        "tlsCertFile": str(certificates / "client.pem"),
        "tlsKeyFile": str(certificates / "client.key"),
    }
    given = {"client": {"tlsServerName": NAME}, "name": own}[missing]
    async with serving(certificates) as address:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await status(tls(certificates, **given), address)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
