"""gRPC options of servers: limits on what a connection may cost."""

from __future__ import annotations

from batonmq._connection.channels import OPTIONS

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *OPTIONS,
    # A port that another process serves on is an error, not something to share.
    ("grpc.so_reuseport", 0),
    # Close a connection with a longer handshake.
    ("grpc.server_handshake_timeout_ms", 20_000),
    # Close a connection without calls: gRPC pings only those with calls. Clients connect again.
    ("grpc.max_connection_idle_ms", 60_000),
)
HEALTH_OPTIONS: tuple[tuple[str, int], ...] = tuple(
    {
        **dict(SERVER_OPTIONS),
        "grpc.max_receive_message_length": 1_024,
        "grpc.max_metadata_size": 8_192,
        "grpc.absolute_max_metadata_size": 8_192,
        "grpc.max_concurrent_streams": 100,
        "grpc.server.max_pending_requests": 1_000,
        "grpc.server.max_pending_requests_hard_limit": 1_000,
    }.items()
)
"""Options of the port that answers health checks only, without authentication."""
