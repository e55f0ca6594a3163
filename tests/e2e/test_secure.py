"""Goal: a cluster with mutual TLS works, also while all certificates are replaced.

Method: a real cluster with etcd, every connection over mutual TLS; numbered messages flow while
certificates of services, of etcd and of the clients are reissued without a restart.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import stat
from functools import partial
from pathlib import Path

import pytest

from batonmq._connection.security import Security
from batonmq.admin.admin import Admin
from batonmq_server.local.certificates import CertificateAuthority, CertificateSubject
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ADMIN, ETCD, SERVICES
from tests.e2e.numbered_traffic import QUEUES, TOPIC, NumberedTraffic
from tests.support.cluster import local_cluster
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

HOSTS = ("localhost", "127.0.0.1")
ROUND, ROUNDS = 1_500, 3


def open_to_others(folder: Path) -> None:
    folder.chmod(0o755)


def readable_by_others(folder: Path) -> list[str]:
    """Return the files and folders that another user of the machine could open."""
    return [
        f"{path.relative_to(folder)} {stat.S_IMODE(path.lstat().st_mode):o}"
        for path in (folder, *folder.rglob("*"))
        if path.lstat().st_mode & 0o077
    ]


async def test_replacing_every_certificate_loses_and_duplicates_nothing(tmp_path: Path) -> None:
    open_to_others(tmp_path)
    reports: list[str] = []
    async with local_cluster(tmp_path, secure=True, report=reports.append) as cluster:
        security = cluster.security
        assert security is not None
        async with Admin(cluster.nameserver, security=security) as admin:
            await admin.create_topic(TOPIC, QUEUES)
            traffic = NumberedTraffic(cluster.nameserver, security)
            async with traffic.running("first", count_min=ROUND):
                for _ in range(ROUNDS):
                    await until(lambda: len(traffic.handled) >= ROUND, timeout_s=60)
                    _issue_all(tmp_path / "tls")
                    await _all_show_what_the_files_hold(cluster, security, tmp_path / "tls")
                    assert (await admin.describe_topic(TOPIC)).problems == ()
                    receipt_count = len(traffic.receipts)
                    enough = partial(_has_receipts, traffic, receipt_count + ROUND)
                    await until(enough, timeout_s=60)
                # A new member reads the current files.
                traffic.join("second")
                await until(lambda: traffic.handled_by("second"), timeout_s=60)
        assert readable_by_others(tmp_path) == []
    assert reports == []
    log = (tmp_path / "logs" / "storage.log").read_text()
    assert "certificates renewed" in log
    assert "TLS IS OFF" not in log


def _issue_all(folder: Path) -> None:
    authority = CertificateAuthority(folder)
    for name in SERVICES:
        authority.issue(CertificateSubject(name=name, uri=f"service:{name}", hosts=HOSTS))
    authority.issue(CertificateSubject(name=ADMIN))
    CertificateAuthority(folder / ETCD).issue(CertificateSubject(name=ETCD, hosts=HOSTS))


async def _all_show_what_the_files_hold(
    cluster: LocalCluster, security: Security, folder: Path
) -> None:
    for name, address in cluster.addresses.items():
        own = CertificateAuthority(folder / ETCD).security(ETCD) if name == ETCD else security
        pem = Path(own.cert_file).with_name(f"{name}.pem").read_text()
        shown = await asyncio.to_thread(_shown, address, own)
        assert shown == ssl.PEM_cert_to_DER_cert(pem), name


def _shown(address: str, security: Security) -> bytes | None:
    """Return the certificate that a server presents to a new connection."""
    context = ssl.create_default_context(cafile=security.ca_file)
    context.load_cert_chain(security.cert_file, security.key_file)
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), 30) as plain,
        context.wrap_socket(plain, server_hostname=host) as secured,
    ):
        return secured.getpeercert(binary_form=True)


def _has_receipts(traffic: NumberedTraffic, count: int) -> bool:
    return len(traffic.receipts) >= count
