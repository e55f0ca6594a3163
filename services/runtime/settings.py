"""Settings that every service has."""

from __future__ import annotations

import ipaddress
from typing import Literal, Self

from pydantic import Field, model_validator

from batonmq._connection.security import Security
from batonmq._process.config import Settings

_ADDRESS = r"^([^,\s]+:\d+)?$"


class ServiceSettings(Settings):
    """Read from BATON_<SERVICE>_<NAME> and the file BATON_<SERVICE>_CONFIG_FILE names."""

    cluster: str = Field("baton", pattern=r"^[A-Za-z0-9_-]{1,63}$")
    """Cluster the process belongs to; part of every key in etcd."""
    node_id: str = Field(pattern=r"^[a-z0-9-]{1,63}$")
    """Name of the process, unique within its service; for storage, the broker name."""
    host: str = "127.0.0.1"
    """Address the gRPC and metrics servers bind to."""
    port: int = Field(0, ge=0, le=65_535)
    """Port of the gRPC server; 0 takes a free one."""
    advertise_address: str = ""
    """host:port at which others reach the gRPC server; empty means host:port as bound."""
    outside_address: str = Field("", pattern=_ADDRESS)
    """host:port at which clients outside the services' network reach it; empty if they reach it as
    others do. Who asks a nameserver at its own outside address is given those of all nodes."""
    health_port: int = Field(0, ge=0, le=65_535)
    """Port that answers health checks only, without TLS, from the very start; 0 for none."""
    metrics_port: int = Field(0, ge=0, le=65_535)
    """Port of the Prometheus endpoint; 0 takes a free one."""
    tls_cert_file: str = ""
    """PEM file of the process's certificate, with those that lead to an authority after it; shown
    to clients and to other services. Empty: no TLS."""
    tls_key_file: str = ""
    """PEM file of its key, without a passphrase."""
    tls_ca_file: str = ""
    """PEM file of the authorities whose certificates are trusted, of clients and of services."""
    tls_require_client_cert: bool = True
    """Whether clients, other services among them, need a certificate. If not, none is asked for,
    and only tokens tell who calls."""
    token_file: str = ""
    """File of the token that the process shows to other services; empty for none. Over TLS only."""
    insecure_network: bool = False
    """Whether `host` may be an address that others reach although there is no TLS: whoever reaches
    it can read and write everything, and so can who listens on the way."""
    etcd: str = Field("127.0.0.1:2379", pattern=r"^[^,]+:\d+(,[^,]+:\d+)*$")
    """host:port of etcd; of several members separated by commas."""
    etcd_ca_file: str = ""
    """PEM file of the authorities whose certificates are trusted of etcd. Empty: no TLS to etcd."""
    etcd_cert_file: str = ""
    """PEM file of the certificate that is shown to etcd; empty for none."""
    etcd_key_file: str = ""
    """PEM file of its key, without a passphrase."""
    access: bool = False
    """Whether callers have to prove who they are, and may do only what is granted to them."""
    access_admins: str = ""
    """Identities that may do everything, whatever is granted; several separated by commas."""
    node_lease_ms: int = Field(5_000, ge=2_000)
    """A process that is silent for so long is no longer listed, in milliseconds."""
    metrics_stream: bool = True
    """Whether what the process does is published to the topic BATON_SYS_METRICS; at a nameserver,
    also whether it creates that topic and BATON_SYS_ALERTS."""
    metrics_encoding: Literal["protobuf", "arrow"] = "protobuf"
    """How: `arrow` is read faster by Spark, and needs the package pyarrow."""
    shutdown_grace_ms: int = Field(10_000, ge=0)
    """How long calls under way may take to end after SIGTERM, in milliseconds."""

    @model_validator(mode="after")
    def _tells_all_of_tls(self) -> Self:
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ValueError("tls_cert_file and tls_key_file go together")
        if bool(self.etcd_cert_file) != bool(self.etcd_key_file):
            raise ValueError("etcd_cert_file and etcd_key_file go together")
        if self.etcd_cert_file and not self.etcd_ca_file:
            raise ValueError("etcd_cert_file needs etcd_ca_file: whom to trust")
        if (self.tls_ca_file or self.token_file) and not self.tls_cert_file:
            raise ValueError("tls_ca_file and token_file need tls_cert_file: there is no TLS")
        if self.access and not self.tls_cert_file:
            raise ValueError("access needs tls_cert_file: without TLS nothing proves who calls")
        if self.tls_cert_file and self.tls_require_client_cert and not self.tls_ca_file:
            raise ValueError("tls_require_client_cert needs tls_ca_file: whose certificates")
        return self

    @model_validator(mode="after")
    def _keeps_to_itself_without_tls(self) -> Self:
        if not (self.tls_cert_file or self.insecure_network or self.on_loopback):
            raise ValueError(
                f"host {self.host} can be reached from other machines, and there is no TLS: set "
                "tls_cert_file, tls_key_file and tls_ca_file; or host to 127.0.0.1; or "
                "insecure_network to true if whoever reaches it may read and write everything"
            )
        return self

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine reaches `host`, for all that its name tells."""
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def security(self) -> Security | None:
        """How other services are called; None without TLS."""
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
        """How etcd is called; None without TLS."""
        if not self.etcd_ca_file:
            return None
        return Security(
            ca_file=self.etcd_ca_file, cert_file=self.etcd_cert_file, key_file=self.etcd_key_file
        )
