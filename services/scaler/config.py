"""Settings of the scaler."""

from __future__ import annotations

import ipaddress
from typing import Self

from pydantic import Field, model_validator

from batonmq._connection.security import Security
from batonmq._process.config import Settings

PREFIX = "BATON_SCALER"


class ScalerSettings(Settings):
    """Read from BATON_SCALER_<NAME> and the file named by BATON_SCALER_CONFIG_FILE."""

    nameserver: str = Field("127.0.0.1:9876", pattern=r"^[^,\s]+:\d+(,[^,\s]+:\d+)*$")
    """host:port of each nameserver, separated by commas."""
    host: str = "127.0.0.1"
    """Address that the gRPC and metrics servers bind to."""
    port: int = Field(9879, ge=0, le=65_535)
    """Port of the gRPC server, which KEDA calls; 0 picks a free port."""
    health_port: int = Field(0, ge=0, le=65_535)
    """Port for health checks only, without TLS; 0: none."""
    metrics_port: int = Field(0, ge=0, le=65_535)
    """Port of the Prometheus endpoint; 0 picks a free port."""
    tls_cert_file: str = ""
    """PEM file with the certificate of the scaler, followed by its intermediate certificates; shown
    to KEDA and to the services. Empty: no TLS."""
    tls_key_file: str = ""
    """PEM file with the key of `tls_cert_file`, without a passphrase."""
    tls_ca_file: str = ""
    """PEM file with the authorities that sign the certificates of KEDA and of the services."""
    tls_require_client_cert: bool = True
    """Whether KEDA must show a certificate of `tls_ca_file`. If false, every program that reaches
    the port can read the lag of the groups that the scaler may see."""
    token_file: str = ""
    """File with the token that the scaler sends to the services over TLS; empty: none."""
    insecure_network: bool = False
    """Whether `host` may be reachable from other machines without TLS."""
    age_ms: int = Field(1_000, ge=100, le=60_000)
    """Maximum age of a lag that answers a call, in milliseconds; an older one is read again."""
    refresh_ms: int = Field(5_000, ge=500, le=600_000)
    """Time between two reads of the group of an open stream, in milliseconds."""
    groups_max: int = Field(1_000, ge=1, le=100_000)
    """Maximum number of groups whose lag and metrics are kept. The group with the oldest last call
    is removed first."""
    streams_max: int = Field(1_000, ge=1, le=100_000)
    """Maximum number of open streams; further ones are refused."""
    shutdown_grace_ms: int = Field(5_000, ge=0)
    """Time that calls in progress have to end after SIGTERM, in milliseconds."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ValueError("tls_cert_file and tls_key_file go together")
        if (self.tls_ca_file or self.token_file) and not self.tls_cert_file:
            raise ValueError(
                "tls_ca_file and token_file need tls_cert_file: without it there is no TLS"
            )
        if self.tls_cert_file and not self.tls_ca_file:
            raise ValueError(
                "tls_cert_file needs tls_ca_file: the authorities of the services' certificates"
            )
        if not (self.tls_cert_file or self.insecure_network or self._on_loopback):
            raise ValueError(
                f"host {self.host} can be reached from other machines, and there is no TLS: set "
                "tls_cert_file, tls_key_file and tls_ca_file; or host to 127.0.0.1; or "
                "insecure_network to true if traffic may be read on that network"
            )
        return self

    @property
    def _on_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def security(self) -> Security | None:
        """TLS settings of the server and of the scaler's own calls; None without TLS."""
        if not self.tls_cert_file:
            return None
        return Security(
            ca_file=self.tls_ca_file,
            cert_file=self.tls_cert_file,
            key_file=self.tls_key_file,
            token_file=self.token_file,
        )
