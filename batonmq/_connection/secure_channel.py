"""A TLS channel that uses new certificates once their files are replaced.

gRPC reads certificates when a channel is made. A `SecureChannel` therefore makes another gRPC
channel when the certificates change. Later calls use the new channel; calls in flight end on the
channel on which they started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import grpc
import grpc.aio

from batonmq._connection.security import CredentialFiles, Pems, Security
from batonmq._connection.wrapped_channel import WrappedChannel

CHECK_INTERVAL_S = 1.0
"""Interval at which calls check the files for changes."""

Options = Sequence[tuple[str, int | str]]


class ChannelIdentity:
    """Certificates and token of a client, shared by all of its channels.

    Raises:
        InvalidArgument: A file can't be read or used.
    """

    def __init__(self, security: Security) -> None:
        self._files = CredentialFiles(security)
        self._next_check_s = 0.0
        self.server_name = security.server_name

    @property
    def pems(self) -> Pems:
        """The certificates: the same object until they change."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._next_check_s:
            self._next_check_s = now_s + CHECK_INTERVAL_S
            self._files.renew()
        return self._files.pems

    def credentials(self) -> tuple[Pems, str]:
        """Return what new calls identify themselves with: certificates and token."""
        return self.pems, self._files.token

    def with_token(self, metadata: Sequence[tuple[str, Any]] | None) -> Sequence[tuple[str, Any]]:
        """Return the metadata of a call with the token, if there is one."""
        token = self._files.token
        metadata = metadata or ()
        return (*metadata, ("authorization", f"Bearer {token}")) if token else metadata


class SecureChannel(WrappedChannel):
    """Channel to `host:port`; must be made in the event loop in which it is used."""

    def __init__(self, address: str, identity: ChannelIdentity, options: Options) -> None:
        self._identity = identity
        self._address, self._options = address, list(options)
        if identity.server_name:
            self._options.append(("grpc.ssl_target_name_override", identity.server_name))
        self._all: WeakSet[grpc.aio.Channel] = WeakSet()
        self._make(identity.pems)

    def current(self) -> grpc.aio.Channel:
        """Return the gRPC channel for calls that start now."""
        pems = self._identity.pems
        if pems is not self._pems:
            self._make(pems)
        return self._channel

    def method(self, path: str, make: Callable[[grpc.aio.Channel], Any]) -> Any:
        """Return the callable of an RPC, made once for each gRPC channel."""
        self.current()
        multicallable = self._methods.get(path)
        if multicallable is None:
            multicallable = self._methods[path] = make(self._channel)
        return multicallable

    def _make(self, pems: Pems) -> None:
        credentials = grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)
        self._pems, self._methods = pems, dict[str, Any]()
        self._channel = grpc.aio.secure_channel(self._address, credentials, self._options)
        self._all.add(self._channel)

    async def close(self, grace: float | None = None) -> None:
        """Close all gRPC channels; calls in flight end."""
        for channel in list(self._all):
            await channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the state of the gRPC channel for calls that start now."""
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the connection is in another state."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until there is a connection."""
        await self.current().channel_ready()

    def unary_unary(self, method: str, *args: Any, **given: Any) -> Any:
        """As in `grpc.aio.Channel`."""
        return self._forward(method, lambda to: to.unary_unary(method, *args, **given))

    def unary_stream(self, method: str, *args: Any, **given: Any) -> Any:
        """As in `grpc.aio.Channel`."""
        return self._forward(method, lambda to: to.unary_stream(method, *args, **given))

    def stream_unary(self, method: str, *args: Any, **given: Any) -> Any:
        """As in `grpc.aio.Channel`."""
        return self._forward(method, lambda to: to.stream_unary(method, *args, **given))

    def stream_stream(self, method: str, *args: Any, **given: Any) -> Any:
        """As in `grpc.aio.Channel`."""
        return self._forward(method, lambda to: to.stream_stream(method, *args, **given))

    def _forward(self, path: str, make: Callable[[grpc.aio.Channel], Any]) -> Callable[..., Any]:
        """Return a callable that chooses the gRPC channel at each call."""

        def call(
            *request: Any, metadata: Sequence[tuple[str, Any]] | None = None, **options: Any
        ) -> Any:
            method = self.method(path, make)
            call_in_flight = method(
                *request, metadata=self._identity.with_token(metadata), **options
            )
            # Without this reference the channel may be collected, which ends its calls.
            call_in_flight.channel_in_use = self._channel
            return call_in_flight

        return call
