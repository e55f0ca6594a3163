"""Goal: servers accept authenticated clients, explain each rejection, and use renewed files.

Method: real gRPC over TLS in this process, with certificates of an authority of the test.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from batonmq._common.rpc import from_rpc_error
from batonmq._common.secret import Secret
from batonmq._connection import tls_probe as handshake
from batonmq._connection.call_stream import StreamingChannel
from batonmq._connection.channels import OPTIONS, connector
from batonmq._connection.secure_channel import CHECK_INTERVAL_S, SecureChannel
from batonmq._connection.security import Security
from batonmq._connection.tls_probe import find_tls_failure
from batonmq._process.config import ConfigError, load
from batonmq.errors import Unreachable
from batonmq_server.local.certificates import CertificateAuthority, CertificateSubject
from batonmq_server.runtime.settings import ServiceSettings
from batonmq_server.runtime.tls import check_files, listen, server_credentials
from tests.support.conditions import until
from tests.support.own_logs import own_warnings

NODE = CertificateSubject(name="node", uri="service:storage", hosts=("localhost", "127.0.0.1"))
CAROL = CertificateSubject(name="carol")
METHOD = "/Test/Ask"
SECRET = "a-token-that-is-never-shown"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason of a rejection is found however long a handshake takes."""
    monkeypatch.setattr(handshake, "TIMEOUT_S", 20)


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path / "tls")


@pytest.fixture
def node(authority: CertificateAuthority) -> Security:
    return authority.issue(NODE)


@pytest.fixture
def carol(authority: CertificateAuthority) -> Security:
    return authority.issue(CAROL)


class CallerServicer:
    """A server that returns the caller's name; a `hold` request waits."""

    def __init__(self) -> None:
        self.held, self.release = asyncio.Event(), asyncio.Event()

    async def ask(self, request: bytes, context: Any) -> bytes:
        if request == b"hold":
            self.held.set()
            await self.release.wait()
        if request == b"token":
            return str(dict(context.invocation_metadata()).get("authorization", "")).encode()
        field = "x509_pem_cert" if request == b"certificate" else "x509_common_name"
        return b"".join(context.auth_context().get(field, []))

    def add(self, server: grpc.aio.Server) -> None:
        handler: Any = grpc.unary_unary_rpc_method_handler(self.ask)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("Test", {"Ask": handler}),)
        )


@asynccontextmanager
async def serving(
    security: Security | None, *, required: bool = True
) -> AsyncIterator[tuple[str, CallerServicer]]:
    servicer, server = CallerServicer(), grpc.aio.server(options=OPTIONS)
    servicer.add(server)
    if security is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        credentials = server_credentials(security, require_client_cert=required)
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", servicer
    finally:
        await server.stop(None)


async def ask(channel: grpc.aio.Channel, request: bytes = b"") -> bytes:
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(METHOD)
    return await call(request, timeout=100)


def secure(channel: grpc.aio.Channel) -> SecureChannel:
    assert isinstance(channel, StreamingChannel) and isinstance(channel.channel, SecureChannel)
    return channel.channel


def present(channel: grpc.aio.Channel) -> grpc.aio.Channel:
    return secure(channel).current()


def read(path: str) -> bytes:
    return Path(path).read_bytes()


def spoil(path: str) -> None:
    Path(path).write_text("half a key")


async def answer(address: str, security: Security | None, request: bytes = b"") -> bytes:
    async with connector(security)(address) as channel:
        return await ask(channel, request)


async def test_caller_with_a_certificate_is_identified_by_it(
    node: Security, carol: Security
) -> None:
    async with serving(node) as (address, _):
        assert await answer(address, carol) == b"carol"
        assert await answer(address, node) == b"node"
        named = replace(carol, server_name="localhost")
        assert await answer(address.replace("127.0.0.1", "localhost"), named) == b"carol"


async def test_caller_without_a_certificate_is_identified_by_its_token(
    node: Security, carol: Security
) -> None:
    security = Security(ca_file=carol.ca_file, token=Secret(SECRET))
    async with serving(node, required=False) as (address, _):
        assert await answer(address, security, b"token") == f"Bearer {SECRET}".encode()
        assert await answer(address, replace(security, token=None), b"token") == b""


