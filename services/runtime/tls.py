"""The server's side of TLS: its certificate, whether clients have to show one, when it ends."""

from __future__ import annotations

import logging
import math
from functools import partial

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry, Gauge

from batonmq._connection.security import CredentialFiles, Pems, Security
from batonmq._process.config import ConfigError, ConfigProblem
from batonmq.errors import InvalidArgument
from batonmq_server.runtime.certificate_expiry import expiry_unix_s
from batonmq_server.runtime.settings import ServiceSettings

log = logging.getLogger(__name__)


def check_files(settings: ServiceSettings) -> None:
    """Read the files that the settings name.

    Raises:
        ConfigError: one can't be used.
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


def show_expiry(settings: ServiceSettings, registry: CollectorRegistry) -> None:
    """Let Prometheus know when certificates end: those of connections that are made now."""
    gauge = Gauge(
        "baton_tls_certificate_expiry_timestamp_seconds",
        "When what proves who is who ends, as Unix time: of service, the certificate that the "
        "process shows; of authority, those it trusts; of etcd_client and etcd_authority, the same "
        "towards etcd. Of several in a file the first that ends. NaN: it can't be told.",
        ("certificate",),
        registry=registry,
    )
    for security, own, authority in (
        (settings.security, "service", "authority"),
        (settings.etcd_security, "etcd_client", "etcd_authority"),
    ):
        if security is None:
            continue
        papers = CredentialFiles(security)
        if security.cert_file:
            gauge.labels(own).set_function(partial(_expiry, papers, "cert"))
        if security.ca_file:
            gauge.labels(authority).set_function(partial(_expiry, papers, "ca"))


def _expiry(papers: CredentialFiles, name: str) -> float:
    papers.renew()
    found = expiry_unix_s(getattr(papers.pems, name))
    return math.nan if found is None else found


def listen(server: grpc.aio.Server, settings: ServiceSettings) -> int:
    """Take calls at the address of the settings, over TLS if they say so.

    Returns:
        The port.
    """
    address, security = f"{settings.host}:{settings.port}", settings.security
    if security is None:
        reach = "this network" if settings.insecure_network else "this machine, at loopback only,"
        log.warning(
            "TLS IS OFF: whoever is on %s can read and write everything host=%s",
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
    """Of a server; every new connection gets the certificate that the files hold then.

    Args:
        require_client_cert: If not, clients are not asked for one.

    Raises:
        InvalidArgument: a file can't be used.
    """
    papers = CredentialFiles(security)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Called at each handshake, in a thread of gRPC, which takes None for no change."""
        return _configuration(papers.pems) if papers.renew() else None

    return grpc.dynamic_ssl_server_credentials(
        _configuration(papers.pems),
        renewed,  # type: ignore[arg-type]
        require_client_authentication=require_client_cert,
    )


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    assert pems.key is not None
    assert pems.cert is not None
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)
