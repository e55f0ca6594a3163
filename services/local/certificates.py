"""A certificate authority for clusters on one machine."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from batonmq._common.clock import Clock
from batonmq._connection.security import Security
from batonmq_server.local.private_files import write_private

AUTHORITY_DAYS = 3_650
CERTIFICATE_DAYS = 365
_BEFORE = timedelta(hours=1)
"""How long before its issue a certificate is valid, because clocks may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateSubject:
    """The subject of a certificate.

    Attributes:
        name: Common name.
        uri: Identity for grants of roles, if it is not the name.
        hosts: Names and addresses of a server; empty for a client.
    """

    name: str
    uri: str = ""
    hosts: Sequence[str] = ()


class CertificateAuthority:
    """Issues certificates into a folder: `ca.pem`, `ca.key`, and two files for each subject.

    Args:
        folder: Folder of the authority; both are created if they do not exist.
    """

    def __init__(self, folder: Path, clock: Clock | None = None) -> None:
        self.folder, self._clock = folder, clock or Clock()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.ca_file = folder / "ca.pem"
        if not self.ca_file.exists():
            self._create()
        key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key = key
        self._certificate = x509.load_pem_x509_certificate(self.ca_file.read_bytes())

    def issue(self, subject: CertificateSubject, days: float = CERTIFICATE_DAYS) -> Security:
        """Issue a certificate and its key as `NAME.pem` and `NAME.key`; existing ones are replaced.

        Args:
            days: How long the certificate is valid; negative for one that has expired already.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(subject.name, key, days).issuer_name(self._certificate.subject)
        builder = builder.add_extension(x509.BasicConstraints(False, None), True)
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if subject.hosts:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), False)
        alternatives: list[x509.GeneralName] = []
        if subject.uri:
            alternatives.append(x509.UniformResourceIdentifier(subject.uri))
        alternatives += map(_host, subject.hosts)
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), False)
        issuer = self._key.public_key()
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer)
        builder = builder.add_extension(authority, False)
        certificate = builder.sign(self._key, hashes.SHA256())
        write_private(self.folder / f"{subject.name}.key", _private(key))
        write_private(
            self.folder / f"{subject.name}.pem",
            certificate.public_bytes(serialization.Encoding.PEM),
        )
        return self.security(subject.name)

    def security(self, name: str) -> Security:
        """Return the files of a subject that has a certificate."""
        return Security(
            ca_file=str(self.ca_file),
            cert_file=str(self.folder / f"{name}.pem"),
            key_file=str(self.folder / f"{name}.key"),
        )

    def _create(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder("baton local authority", key, AUTHORITY_DAYS)
        builder = builder.issuer_name(_named("baton local authority"))
        builder = builder.add_extension(x509.BasicConstraints(True, 0), True)
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = builder.add_extension(identifier, False)
        usage = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        certificate = builder.add_extension(usage, True).sign(key, hashes.SHA256())
        write_private(self.folder / "ca.key", _private(key))
        write_private(self.ca_file, certificate.public_bytes(serialization.Encoding.PEM))

    def _builder(
        self, name: str, key: ec.EllipticCurvePrivateKey, days: float
    ) -> x509.CertificateBuilder:
        now = datetime.fromtimestamp(self._clock.unix_ms() / 1000, UTC)
        end = now + timedelta(days=days)
        return x509.CertificateBuilder(
            subject_name=_named(name),
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=min(now, end) - _BEFORE,
            not_valid_after=end,
        )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
