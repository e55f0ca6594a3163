"""gRPC channels to services, with one set of options for all clients and servers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import grpc.aio

from batonmq._connection.call_stream import StreamingChannel
from batonmq._connection.forked_process import CHANNELS
from batonmq._connection.secure_channel import ChannelIdentity, Options, SecureChannel
from batonmq._connection.security import Security

MESSAGE_BYTES_MAX = 40 * 1024 * 1024
"""Largest request or response: 32 MiB of batches and 8 MiB for everything else."""
METADATA_BYTES_MAX = 1024 * 1024
"""Largest error detail: a conflict of two subscriptions over 64 topics has about 400 KiB."""
PENDING_CALLS_MAX = 200_000
"""Calls that have reached a server and are not accepted by its event loop yet. By default gRPC
cancels some of more than 1,000, and a few thousand consumers may reconnect at once."""

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.server.max_pending_requests", PENDING_CALLS_MAX),
    ("grpc.server.max_pending_requests_hard_limit", PENDING_CALLS_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Time to connect, TLS included: a distant or busy peer needs it.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    # A restarted process may have another address under the same name; the default is 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # Every call to a peer that fails without closing its connections ends within 5 s, also a long
    # poll; servers accept such pings at any rate.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_500),
    ("grpc.http2.ping_timeout_ms", 2_500),  # 60 s by default, whatever keepalive_timeout says
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    # A client without calls for 30 to 60 s disconnects, and resolves the name again for the next
    # call. gRPC 1.85 does not do it in a channel with two calls that were 30 to 60 s apart, so no
    # server may depend on it.
    ("grpc.client_idle_timeout_ms", 30_000),
    ("grpc.use_local_subchannel_pool", 1),
)


Connect = Callable[[str], grpc.aio.Channel]
"""Returns a channel to `host:port`, which connects and reconnects by itself."""


def connect(address: str, options: Options = OPTIONS) -> grpc.aio.Channel:
    """Return a channel without TLS.

    Raises:
        ForkedProcess: gRPC does not work in this process.
    """
    CHANNELS.check()
    return StreamingChannel(grpc.aio.insecure_channel(address, options=options))


def connector(security: Security | None, options: Options = OPTIONS) -> Connect:
    """Return a function that makes channels: with TLS, or without if `security` is None.

    Raises:
        InvalidArgument: A file can't be read or used.
    """
    if security is None:
        return partial(connect, options=options)
    identity = ChannelIdentity(security)

    def connect_securely(address: str) -> grpc.aio.Channel:
        CHANNELS.check()
        return StreamingChannel(SecureChannel(address, identity, options), identity.credentials)

    return connect_securely
