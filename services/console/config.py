"""Settings of the console."""

from __future__ import annotations

import ipaddress
from typing import Self

from pydantic import Field, model_validator

from batonmq._connection.security import Security
from batonmq._process.config import Settings

PREFIX = "BATON_CONSOLE"


class ConsoleSettings(Settings):
    """Read from BATON_CONSOLE_<NAME> and the file named by BATON_CONSOLE_CONFIG_FILE."""

    nameserver: str = Field("127.0.0.1:9876", pattern=r"^[^,\s]+:\d+(,[^,\s]+:\d+)*$")
    """host:port of each nameserver, separated by commas."""
    host: str = "127.0.0.1"
    """Address that the web server binds to."""
    port: int = Field(9878, ge=0, le=65_535)
    """Port of the web server; 0 picks a free port."""
    allowed_hosts: str = ""
    """Host names at which browsers may call the console, separated by commas, such as
    `console.example.com`. Empty: only localhost, 127.0.0.1 and [::1]. A call with another name is
    refused, so that a page of another site can't reach the console through a name of its own."""
    tls_cert_file: str = ""
    """PEM file with the certificate that is shown to browsers. Empty: HTTP without TLS."""
    tls_key_file: str = ""
    """PEM file with the key of `tls_cert_file`, without a passphrase."""
    insecure_network: bool = False
    """Whether `host` may be reachable from other machines without TLS; tokens and cookies can then
    be read on the network."""
    ca_file: str = ""
    """PEM file with the authorities that sign the certificates of the services. Empty: no TLS to
    the services, and no sign-in."""
    cert_file: str = ""
    """PEM file with the certificate that is shown to the services; empty: none. A call with the
    token of a person counts as a call of that person, not of this certificate."""
    key_file: str = ""
    """PEM file with the key of `cert_file`, without a passphrase."""
    sign_in_key_file: str = ""
    """File with a key for the one person whose certificate is `cert_file`: a sign-in with this key
    acts as that certificate. Empty: sign-in by token only."""
    changes: bool = False
    """Whether people may change the cluster in the console, with their own grants and a reason. If
    false, the console only shows."""
    session_ms: int = Field(8 * 3_600_000, ge=60_000, le=7 * 24 * 3_600_000)
    """Time from the sign-in until a person has to sign in again, in milliseconds."""
    refresh_ms: int = Field(2_000, ge=500, le=60_000)
    """Time between two reads of the cluster while a page is open, in milliseconds."""
    viewers_max: int = Field(200, ge=1, le=10_000)
    """Maximum number of open pages that are updated; further pages show their state at loading."""
    prometheus: str = Field("", pattern=r"^(https?://\S+)?$")
    """URL of a Prometheus that has the alert rules. Empty: alerts come from the diagnosis of the
    groups and the state of the nodes."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ValueError("tls_cert_file and tls_key_file go together")
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("cert_file and key_file go together")
        if (self.cert_file or self.sign_in_key_file) and not self.ca_file:
            raise ValueError(
                "cert_file and sign_in_key_file need ca_file: without it there is no TLS"
            )
        if self.sign_in_key_file and not self.cert_file:
            raise ValueError("sign_in_key_file needs cert_file: the certificate that it stands for")
        if not (self.tls_cert_file or self.insecure_network or self.on_loopback):
            raise ValueError(
                f"host {self.host} can be reached from other machines, and there is no TLS: set "
                "tls_cert_file and tls_key_file; or host to 127.0.0.1; or insecure_network to true "
                "if traffic may be read on that network"
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
    def hosts(self) -> frozenset[str]:
        """Names under which browsers may call, without port."""
        named = {name.strip().lower() for name in self.allowed_hosts.split(",") if name.strip()}
        return frozenset(named or {"localhost", "127.0.0.1", "[::1]"})

    @property
    def security(self) -> Security | None:
        """TLS settings of the console's own calls; None without TLS."""
        if not self.ca_file:
            return None
        return Security(ca_file=self.ca_file, cert_file=self.cert_file, key_file=self.key_file)
