"""A channel over TLS that goes on when the files it was made from are replaced.

gRPC reads certificates when a channel is made. So this one makes another when there are others:
calls that begin later use it; those under way end on the connection on which they began.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import grpc
import grpc.aio

from batonmq._connection.security import CredentialFiles, Pems, Security

LOOK_INTERVAL_S = 1.0
"""How often the files are looked at, while there are calls."""

Options = Sequence[tuple[str, int | str]]


class ChannelIdentity:
    """Who all channels of one client say they are, and whom they trust.

    Raises:
        InvalidArgument: a file can't be used.
    """

    def __init__(self, security: Security) -> None:
        self._papers = CredentialFiles(security)
        self._next_look_s = 0.0
        self.server_name = security.server_name

    @property
    def pems(self) -> Pems:
        """The same object until there are others."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_INTERVAL_S
            self._papers.renew()
        return self._papers.pems

    def signed(self, metadata: Sequence[tuple[str, Any]] | None) -> Sequence[tuple[str, Any]]:
        """Metadata of a call, with the token if there is one."""
        token = self._papers.token
        given = metadata or ()
        return (*given, ("authorization", f"Bearer {token}")) if token else given


class SecureChannel(grpc.aio.Channel):
    """To `host:port`; made in the event loop that it is used in."""

    def __init__(self, address: str, identity: ChannelIdentity, options: Options) -> None:
        self._identity = identity
        self._address, self._options = address, list(options)
        if identity.server_name:
            self._options.append(("grpc.ssl_target_name_override", identity.server_name))
        self._all: WeakSet[grpc.aio.Channel] = WeakSet()
        self._make(identity.pems)

    def present(self) -> grpc.aio.Channel:
        """The channel for what begins now."""
        pems = self._identity.pems
        if pems is not self._pems:
            self._make(pems)
        return self._channel

    def method(self, path: str, make: Callable[[grpc.aio.Channel], Any]) -> Any:
        """What calls an RPC now, made once for each channel."""
        self.present()
        found = self._methods.get(path)
        if found is None:
            found = self._methods[path] = make(self._channel)
        return found

    def _make(self, pems: Pems) -> None:
        credentials = grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)
        self._pems, self._methods = pems, dict[str, Any]()
        self._channel = grpc.aio.secure_channel(self._address, credentials, self._options)
        self._all.add(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """End it; calls under way end, too."""
        for channel in list(self._all):
            await channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Of the connection for what begins now."""
        return self.present().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Until the connection is in another state."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Until there is a connection."""
        await self.present().channel_ready()

    def unary_unary(self, method: str, *args: Any, **given: Any) -> Any:
        """See grpc.aio."""
        return self._stand_in(method, lambda to: to.unary_unary(method, *args, **given))

    def unary_stream(self, method: str, *args: Any, **given: Any) -> Any:
        """See grpc.aio."""
        return self._stand_in(method, lambda to: to.unary_stream(method, *args, **given))

    def stream_unary(self, method: str, *args: Any, **given: Any) -> Any:
        """See grpc.aio."""
        return self._stand_in(method, lambda to: to.stream_unary(method, *args, **given))

    def stream_stream(self, method: str, *args: Any, **given: Any) -> Any:
        """See grpc.aio."""
        return self._stand_in(method, lambda to: to.stream_stream(method, *args, **given))

    def _stand_in(self, path: str, make: Callable[[grpc.aio.Channel], Any]) -> Callable[..., Any]:
        """Finds out at each call which connection is the present one."""

        def call(
            *request: Any, metadata: Sequence[tuple[str, Any]] | None = None, **options: Any
        ) -> Any:
            method = self.method(path, make)
            under_way = method(*request, metadata=self._identity.signed(metadata), **options)
            # A channel that nobody holds is closed, and with it all that is under way.
            under_way.channel_in_use = self._channel
            return under_way

        return call
