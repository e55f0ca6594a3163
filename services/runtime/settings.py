"""Settings that every service has."""

from __future__ import annotations

import ipaddress
from typing import Self

from pydantic import Field, model_validator

from batonmq._connection.security import Security
from batonmq._process.config import Settings
from batonmq_server.runtime.access.permissions import SERVICE_PREFIX

OIDC_ALGORITHMS = ("RS256", "ES256", "EdDSA")
ADDRESS = r"^([^,\s]+:\d+)?$"


def names_of(text: str) -> tuple[str, ...]:
    """Return the names in a text that separates them by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


class ServiceSettings(Settings):
    """Read from BATON_<SERVICE>_<NAME> and the file named by BATON_<SERVICE>_CONFIG_FILE."""

    cluster: str = Field("baton", pattern=r"^[A-Za-z0-9_-]{1,63}$")
    """Cluster of the process; part of every key in etcd."""
    node_id: str = Field(pattern=r"^[a-z0-9-]{1,63}$")
    """Name of the process, unique within its service; for storage also the default broker name."""
    host: str = "127.0.0.1"
    """Address that the gRPC and metrics servers bind to."""
    port: int = Field(0, ge=0, le=65_535)
    """Port of the gRPC server; 0 picks a free port."""
    advertise_address: str = ""
    """host:port at which other processes reach the gRPC server; empty: the bound address."""
    outside_address: str = Field("", pattern=ADDRESS)
    """host:port at which clients outside the services' network reach the gRPC server; empty: the
    same as other processes. A client that calls a nameserver at its outside address gets the
    outside addresses of all nodes."""
    health_port: int = Field(0, ge=0, le=65_535)
    """Port for health checks only, without TLS, open from the start of the process; 0: none."""
    metrics_port: int = Field(0, ge=0, le=65_535)
    """Port of the Prometheus endpoint; 0 picks a free port."""
    connections_max: int = Field(0, ge=0)
    """Maximum number of client connections; others are closed before their handshake. 0: as many as
    the limit of open files leaves."""
    connections_per_address_max: int = Field(0, ge=0)
    """Maximum number of client connections from one address, or from one /64 network of IPv6; the
    newest ones are closed. 0: half of all connections."""
    tls_cert_file: str = ""
    """PEM file with the certificate of the process, followed by its intermediate certificates;
    shown to clients and other services. Empty: no TLS."""
    tls_key_file: str = ""
    """PEM file with the key of `tls_cert_file`, without a passphrase."""
    tls_ca_file: str = ""
    """PEM file with the authorities that sign the certificates of clients and services."""
    tls_require_client_cert: bool = True
    """Whether clients and other services must show a certificate. If false, none is requested, and
    callers are identified by tokens only."""
    token_file: str = ""
    """File with the token that the process sends to other services over TLS; empty: none."""
    insecure_network: bool = False
    """Whether `host` may be reachable from other machines without TLS. Every program that reaches
    it can then read and write everything, and traffic can be read on the network."""
    etcd: str = Field("127.0.0.1:2379", pattern=r"^[^,]+:\d+(,[^,]+:\d+)*$")
    """host:port of each member of etcd, separated by commas."""
    etcd_ca_file: str = ""
    """PEM file with the authorities that sign etcd's certificates. Empty: no TLS to etcd."""
    etcd_cert_file: str = ""
    """PEM file with the certificate that is shown to etcd; empty: none."""
    etcd_key_file: str = ""
    """PEM file with the key of `etcd_cert_file`, without a passphrase."""
    access: bool = False
    """Whether callers must authenticate and need a grant for each call."""
    access_admins: str = ""
    """Identities with the role admin on the cluster without a grant, separated by commas."""
    oidc_issuer: str = ""
    """OIDC issuer whose tokens are accepted, as in their claim `iss`; empty: none. It needs
    `access`, `oidc_audience`, and `oidc_jwks_file` or `oidc_jwks_url`."""
    oidc_audience: str = ""
    """Audiences, separated by commas; the claim `aud` must have one of them."""
    oidc_jwks_file: str = ""
    """File with the public keys of the issuer, as a JWK set; read again when it changes."""
    oidc_jwks_url: str = Field("", pattern=r"^(https://\S+)?$")
    """https URL of the public keys of the issuer, as a JWK set."""
    oidc_ca_file: str = ""
    """PEM file with the authorities that sign the certificate of `oidc_jwks_url`; empty: those of
    the system."""
    oidc_identity_claim: str = Field("sub", min_length=1)
    """Claim with the name of the identity."""
    oidc_identity_prefix: str = Field("oidc:", pattern=r"^[a-z][a-z0-9+.-]{0,62}:$")
    """Prefix of the identity, before the name from the claim. A certificate whose identity begins
    with it is refused."""
    oidc_algorithms: str = "RS256,ES256,EdDSA"
    """Accepted signature algorithms, separated by commas: RS256, ES256 and EdDSA."""
    oidc_leeway_ms: int = Field(30_000, ge=0, le=300_000)
    """Tolerated difference between the clocks of the issuer and the process, in milliseconds."""
    oidc_refresh_ms: int = Field(300_000, ge=1_000)
    """Time between two reads of `oidc_jwks_url`, in milliseconds; a token with an unknown key
    causes a read earlier, at most every 10 s."""
    oidc_stale_ms_max: int = Field(24 * 3_600_000, ge=60_000)
    """Time after the last successful read of the keys for which they are used, in milliseconds."""
    audit_file: str = ""
    """File for the audit log: refused calls and calls that need the role admin, as JSON lines;
    empty: none. It needs `access`."""
    audit_bytes_max: int = Field(64 * 1024 * 1024, ge=64 * 1024)
    """Maximum size of the audit log in bytes, over its five files."""
    node_lease_ms: int = Field(5_000, ge=2_000)
    """Lease of the node's entry in etcd, in milliseconds; a dead node stays listed for this
    time."""
    metrics_stream: bool = True
    """Whether the process publishes its events to the topic BATON_SYS_METRICS; at a nameserver,
    also whether it creates that topic and BATON_SYS_ALERTS."""
    shutdown_grace_ms: int = Field(10_000, ge=0)
    """Time that calls in progress have to end after SIGTERM, in milliseconds."""

    @model_validator(mode="after")
    def _check_tls_files(self) -> Self:
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ValueError("tls_cert_file and tls_key_file go together")
        if bool(self.etcd_cert_file) != bool(self.etcd_key_file):
            raise ValueError("etcd_cert_file and etcd_key_file go together")
        if self.etcd_cert_file and not self.etcd_ca_file:
            raise ValueError("etcd_cert_file needs etcd_ca_file")
        if (self.tls_ca_file or self.token_file) and not self.tls_cert_file:
            raise ValueError(
                "tls_ca_file and token_file need tls_cert_file: without it there is no TLS"
            )
        if self.access and not self.tls_cert_file:
            raise ValueError(
                "access needs tls_cert_file: without TLS callers can't be authenticated"
            )
        if self.tls_cert_file and self.tls_require_client_cert and not self.tls_ca_file:
            raise ValueError(
                "tls_require_client_cert needs tls_ca_file: the authorities of the certificates"
            )
        return self

    @model_validator(mode="after")
    def _check_oidc(self) -> Self:
        if not self.oidc_issuer:
            if self.oidc_audience or self.oidc_jwks_file or self.oidc_jwks_url:
                raise ValueError("oidc_audience, oidc_jwks_file and oidc_jwks_url need oidc_issuer")
            return self
        if not self.access:
            raise ValueError("oidc_issuer needs access: without it no caller is authenticated")
        if not names_of(self.oidc_audience):
            raise ValueError("oidc_issuer needs oidc_audience: the name of this cluster in tokens")
        if bool(self.oidc_jwks_file) == bool(self.oidc_jwks_url):
            raise ValueError("oidc_issuer needs either oidc_jwks_file or oidc_jwks_url")
        if self.oidc_identity_prefix == SERVICE_PREFIX:
            raise ValueError(
                f"oidc_identity_prefix must not be {SERVICE_PREFIX}, the prefix of services"
            )
        unknown = set(names_of(self.oidc_algorithms)) - set(OIDC_ALGORITHMS)
        if unknown or not names_of(self.oidc_algorithms):
            raise ValueError(
                f"oidc_algorithms must be some of {', '.join(OIDC_ALGORITHMS)}, got "
                f"{self.oidc_algorithms!r}"
            )
        return self

    @model_validator(mode="after")
    def _check_host_without_tls(self) -> Self:
        if not (self.tls_cert_file or self.insecure_network or self.on_loopback):
            raise ValueError(
                f"host {self.host} can be reached from other machines, and there is no TLS: set "
                "tls_cert_file, tls_key_file and tls_ca_file; or host to 127.0.0.1; or "
                "insecure_network to true if every program there may read and write everything"
            )
        return self

    @property
    def on_loopback(self) -> bool:
        """Whether `host` is a loopback address, judged by its name."""
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def security(self) -> Security | None:
        """TLS settings for calls to other services; None without TLS."""
        if not self.tls_cert_file:
            return None
        return Security(
            ca_file=self.tls_ca_file,
            cert_file=self.tls_cert_file,
            key_file=self.tls_key_file,
            token_file=self.token_file,
        )

    @property
    def etcd_security(self) -> Security | None:
        """TLS settings for calls to etcd; None without TLS."""
        if not self.etcd_ca_file:
            return None
        return Security(
            ca_file=self.etcd_ca_file, cert_file=self.etcd_cert_file, key_file=self.etcd_key_file
        )
