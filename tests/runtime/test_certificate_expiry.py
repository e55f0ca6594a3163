"""Goal: the expiry time of every kind of certificate is read correctly, or not at all.

Method: certificates of the authority of local clusters, with known dates, and of openssl.
"""

from __future__ import annotations

import base64
import math
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from batonmq._common.clock import Clock
from batonmq._process.config import load
from batonmq_server.local.certificates import CertificateAuthority, CertificateSubject
from batonmq_server.runtime.certificate_expiry import expiry_unix_s
from batonmq_server.runtime.settings import ServiceSettings
from batonmq_server.runtime.tls import check_files, export_expiry

NAME = "baton_tls_certificate_expiry_timestamp_seconds"
DAY_S = 86_400


def settings(**values: str) -> ServiceSettings:
    env = {f"BATON_N_{name.upper()}": value for name, value in values.items()}
    return load(ServiceSettings, "BATON_N", {"BATON_N_NODE_ID": "n-0", **env})


def exported(registry: CollectorRegistry) -> dict[str, float]:
    (family,) = (f for f in registry.collect() if f.name == NAME)
    return {sample.labels["certificate"]: sample.value for sample in family.samples}


def openssl(*words: str) -> str:
    done = subprocess.run(["openssl", *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.parametrize("days", [-1, 1, 365, 20_000, 40_000])  # two-digit and four-digit years
def test_expiry_time_is_exact_to_the_second(tmp_path: Path, days: int) -> None:
    before_s = Clock().unix_ms() // 1000
    security = CertificateAuthority(tmp_path).issue(CertificateSubject(name="carol"), days=days)
    expiry_s = expiry_unix_s(Path(security.cert_file).read_bytes())
    assert expiry_s is not None
    assert before_s <= expiry_s - days * DAY_S <= Clock().unix_ms() / 1000


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
def test_expiry_time_is_that_of_openssl(tmp_path: Path) -> None:
    cert = tmp_path / "cert.pem"
    subject = ("-days", "77", "-subj", "/CN=long")
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject,
            "-keyout", str(tmp_path / "key.pem"), "-out", str(cert))  # fmt: skip
    end_date = openssl("x509", "-in", str(cert), "-noout", "-enddate")
    end = datetime.strptime(end_date, "notAfter=%b %d %H:%M:%S %Y GMT").replace(tzinfo=UTC)
    assert expiry_unix_s(cert.read_bytes()) == end.timestamp()


def test_earliest_expiry_of_several_certificates_counts(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path)
    pems = [
        Path(authority.issue(CertificateSubject(name=f"s{days}"), days=days).cert_file).read_bytes()
        for days in (30, 3, 300)
    ]
    assert expiry_unix_s(b"".join(pems)) == expiry_unix_s(pems[1])


@pytest.mark.parametrize(
    "pem",
    [
        b"",
        b"no certificate",
        b"-----BEGIN CERTIFICATE-----\n????\n-----END CERTIFICATE-----",
        b"-----BEGIN CERTIFICATE-----\n"
        + base64.b64encode(b"\x30\x82\x01\x00\x30")
        + b"\n-----END CERTIFICATE-----",
    ],
)
def test_file_without_a_certificate_has_no_expiry_time(pem: bytes) -> None:
    assert expiry_unix_s(pem) is None


def test_metric_follows_the_files_and_keeps_the_last_usable_ones(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path)
    own = authority.issue(CertificateSubject(name="node", hosts=("localhost",)), days=10)
    told_of = settings(
        tls_cert_file=own.cert_file,
        tls_key_file=own.key_file,
        tls_ca_file=own.ca_file,
        etcd_ca_file=own.ca_file,
    )
    export_expiry(told_of, registry := CollectorRegistry())
    first = exported(registry)
    assert set(first) == {"service", "authority", "etcd_authority"}
    assert first["etcd_authority"] == first["authority"] > first["service"]
    authority.issue(CertificateSubject(name="node", hosts=("localhost",)), days=20)
    later = exported(registry)
    assert later["service"] - first["service"] >= 9 * DAY_S
    Path(own.cert_file).write_text("half a certificate")
    assert exported(registry) == later


def test_unreadable_expiry_time_is_nan(tmp_path: Path) -> None:
    own = CertificateAuthority(tmp_path).issue(
        CertificateSubject(name="node", hosts=("localhost",)), days=10
    )
    authority = Path(own.ca_file)
    authority.write_text(authority.read_text().replace(" CERTIFICATE", " X509 CERTIFICATE"))
    told_of = settings(
        tls_cert_file=own.cert_file, tls_key_file=own.key_file, tls_ca_file=own.ca_file
    )
    check_files(told_of)
    export_expiry(told_of, registry := CollectorRegistry())
    assert math.isnan(exported(registry)["authority"])
    assert exported(registry)["service"] > 0


def test_without_tls_there_are_no_series() -> None:
    export_expiry(settings(), registry := CollectorRegistry())
    assert exported(registry) == {}
