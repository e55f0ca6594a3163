"""gRPC options of servers: limits on what a connection may cost."""

from __future__ import annotations

from batonmq._connection.channels import OPTIONS

ServerOptions = tuple[tuple[str, int], ...]

SERVER_OPTIONS: ServerOptions = (
    *OPTIONS,
    # Binding a port that another process serves on must fail; the port must not be shared.
    ("grpc.so_reuseport", 0),
    # Close a connection with a longer handshake: TLS, and the first frames of HTTP/2.
    ("grpc.server_handshake_timeout_ms", 5_000),
    # Ping connections without calls, too: a peer that does not answer is closed within 5 s. A
    # client without calls stays connected: gRPC would write a line to its standard error for each
    # connection that is closed as idle, and break a call that arrives at that moment.
    ("grpc.keepalive_permit_without_calls", 1),
)
HEALTH_OPTIONS: ServerOptions = tuple(
    {
        **dict(SERVER_OPTIONS),
        # By age, because gRPC then tells the client first. A connection that it closes as idle
        # breaks a call that arrives at that moment.
        "grpc.max_connection_age_ms": 60_000,
        "grpc.max_receive_message_length": 1_024,
        "grpc.max_metadata_size": 8_192,
        "grpc.absolute_max_metadata_size": 8_192,
        "grpc.max_concurrent_streams": 100,
        "grpc.server.max_pending_requests": 1_000,
        "grpc.server.max_pending_requests_hard_limit": 1_000,
    }.items()
)
"""Options of the port that answers health checks only, without authentication."""


def with_ping_interval(options: ServerOptions, interval_ms: int) -> ServerOptions:
    """Return `options` with another interval between pings of a connection."""
    return tuple({**dict(options), "grpc.keepalive_time_ms": interval_ms}.items())


def with_connections_max(options: ServerOptions, connections_max: int) -> ServerOptions:
    """Return `options` with a bound of the open connections; others are closed when accepted."""
    return (*options, ("grpc.max_allowed_incoming_connections", connections_max))
