"""Goal: calls and streams end when the credentials of their caller end.

Blocked identities and certificates, tokens of the issuer that expire or lose their key, and tokens
bound to a certificate: new calls are UNAUTHENTICATED, open streams and long polls end within 5 s,
and those of other callers continue.
Method: every stream and long poll of every contract behind the real edge, over real TLS.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from ssl import PEM_cert_to_DER_cert

import grpc.aio
import pytest
from cryptography import x509

from batonmq._common.clock import Clock
from batonmq._connection.channels import connector
from batonmq._connection.security import Security
from batonmq.errors import BatonError, InvalidArgument, Unauthenticated
from batonmq_server.local.certificates import CertificateAuthority, CertificateSubject
from batonmq_server.runtime.access.blocks import check_fingerprint, check_subject
from batonmq_server.runtime.access.oidc import OidcTokens
from batonmq_server.runtime.access.permissions import AccessRole, Grant
from batonmq_server.runtime.access.stored_access import block_key
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.access.edge_scene import ALL, METHODS, Scene, request_of, scene
from tests.access.issuer import Document, Issuer, tokens_of
from tests.access.test_admission import PULL, WATCH, refusal
from tests.support.conditions import until

ENDS_S = 5.0
LONG_POLLS = ("Pull", "Fetch", "Acquire")
WAITING = [
    path for path, method in METHODS.items() if method.server_streaming or method.name in LONG_POLLS
]
"""Every stream and long poll of the contracts."""
IDENTITIES = {
    "victim": "victim",
    "other": "other",
    "storage": "service:storage",
    "storage-2": "service:storage",
    "offsets": "service:offsets",
    "offsets-2": "service:offsets",
}


@dataclass
class TlsScene:
    """The scene over TLS, and a channel for each certificate.

    Attributes:
        certificates: Files of the clients by name.
    """

    edge: Scene
    certificates: Mapping[str, Security]
    channels: Mapping[str, grpc.aio.Channel]

    async def call(self, path: str, channel: str, token_of: str = "") -> None:
        await self.edge.call(path, request_of(METHODS[path]), token_of, self.channels[channel])

    def der(self, name: str) -> bytes:
        return PEM_cert_to_DER_cert(Path(self.certificates[name].cert_file).read_text())

    def fingerprint(self, name: str) -> str:
        return sha256(self.der(name)).hexdigest()

    def serial(self, name: str) -> str:
        return f"{x509.load_der_x509_certificate(self.der(name)).serial_number:x}"

    async def block(self, subject: str) -> None:
        assert await self.edge.store.block(check_subject(subject), "root", "")


@asynccontextmanager
async def over_tls(
    etcd: EtcdSession, folder: Path, *, certificates: bool = True, oidc: OidcTokens | None = None
) -> AsyncIterator[TlsScene]:
    authority = CertificateAuthority(folder)
    server = authority.issue(CertificateSubject(name="server", hosts=("localhost",)))
    files = {
        name: authority.issue(
            CertificateSubject(name=name, uri=identity if ":" in identity else "")
        )
        for name, identity in IDENTITIES.items()
    }
    async with (
        scene(etcd, *LONG_POLLS, tls=server, certificates=certificates, oidc=oidc) as edge,
        AsyncExitStack() as stack,
    ):
        channels = {
            name: await stack.enter_async_context(connector(one)(edge.address))
            for name, one in files.items()
        }
        yield TlsScene(edge, files, channels)


@pytest.mark.parametrize("by", ["certificate", "serial"])
async def test_every_open_call_of_a_blocked_certificate_ends_and_no_other(
    etcd: EtcdSession, tmp_path: Path, by: str
) -> None:
    async with over_tls(etcd, tmp_path) as here:
        await here.edge.know("victim", ("admin", "cluster"))
        await here.edge.know("other", ("admin", "cluster"))
        here.edge.holds.update(WAITING)
        victims, others = await errors_and_other_calls(here, by)
        assert len(victims) == len(others) == len(WAITING)
        for path, error in victims.items():
            assert isinstance(error, Unauthenticated), path
            assert f"{by}:" in error.message
        (path,) = [one for one in WAITING if one.endswith("StorageService/Pull")]
        again = await refusal(here.call(path, "victim"))
        assert isinstance(again, Unauthenticated)
        assert await here.edge.store.unblock(f"{by}:{getattr(here, FIELD[by])('victim')}")
        here.edge.holds.clear()
        await until(lambda: is_admitted(here, path))


FIELD = {"certificate": "fingerprint", "serial": "serial"}


async def is_admitted(here: TlsScene, path: str) -> bool:
    try:
        await here.call(path, "victim")
    except grpc.aio.AioRpcError:
        return False
    return True


async def errors_and_other_calls(
    here: TlsScene, by: str
) -> tuple[dict[str, BatonError], dict[str, asyncio.Task[None]]]:
    """Block the certificates of one caller of each path; return its errors and the other calls."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        ending: dict[str, asyncio.Task[BatonError]] = {}
        others: dict[str, asyncio.Task[None]] = {}
        for path in WAITING:
            victim, other = callers_of(path)
            ending[path] = tasks.create_task(refusal(here.call(path, victim)))
            others[path] = tasks.create_task(here.call(path, other))
        await until(lambda: len(here.edge.served) == 2 * len(WAITING))
        begin_s = loop.time()
        for name in ("victim", "storage", "offsets"):
            await here.block(f"{by}:{getattr(here, FIELD[by])(name)}")
        errors = {path: await task for path, task in ending.items()}
        assert loop.time() - begin_s < ENDS_S
        assert not [path for path, task in others.items() if task.done()]
        for task in others.values():
            task.cancel()
    return errors, others


