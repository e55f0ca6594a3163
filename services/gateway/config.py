"""Settings of the gateway."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from batonmq_server.runtime.settings import ADDRESS, ServiceSettings, names_of

PING_INTERVAL_MS = 30_000
"""How often the connections of remote clients are pinged. At the interval of the other services
1,000 clients that wait would cost several percent of a core."""


class GatewaySettings(ServiceSettings):
    """Settings from BATON_GATEWAY_<NAME>. A gateway keeps no data, so there is no directory."""

    node_id: str = Field("gateway-0", pattern=r"^[a-z0-9-]{1,63}$")
    """Name of this node, unique among the gateways."""
    receipt_key_file: str = ""
    """File with the key that signs receipt handles, at least 32 bytes, the same for all gateways.
    Empty: a random key; then a gateway knows only its own handles."""
    tls_port: int = Field(0, ge=0, le=65_535)
    """Additional port with TLS that asks for no client certificate, for clients without one, such
    as the official clients of RocketMQ 5. 0: none."""
    tls_address: str = Field("", pattern=ADDRESS)
    """host:port at which clients reach `tls_port`; empty: the host of `outside_address`,
    `advertise_address` or `host`, and this port."""
    plain_port: int = Field(0, ge=0, le=65_535)
    """Additional port without TLS, if `port` uses TLS; 0: none. It needs `insecure_network`, unless
    `host` is a loopback address. Calls with bearer tokens are refused there. Signed calls are
    accepted: a program that reads the network can repeat their signatures within
    `signature_window_ms`."""
    plain_address: str = Field("", pattern=ADDRESS)
    """host:port at which clients reach `plain_port`; empty: as with `tls_address`."""
    sealing_key_file: str = ""
    """File with the keys that seal the secrets of access keys, the same as that of the
    nameservers. Empty: no signed call is accepted."""
    signature_window_ms: int = Field(900_000, ge=1_000)
    """Maximum difference between the date of a signature and the clock of the gateway, in
    milliseconds. A signature that was read on the network can be repeated for this long."""
    signature_local_times: bool = False
    """Whether the date of a signature may be in any time zone: the RocketMQ clients of Python and
    Go send their local time. A signature can then be repeated once in each time zone."""
    consume_from: Literal["first", "last"] = "first"
    """Where a group without progress starts: at the `first` message that is kept, or after the
    `last` one. All members of a group must have the same value, native consumers too."""
    fifo_groups: str = ""
    """Groups whose push consumers work in FIFO mode, separated by commas: they retry a failed
    message themselves. Messages with a message group are delivered in order in all groups."""
    delivery_attempts_max: int = Field(17, ge=1, le=1_000)
    """Number of deliveries of a message after which it becomes a dead letter of its group."""
    invisible_ms_min: int = Field(10_000, ge=1)
    """Shortest invisible duration that a receive call may ask for, in milliseconds."""
    invisible_ms_max: int = Field(12 * 3_600_000, ge=1)
    """Longest invisible duration that a call may ask for, in milliseconds."""
    renew_ms: int = Field(60_000, ge=1_000)
    """Lease of messages with automatic renewal, in milliseconds. It is renewed for 3 hours at most,
    as long as the client is alive, and not if its answer may be lost with a connection."""
    client_timeout_ms: int = Field(30_000, ge=1_000)
    """Time without a sign of life after which a client counts as dead, in milliseconds."""
    polling_ms_max: int = Field(20_000, ge=0)
    """Longest time that a receive call waits for a message, in milliseconds."""
    in_flight_max: int = Field(10_000, ge=1, le=1_000_000)
    """Maximum number of offsets of one queue between the committed offset and the last one
    received. It bounds the messages of a queue that clients hold."""
    group_idle_ms: int = Field(60_000, ge=100)
    """The gateway leaves a group after this time without receive calls and without messages that
    clients hold, in milliseconds. Messages that clients gave back keep the group while one of its
    clients lives. A topic that no client has used for 15 times as long leaves the subscription of
    the group."""
    drain_timeout_ms: int = Field(30_000, ge=0)
    """Time that clients have to acknowledge the messages that they hold when a queue moves to
    another member or the gateway stops, in milliseconds. Other messages are redelivered at once."""

    @model_validator(mode="after")
    def _check_ports(self) -> Self:
        if (self.tls_port or self.plain_port) and not self.tls_cert_file:
            raise ValueError("tls_port and plain_port need tls_cert_file: without it, use port")
        if self.plain_port and not (self.insecure_network or self.on_loopback):
            raise ValueError(
                f"plain_port on host {self.host} can be reached from other machines: set "
                "insecure_network to true if traffic may be read on that network"
            )
        return self

    @property
    def fifo(self) -> frozenset[str]:
        """The groups of `fifo_groups`."""
        return frozenset(names_of(self.fifo_groups))