def refusals(
    authority: CertificateAuthority, carol: Security, tmp_path: Path
) -> dict[str, Security | None]:
    stranger = CertificateAuthority(tmp_path / "other").issue(CertificateSubject(name="stranger"))
    return {
        "uses TLS": None,
        "requires a client certificate": Security(ca_file=carol.ca_file),
        "client certificate, which has expired": authority.issue(
            CertificateSubject(name="old"), days=-1
        ),
        "not trust the authority of the client": replace(stranger, ca_file=carol.ca_file),
        "not signed by a trusted authority": replace(carol, ca_file=stranger.ca_file),
        "not valid for its address": replace(carol, server_name="elsewhere"),
    }


async def test_rejected_client_gets_the_reason_and_a_remedy(
    authority: CertificateAuthority, node: Security, carol: Security, tmp_path: Path
) -> None:
    async with serving(node) as (address, _):
        for reason, security in refusals(authority, carol, tmp_path).items():
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await answer(address, security)
            error = from_rpc_error(failed.value)
            assert isinstance(error, Unreachable), reason
            assert error.message.startswith(f"{address}: it"), reason
            assert error.remedy != Unreachable.remedy, reason
            failure = await asyncio.to_thread(find_tls_failure, address, security)
            assert failure is not None, reason
            assert reason in failure.reason
            assert failure.remedy
        assert await asyncio.to_thread(find_tls_failure, address, carol) is None


async def test_errors_name_the_problem_of_an_untrusted_server(
    authority: CertificateAuthority, carol: Security
) -> None:
    old = authority.issue(replace(NODE, name="old"), days=-1)
    for security, reason in (
        (old, "certificate has expired"),
        (None, "not use TLS"),
    ):
        async with serving(security) as (address, _):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await answer(address, carol)
            assert reason in from_rpc_error(failed.value).message
            failure = await asyncio.to_thread(find_tls_failure, address, carol)
            assert failure is not None
            assert reason in failure.reason


async def test_connection_error_without_tls_does_not_mention_tls() -> None:
    async with serving(None) as (address, _):
        assert await asyncio.to_thread(find_tls_failure, address, None) is None
    assert await asyncio.to_thread(find_tls_failure, address, None) is None


async def test_renewed_files_are_used_and_no_call_is_lost(
    authority: CertificateAuthority, node: Security, carol: Security
) -> None:
    """Calls go on all the time; one is in progress over every change."""
    async with serving(node) as (address, servicer), connector(carol)(address) as channel:
        shown: list[bytes] = []
        over = asyncio.Event()

        async def keep_asking() -> None:
            while not over.is_set():
                certificate = await ask(channel, b"certificate")
                if certificate not in shown:
                    shown.append(certificate)

        async with asyncio.TaskGroup() as tasks:
            pending = tasks.create_task(ask(channel, b"hold"))
            await servicer.held.wait()
            for _ in range(4):
                tasks.create_task(keep_asking())
            await until(lambda: shown)
            for number in range(1, 4):
                authority.issue(NODE)
                fresh = read(authority.issue(CAROL).cert_file)
                await until(lambda fresh=fresh: fresh in shown, timeout_s=90)  # type: ignore[misc]
                gc.collect()
                assert len(shown) == number + 1
            over.set()
            assert not pending.done()
            servicer.release.set()
            assert await pending == b"carol"


async def test_server_shows_its_renewed_certificate(
    authority: CertificateAuthority, node: Security, carol: Security
) -> None:
    async with serving(node) as (address, _):
        authority.issue(replace(NODE, hosts=("renamed.example",)))
        with pytest.raises(grpc.aio.AioRpcError, match="Hostname"):
            await answer(address, carol)
        assert await answer(address, replace(carol, server_name="renamed.example")) == b"carol"


async def test_mismatched_new_files_change_nothing(node: Security, carol: Security) -> None:
    async with serving(node) as (address, _), connector(carol)(address) as channel:
        assert await ask(channel) == b"carol"
        before = present(channel)
        for security in (node, carol):
            spoil(security.key_file)
        end_s = asyncio.get_running_loop().time() + 1.5 * CHECK_INTERVAL_S
        while asyncio.get_running_loop().time() < end_s:
            assert await ask(channel) == b"carol"
        assert present(channel) is before