def callers_of(path: str) -> tuple[str, str]:
    """Return the names of the blocked caller and of the other one."""
    if not ALL[path].private:
        return "victim", "other"
    (service,) = ALL[path].services
    return service, f"{service}-2"


@pytest.mark.parametrize("path", [PULL, WATCH])
@pytest.mark.parametrize("token_of", ["", "victim"])
async def test_open_call_of_a_blocked_identity_ends_with_and_without_a_token(
    etcd: EtcdSession, tmp_path: Path, path: str, token_of: str
) -> None:
    async with over_tls(etcd, tmp_path) as here, asyncio.TaskGroup() as tasks:
        await here.edge.know("victim", ("admin", "cluster"))
        here.edge.holds.add(path)
        call = here.call(path, "other" if token_of else "victim", token_of)
        ending = tasks.create_task(refusal(call))
        await until(lambda: here.edge.served)
        await here.block("identity:victim")
        async with asyncio.timeout(ENDS_S):
            error = await ending
        assert isinstance(error, Unauthenticated)
        assert error.message == "identity:victim is blocked"
        read = len(here.edge.read)
        for channel, token in (("victim", ""), ("other", "victim")):
            assert isinstance(await refusal(here.call(path, channel, token)), Unauthenticated)
        if token_of:
            assert len(here.edge.read) == read + 1, "the request with the token was read"
        assert here.edge.refused_count(path.split("/")[1].rpartition(".")[2], "UNAUTHENTICATED")


async def test_unreadable_entry_of_a_block_still_blocks(etcd: EtcdSession, tmp_path: Path) -> None:
    async with over_tls(etcd, tmp_path) as here:
        await here.edge.know("victim", ("admin", "cluster"))
        await here.call(PULL, "victim")
        await etcd.put(block_key("identity:victim"), b"\xff\xff")
        await until(lambda: is_refused(here, PULL))


async def is_refused(here: TlsScene, path: str) -> bool:
    return not await is_admitted(here, path)


@pytest.mark.parametrize(
    ("subject", "stored"),
    [
        ("identity:carol", "identity:carol"),
        ("identity:spiffe://a/b", "identity:spiffe://a/b"),
        ("certificate:" + ":".join(["AB"] * 32), "certificate:" + "ab" * 32),
        ("serial:0x0F:1c", "serial:f1c"),
        ("serial:00", "serial:0"),
    ],
)
def test_subject_of_a_block_has_one_form(subject: str, stored: str) -> None:
    assert check_subject(subject) == stored


@pytest.mark.parametrize(
    "subject",
    ["", "carol", "identity:", "identity:a b", "identity:service:storage", "certificate:ab",
     "serial:", "serial:xyz", "token:abc", "serial:" + "f" * 41],
)  # fmt: skip
def test_malformed_subject_is_refused(subject: str) -> None:
    with pytest.raises(InvalidArgument):
        check_subject(subject)


# ---- tokens that are bound to a certificate


async def test_bound_token_is_valid_with_its_certificate_only(
    etcd: EtcdSession, tmp_path: Path
) -> None:
    async with over_tls(etcd, tmp_path) as here:
        edge = here.edge
        edge.tokens["app"] = "secret-of-app"
        await edge.store.grant("app", Grant(AccessRole.ADMIN, "cluster"))
        bound_to = check_fingerprint(here.fingerprint("victim").upper())
        await edge.store.add_token(edge.digest("app"), "app", "", certificate_sha256=bound_to)
        await until(lambda: edge.knows("app"))
        await until(lambda: edge.guard.authorizer.grants_of("app"))
        await here.call(PULL, "victim", "app")
        for path in (PULL, WATCH):
            error = await refusal(here.call(path, "other", "app"))
            assert isinstance(error, Unauthenticated)
            assert error.message == (
                "the token of app is bound to a client certificate, and this connection has "
                "another one"
            )
        (listed,) = (await edge.store.all())["app"].tokens
        assert listed.certificate_sha256 == bound_to


