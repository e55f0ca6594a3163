"""The servicer of the contract behind access control: refusals are answers, as the contract wants.

Each call is authenticated and authorized for the identity of its remote client, counted for its
quota, and ended when a permission or its credentials are revoked.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from apache.rocketmq.v2 import definition_pb2 as pb
from apache.rocketmq.v2 import service_pb2, service_pb2_grpc
from batonmq.errors import BatonError
from batonmq_server.gateway.access import METHODS, RemoteCall, settings_permissions
from batonmq_server.gateway.callers import IDENTITY, Caller, Context
from batonmq_server.gateway.client_settings import SETTINGS_BYTES_MAX
from batonmq_server.gateway.clients import RemoteClients
from batonmq_server.gateway.metrics import GatewayMetrics
from batonmq_server.gateway.remote_access import RemoteAccess, RemoteIdentity
from batonmq_server.gateway.statuses import Refused, check_size, status_of
from batonmq_server.runtime.access.permissions import ANY_GRANT, Permission

_STREAMS = ("ReceiveMessage", "PullMessage")
_TELEMETRY = "Telemetry"


class GuardedServicer:
    """Admits calls to another servicer.

    Args:
        inner: Serves the calls that are admitted.
        clients: Knows which identity a client id belongs to.
    """

    def __init__(
        self,
        inner: service_pb2_grpc.MessagingServiceServicer,
        access: RemoteAccess,
        clients: RemoteClients,
        metrics: GatewayMetrics,
    ) -> None:
        self._access, self._clients, self._metrics = access, clients, metrics
        for name in METHODS:
            call = getattr(inner, name)
            answer = getattr(service_pb2, f"{name}Response", service_pb2.TelemetryCommand)
            if name == _TELEMETRY:
                guarded = self._telemetry(call)
            elif name in _STREAMS:
                guarded = self._stream(name, call, answer)
            else:
                guarded = self._unary(name, call, answer)
            setattr(self, name, guarded)

    def _unary(self, name: str, call: Any, answer: Callable[..., Any]) -> Any:
        async def guarded(request: Any, context: Context) -> Any:
            try:
                remote, _ = self._admit(name, request, context)
                traffic = await self._access.begin(name, remote, request, context)
            except (Refused, BatonError) as error:
                return answer(status=self._refusal(name, error, context))
            try:
                return await call(request, context)
            finally:
                if traffic is not None:
                    self._access.end(remote, traffic, 0)

        return guarded

    def _stream(self, name: str, call: Any, answer: Callable[..., Any]) -> Any:
        async def guarded(request: Any, context: Context) -> AsyncGenerator[Any, None]:
            try:
                remote, permissions = self._admit(name, request, context)
                traffic = await self._access.begin(name, remote, request, context)
            except (Refused, BatonError) as error:
                yield answer(status=self._refusal(name, error, context))
                return
            bytes_read = 0
            try:
                with self._access.until_revoked(name, remote, permissions) as opened:
                    async with aclosing(opened.items(call(request, context))) as frames:
                        async for frame in frames:
                            if traffic is not None:
                                bytes_read += frame.ByteSize()
                            yield frame
            except BatonError as error:
                yield answer(status=self._count(name, error, context))
            finally:
                if traffic is not None:
                    self._access.end(remote, traffic, bytes_read)

        return guarded

    def _telemetry(self, call: Any) -> Any:
        async def guarded(
            requests: AsyncIterator[service_pb2.TelemetryCommand], context: Context
        ) -> AsyncGenerator[service_pb2.TelemetryCommand, None]:
            command = service_pb2.TelemetryCommand
            try:
                remote, _ = self._admit(_TELEMETRY, None, context)
            except (Refused, BatonError) as error:
                yield command(status=self._refusal(_TELEMETRY, error, context))
                return
            settings = _CheckedSettings(Caller.of(context), remote, self._access)
            try:
                with self._access.until_revoked(_TELEMETRY, remote, settings.permissions) as opened:
                    served = call(settings.checked(requests), context)
                    async with aclosing(opened.items(served)) as commands:
                        async for one in commands:
                            yield one
            except BatonError as error:
                yield command(status=self._count(_TELEMETRY, error, context))
                return
            if settings.refusal is not None:
                yield command(status=self._refusal(_TELEMETRY, settings.refusal, context))

        return guarded

    def _admit(
        self, name: str, request: Any, context: Context
    ) -> tuple[RemoteIdentity, list[Permission]]:
        """Return the client of a call and the permissions that it requires.

        Raises:
            Refused, BatonError: The call is refused.
        """
        remote = self._access.identify(context)
        identity = remote.caller.identity
        IDENTITY.set(identity)
        caller = Caller.of(context)
        owner = self._clients.identity_of(caller.client_id)
        if owner is not None and owner != identity:
            raise Refused(
                pb.FORBIDDEN,
                f"client id {caller.client_id} belongs to a client of another identity; use "
                "another client id",
            )
        permissions = list(self._access.permissions(name, RemoteCall(caller, request)))
        self._access.require(name, remote, permissions)
        return remote, permissions

    def _refusal(self, name: str, error: Refused | BatonError, context: Context) -> pb.Status:
        """Count and audit a refusal; return its status."""
        self._access.count_refusal(name, error, IDENTITY.get())
        return self._count(name, error, context)

    def _count(self, name: str, error: Refused | BatonError, context: Context) -> pb.Status:
        status = status_of(error)
        try:
            language = Caller.of(context).language
        except Refused:
            language = "OTHER"
        self._metrics.answered(name, language, status.code)
        return status


class _CheckedSettings:
    """Passes on the commands of a telemetry stream whose settings are permitted.

    Attributes:
        permissions: Those that the stream requires up to now.
        refusal: Why the stream ended; None if its client ended it.
    """

    def __init__(self, caller: Caller, remote: RemoteIdentity, access: RemoteAccess) -> None:
        self._caller, self._remote, self._access = caller, remote, access
        self.permissions: list[Permission] = [ANY_GRANT]
        self.refusal: Refused | BatonError | None = None

    async def checked(
        self, requests: AsyncIterator[service_pb2.TelemetryCommand]
    ) -> AsyncIterator[service_pb2.TelemetryCommand]:
        """Yield the commands until the settings of one are refused."""
        async for command in requests:
            if command.WhichOneof("command") == "settings":
                try:
                    check_size(command.settings, SETTINGS_BYTES_MAX)
                    wanted = list(settings_permissions(self._caller, command.settings))
                    self._access.require(_TELEMETRY, self._remote, wanted)
                except (Refused, BatonError) as error:
                    self.refusal = error
                    return
                self.permissions[:] = [ANY_GRANT, *wanted]
            yield command
