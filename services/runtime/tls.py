"""TLS of the server: its certificate, client certificates, and expiry times."""

from __future__ import annotations

import logging
import math
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry

from batonmq._connection.security import CredentialFiles, Pems, Security
from batonmq._process.config import ConfigError, ConfigProblem
from batonmq.errors import InvalidArgument
from batonmq_server.runtime.access.oidc_keys import parse_keys
from batonmq_server.runtime.certificate_expiry import expiry_unix_s
from batonmq_server.runtime.metrics import certificate_expiry
from batonmq_server.runtime.settings import ServiceSettings

log = logging.getLogger(__name__)


def check_files(settings: ServiceSettings) -> None:
    """Read the files of certificates, keys and tokens in the settings; open the audit log.

    Raises:
        ConfigError: a file can't be used.
    """
    for name, security in (
        ("tls_cert_file", settings.security),
        ("etcd_ca_file", settings.etcd_security),
    ):
        if security is not None:
            try:
                CredentialFiles(security)
            except InvalidArgument as error:
                text = f"{error.message}. {error.remedy}"
                raise ConfigError(ConfigProblem(name, text)) from error
    if settings.oidc_jwks_file:
        try:
            parse_keys(Path(settings.oidc_jwks_file).read_bytes())
        except (OSError, ValueError) as error:
            text = f"oidc_jwks_file: {error}"
            raise ConfigError(ConfigProblem("oidc_jwks_file", text)) from error
    if settings.oidc_ca_file:
        try:
            ssl.create_default_context(cafile=settings.oidc_ca_file)
        except OSError as error:
            text = f"oidc_ca_file: {settings.oidc_ca_file}: {error}"
            raise ConfigError(ConfigProblem("oidc_ca_file", text)) from error
    if settings.audit_file:
        try:
            Path(settings.audit_file).open("a").close()
        except OSError as error:
            raise ConfigError(ConfigProblem("audit_file", f"audit_file: {error}")) from error


def certificate_expiries(settings: ServiceSettings) -> dict[str, Callable[[], float]]:
    """Return what reads the expiry time of the certificates that new connections use.

    Returns:
        By certificate: `service`, `authority`, `etcd_client` or `etcd_authority`. The times are
        Unix seconds; NaN if the time can't be read.
    """
    expiries: dict[str, Callable[[], float]] = {}
    for security, own, authority in (
        (settings.security, "service", "authority"),
        (settings.etcd_security, "etcd_client", "etcd_authority"),
    ):
        if security is None:
            continue
        files = CredentialFiles(security)
        if security.cert_file:
            expiries[own] = partial(_expiry, files, "cert")
        if security.ca_file:
            expiries[authority] = partial(_expiry, files, "ca")
    return expiries


def export_expiry(
    settings: ServiceSettings, registry: CollectorRegistry
) -> dict[str, Callable[[], float]]:
    """Export the expiry times of certificates; return what reads them."""
    gauge, expiries = certificate_expiry(registry), certificate_expiries(settings)
    for name, read in expiries.items():
        gauge.labels(name).set_function(read)
    return expiries


def _expiry(files: CredentialFiles, name: str) -> float:
    files.renew()
    expiry_s = expiry_unix_s(getattr(files.pems, name))
    return math.nan if expiry_s is None else expiry_s


def listen(server: grpc.aio.Server, settings: ServiceSettings) -> int:
    """Bind the server to the address of the settings, with TLS if they have a certificate.

    Returns:
        The port.
    """
    address, security = f"{settings.host}:{settings.port}", settings.security
    if security is None:
        reach = "this network" if settings.insecure_network else "this machine (loopback only)"
        log.warning(
            "TLS IS OFF: every program on %s can read and write everything host=%s",
            reach,
            settings.host,
        )
        return server.add_insecure_port(address)
    required = settings.tls_require_client_cert
    credentials = server_credentials(security, require_client_cert=required)
    return server.add_secure_port(address, credentials)


def server_credentials(
    security: Security, *, require_client_cert: bool = True
) -> grpc.ServerCredentials:
    """Return credentials that give each new connection the current certificate of the files.

    Args:
        require_client_cert: Whether clients must show a certificate; if not, none is requested.

    Raises:
        InvalidArgument: a file can't be used.
    """
    files = CredentialFiles(security)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Return the new configuration, or None if nothing changed.

        gRPC calls this at each handshake, in a thread of its own.
        """
        return _configuration(files.pems) if files.renew() else None

    return grpc.dynamic_ssl_server_credentials(
        _configuration(files.pems),
        renewed,  # type: ignore[arg-type]
        require_client_authentication=require_client_cert,
    )


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    assert pems.key is not None
    assert pems.cert is not None
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)
