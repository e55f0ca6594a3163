"""Channels to services: one set of options for everybody."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import grpc.aio

from batonmq._connection.secure_channel import ChannelIdentity, Options, SecureChannel
from batonmq._connection.security import Security

MESSAGE_BYTES_MAX = 40 * 1024 * 1024
"""Largest request or response: 32 MiB of batches and room around them."""
METADATA_BYTES_MAX = 1024 * 1024
"""Largest error detail: 64 topics on which two subscriptions differ are about 400 KiB."""
PENDING_CALLS_MAX = 200_000
"""Calls that have reached a server, and that its loop has not taken yet. Left alone gRPC drops some
of more than 1,000 as CANCELLED, and a few thousand consumers that come back at once are normal."""

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.server.max_pending_requests", PENDING_CALLS_MAX),
    ("grpc.server.max_pending_requests_hard_limit", PENDING_CALLS_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # So long may it take to connect, TLS included: a peer that is far away, or busy, is there.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    # A process that comes back under its name may have another address: 30 s by itself.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # A peer that died without a word, its cable cut, is found out within 5 s by every call to it,
    # also by one that may be held for long; servers take such pings as often as they come.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_500),
    ("grpc.http2.ping_timeout_ms", 2_500),  # left alone a minute, whatever the line above says
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    # Who has not called for 30 to 60 s lets go, and looks the name up anew for the next call; a
    # server closes after 60 s, of which gRPC would tell everybody's standard error.
    ("grpc.client_idle_timeout_ms", 30_000),
    ("grpc.use_local_subchannel_pool", 1),
)


Connect = Callable[[str], grpc.aio.Channel]
"""Makes a channel to `host:port`, which connects, and connects again, by itself."""


def connect(address: str, options: Options = OPTIONS) -> grpc.aio.Channel:
    """A channel without TLS."""
    return grpc.aio.insecure_channel(address, options=options)


def connector(security: Security | None, options: Options = OPTIONS) -> Connect:
    """Makes channels over TLS; without it if there is no `security`.

    Raises:
        InvalidArgument: a file can't be used.
    """
    if security is None:
        return partial(connect, options=options)
    identity = ChannelIdentity(security)
    return lambda address: SecureChannel(address, identity, options)