async def test_token_is_read_from_the_current_file(
    node: Security, carol: Security, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("first")
    security = Security(ca_file=carol.ca_file, token_file=str(file))
    async with (
        serving(node, required=False) as (address, _),
        connector(security)(address) as channel,
    ):
        assert await ask(channel, b"token") == b"Bearer first"
        file.write_text("second")

        async def shown() -> bool:
            return await ask(channel, b"token") == b"Bearer second"

        await until(shown, timeout_s=10)


async def test_close_ends_calls_in_progress(
    authority: CertificateAuthority, node: Security, carol: Security
) -> None:
    async with serving(node) as (address, servicer):
        channel = connector(carol)(address)
        call: Any = channel.unary_unary(METHOD)
        pending = call(b"hold", timeout=30)
        await servicer.held.wait()
        authority.issue(CAROL)
        before = present(channel)
        await until(lambda: present(channel) is not before, timeout_s=10)
        await channel.close()
        assert pending.cancelled()


def settings_of(**fields: str) -> ServiceSettings:
    values = {"node_id": "n"} | fields
    env = {f"BATON_X_{name.upper()}": value for name, value in values.items()}
    return load(ServiceSettings, "BATON_X", env)


FILES = {"tls_cert_file": "c", "tls_key_file": "k", "tls_ca_file": "a"}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"host": "0.0.0.0"}, "can be reached from other machines, and there is no TLS"),
        ({"host": "10.0.0.7"}, "insecure_network to true"),
        ({"host": "node.example"}, "can be reached from other machines"),
        ({"host": "::"}, "can be reached from other machines"),
        ({"tls_cert_file": "c"}, "go together"),
        ({"tls_cert_file": "c", "tls_key_file": "k"}, "needs tls_ca_file"),
        ({"tls_ca_file": "a"}, "there is no TLS"),
        ({"token_file": "t"}, "there is no TLS"),
        ({"etcd_cert_file": "c"}, "go together"),
        ({"etcd_cert_file": "c", "etcd_key_file": "k"}, "needs etcd_ca_file"),
    ],
)
def test_insecure_settings_are_rejected(settings: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        settings_of(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"host": "127.0.0.9"},
        {"host": "localhost"},
        {"host": "[::1]"},
        {"host": "0.0.0.0", "insecure_network": "true"},
        {"host": "0.0.0.0", **FILES},
        {"host": "0.0.0.0", "tls_cert_file": "c", "tls_key_file": "k",
         "tls_require_client_cert": "false"},
    ],
)  # fmt: skip
def test_explicitly_insecure_settings_are_accepted(settings: dict[str, str]) -> None:
    loaded = settings_of(**settings)
    assert (loaded.security is None) == ("tls_cert_file" not in settings)


def test_files_are_checked_before_the_start(node: Security) -> None:
    settings = settings_of(
        tls_cert_file=node.cert_file,
        tls_key_file=node.key_file,
        tls_ca_file="/nowhere/ca.pem",
    )
    with pytest.raises(ConfigError, match=r"/nowhere/ca\.pem: No such file"):
        check_files(settings)
    etcd = settings_of(etcd_ca_file=node.key_file)
    with pytest.raises(ConfigError, match=node.key_file):
        check_files(etcd)


@pytest.mark.parametrize(
    ("settings", "reach"),
    [
        ({}, "this machine (loopback only)"),
        ({"insecure_network": "true"}, "this network"),
    ],
)
async def test_server_without_tls_logs_a_warning(
    settings: dict[str, str], reach: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = grpc.aio.server()
    with caplog.at_level(logging.WARNING):
        assert listen(server, settings_of(**settings))
    (logged,) = caplog.messages
    assert logged.startswith(f"TLS IS OFF: every program on {reach}")
    await server.stop(None)


async def test_server_with_tls_logs_no_warning(
    node: Security, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(
        tls_cert_file=node.cert_file,
        tls_key_file=node.key_file,
        tls_ca_file=node.ca_file,
    )
    server = grpc.aio.server()
    with caplog.at_level(logging.WARNING):
        assert listen(server, settings)
    assert not own_warnings(caplog)
    await server.stop(None)