async def test_bound_token_without_a_certificate_is_refused(
    etcd: EtcdSession, tmp_path: Path
) -> None:
    async with over_tls(etcd, tmp_path, certificates=False) as here:
        edge = here.edge
        edge.tokens["app"] = "secret-of-app"
        await edge.store.add_token(edge.digest("app"), "app", "", certificate_sha256="ab" * 32)
        await until(lambda: edge.knows("app"))
        error = await refusal(here.call(PULL, "victim", "app"))
        assert isinstance(error, Unauthenticated)
        assert error.message.endswith("and this connection has none")


# ---- tokens of an OIDC issuer


@asynccontextmanager
async def with_issuer(
    etcd: EtcdSession, folder: Path
) -> AsyncIterator[tuple[TlsScene, Issuer, Document, OidcTokens]]:
    clock = Clock()
    issuer = Issuer(clock)
    issuer.add_key("one")
    source = Document(issuer.document(), 20, 20)
    tokens = tokens_of(source, clock, leeway_ms=0)
    async with over_tls(etcd, folder, oidc=tokens) as here, asyncio.TaskGroup() as tasks:
        following = tasks.create_task(tokens.keys.run())
        await here.edge.store.grant("oidc:alice", Grant(AccessRole.ADMIN, "cluster"))
        await until(lambda: here.edge.guard.authorizer.grants_of("oidc:alice"))
        await until(lambda: source.reads)
        yield here, issuer, source, tokens
        following.cancel()


async def test_token_of_the_issuer_has_the_grants_of_its_identity(
    etcd: EtcdSession, tmp_path: Path
) -> None:
    async with with_issuer(etcd, tmp_path) as (here, issuer, _, _):
        here.edge.tokens |= {
            "alice": issuer.token(),
            "bob": issuer.token(sub="bob"),
            "late": issuer.token(exp=1),
        }
        await here.call(PULL, "other", "alice")
        error = await refusal(here.call(PULL, "other", "bob"))
        assert error.facts["identity"] == "oidc:bob"
        read = len(here.edge.read)
        error = await refusal(here.call(PULL, "other", "late"))
        assert "expired" in error.message
        assert len(here.edge.read) == read, "the request was read"


@pytest.mark.parametrize("path", [PULL, WATCH])
@pytest.mark.parametrize("end", ["expiry", "key", "block"])
async def test_open_call_ends_when_the_token_of_the_issuer_does(
    etcd: EtcdSession, tmp_path: Path, path: str, end: str
) -> None:
    async with with_issuer(etcd, tmp_path) as (here, issuer, source, _):
        edge = here.edge
        edge.holds.add(path)
        now_s = issuer.clock.unix_ms() / 1000
        edge.tokens["alice"] = issuer.token(exp=now_s + (3 if end == "expiry" else 600))
        async with asyncio.TaskGroup() as tasks:
            ending = tasks.create_task(refusal(here.call(path, "other", "alice")))
            await until(lambda: edge.served)
            if end == "key":
                issuer.add_key("one")
                source.document = issuer.document()
            elif end == "block":
                await here.block("identity:oidc:alice")
            async with asyncio.timeout(ENDS_S + 3):
                error = await ending
        assert isinstance(error, Unauthenticated)
        expected_text = {"expiry": "expired", "key": "no longer has", "block": "is blocked"}
        assert expected_text[end] in error.message


async def test_token_of_the_issuer_that_is_bound_needs_its_certificate(
    etcd: EtcdSession, tmp_path: Path
) -> None:
    async with with_issuer(etcd, tmp_path) as (here, issuer, _, _):
        thumbprint = base64.urlsafe_b64encode(bytes.fromhex(here.fingerprint("other"))).decode()
        confirmation = {"x5t#S256": thumbprint.rstrip("=")}
        here.edge.tokens["alice"] = issuer.token(cnf=confirmation)
        await here.call(PULL, "other", "alice")
        error = await refusal(here.call(PULL, "victim", "alice"))
        assert "is bound to a client certificate" in error.message


async def test_certificate_with_the_prefix_of_the_issuer_is_refused(
    etcd: EtcdSession, tmp_path: Path
) -> None:
    async with with_issuer(etcd, tmp_path) as (here, _, _, _):
        subject = CertificateSubject(name="thief", uri="oidc:alice")
        security = CertificateAuthority(tmp_path).issue(subject)
        async with connector(security)(here.edge.address) as channel:
            request = request_of(METHODS[PULL])
            error = await refusal(here.edge.call(PULL, request, "", channel))
        assert isinstance(error, Unauthenticated)
        assert "has the prefix of the OIDC issuer's identities" in error.message
