"""Every call of every contract behind the real edge, with grants and tokens in a real etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from batonmq._common.clock import Clock
from batonmq._connection.channels import OPTIONS, connector
from batonmq._connection.security import Security
from batonmq.errors import BatonError, Unauthenticated
from batonmq_server.gateway.access import OPERATORS_RULES as GATEWAY
from batonmq_server.lockmgr.access import RULES as LOCKMGR
from batonmq_server.nameserver.access import RULES as NAMESERVER
from batonmq_server.nameserver.access_store import AccessStore
from batonmq_server.nameserver.compare_and_swap import CompareAndSwap
from batonmq_server.offsets.access import RULES as OFFSETS
from batonmq_server.runtime.access.guard import Guard
from batonmq_server.runtime.access.oidc import OidcTokens
from batonmq_server.runtime.access.permissions import AccessRole, Grant
from batonmq_server.runtime.access.rules import COMMON_RULES, AccessRules
from batonmq_server.runtime.access.stored_access import digest_of
from batonmq_server.runtime.call_streams import ServerWithCalls
from batonmq_server.runtime.connection_pauser import ConnectionPauser
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.health import Health
from batonmq_server.runtime.interceptor import EdgeInterceptor
from batonmq_server.runtime.tls import server_credentials
from batonmq_server.storage.access import RULES as STORAGE
from tests.storage.batches import batch
from tests.support.conditions import until
from tests.test_contracts import SERVICES

ALL: AccessRules = {**STORAGE, **OFFSETS, **LOCKMGR, **NAMESERVER, **GATEWAY, **COMMON_RULES}
TOPIC, GROUP = "orders", "readers"
TIMEOUT_S = 30
Call = Callable[[Any, Any], Awaitable[Any]]


def request_of(method: MethodDescriptor, topic: str = TOPIC, group: str = GROUP) -> Message:
    """Return a request that names the topic and the group in every field for one."""
    made = GetMessageClass(method.input_type)()
    _fill(made, topic, group)
    return made


def _fill(message: Message, topic: str, group: str) -> None:
    for one in message.DESCRIPTOR.fields:
        repeated = one.is_repeated
        values = getattr(message, one.name)
        if one.message_type is not None:
            _fill(values.add() if repeated else values, topic, group)
        elif one.name == "topic":
            setattr(message, one.name, topic)
        elif one.name.endswith("group"):
            setattr(message, one.name, group)
        elif one.type == FieldDescriptor.TYPE_BYTES and one.name.startswith("batch"):
            if repeated:
                values.append(batch(b"body", topic=topic))
            else:
                setattr(message, one.name, batch(b"body", topic=topic))


@dataclass
class Scene:
    """The server, and the identities that it knows.

    Attributes:
        read: Full paths of the calls with a parsed request.
        served: Full paths of the calls that reached a servicer, with their requests.
        holds: Calls of these paths end only when they are cancelled.
        fails: Errors that the servicers of these paths raise.
        repeats: Responses that the streams of these paths send until they are cancelled.
        address: host:port of the server.
    """

    guard: Guard
    store: AccessStore
    registry: CollectorRegistry
    channel: grpc.aio.Channel = field(init=False)
    read: list[str] = field(default_factory=list)
    served: list[tuple[str, Any]] = field(default_factory=list)
    holds: set[str] = field(default_factory=set)
    fails: dict[str, BatonError] = field(default_factory=dict)
    repeats: dict[str, Message] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    address: str = ""

    async def know(self, identity: str, *grants: tuple[str, str]) -> None:
        """Give an identity a token and grants, and wait until the guard has them."""
        self.tokens[identity] = f"secret-{identity.encode().hex()}"
        for role, resource in grants:
            await self.store.grant(identity, Grant(AccessRole(role), resource))
        await self.store.add_token(self.digest(identity), identity, "")
        held = {Grant(AccessRole(role), resource) for role, resource in grants}
        await until(
            lambda: held <= self.guard.authorizer.grants_of(identity) and self.knows(identity)
        )

    def knows(self, identity: str) -> bool:
        """Return whether the guard accepts the token of an identity."""
        try:
            return self.guard.authorizer.token_of(self.digest(identity), 0).identity == identity
        except Unauthenticated:
            return False

    def digest(self, identity: str) -> str:
        """Return the digest of an identity's token."""
        return digest_of(self.tokens[identity])

    def metadata(self, identity: str) -> list[tuple[str, str]]:
        """Return the metadata of a call by an identity; an empty identity sends none."""
        token = self.tokens.get(identity, identity and f"{identity} is no token")
        return [("authorization", f"Bearer {token}")] if token else []

    async def call(
        self, path: str, request: Message, identity: str, channel: grpc.aio.Channel | None = None
    ) -> Any:
        """Return the answer, or the first one of a stream; raises AioRpcError.

        Args:
            channel: Another channel than that of the scene.
        """
        method, channel = METHODS[path], channel or self.channel
        codec = (lambda m: m.SerializeToString(), GetMessageClass(method.output_type).FromString)
        metadata = self.metadata(identity)
        if method.server_streaming:
            # Also a stream of one request: the same on the wire as `stream_stream`, whose write may
            # lose the status of a refused call: https://github.com/grpc/grpc/issues/36066
            stream = channel.unary_stream(path, *codec)
            call = stream(request, metadata=metadata, timeout=TIMEOUT_S)
            async for answer in call:
                call.cancel()
                return answer
            return None
        unary = channel.unary_unary(path, *codec)
        return await unary(request, metadata=metadata, timeout=TIMEOUT_S)

    def refused_count(self, service: str, reason: str) -> float:
        labels = {"service": service, "reason": reason}
        return self.registry.get_sample_value("baton_access_refused_total", labels) or 0


CALL_SERVICE = "baton.calls.v1.CallService"
"""Its servicer is the real one, which makes calls of the others: see test_call_stream_access.py."""


def _methods() -> Iterator[tuple[str, MethodDescriptor]]:
    for service in SERVICES:
        for method in service.methods:
            if service.full_name != CALL_SERVICE:
                yield f"/{service.full_name}/{method.name}", method


METHODS: Mapping[str, MethodDescriptor] = dict(_methods())


@asynccontextmanager
async def scene(
    etcd: EtcdSession,
    *long_polls: str,
    rules: AccessRules = ALL,
    certificates: bool = True,
    tls: Security | None = None,
    oidc: OidcTokens | None = None,
    pauser: ConnectionPauser | None = None,
) -> AsyncIterator[Scene]:
    """A server with servicers of all contracts, health and reflection.

    Args:
        long_polls: Names of the methods that are long polls.
        certificates: Whether clients must show a certificate.
        tls: Certificate of the server, for `localhost`; None for no TLS.
        oidc: The tokens of an OIDC issuer.
        pauser: Pauses the connections of callers that ignore their quotas.
    """
    registry = CollectorRegistry()
    guard = Guard(etcd, registry, on=True, admins=["root"], certificates=certificates, oidc=oidc)
    guard.add_rules(rules)
    made = Scene(guard, AccessStore(etcd, CompareAndSwap(etcd.random)), registry)
    pauser = pauser or ConnectionPauser(registry)
    edge = EdgeInterceptor(Clock(), registry, frozenset(long_polls), guard, pauser.pause)
    server = grpc.aio.server(interceptors=[edge], options=OPTIONS)
    recording: Any = _RecordingServer(server, made.read)
    ServerWithCalls(server, edge)
    for service in SERVICES:
        if service.full_name == CALL_SERVICE:
            continue
        servicer = _servicer(made, service)
        recording.add_generic_rpc_handlers((servicer,))
        edge.handlers.update(_by_path(service, _RecordingHandler(servicer, made.read)))
    checks = Health()
    await checks.set_serving(())
    checks.add(recording)
    contracts = reflection.aio.ReflectionServicer([reflection.SERVICE_NAME])
    add_reflection: Any = reflection_pb2_grpc.add_ServerReflectionServicer_to_server
    add_reflection(contracts, recording)
    if tls is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        credentials = server_credentials(tls, require_client_cert=certificates)
        port = server.add_secure_port("localhost:0", credentials)
    await server.start()
    made.address = f"{'127.0.0.1' if tls is None else 'localhost'}:{port}"
    async with asyncio.TaskGroup() as tasks, connector(tls)(made.address) as channel:
        made.channel = channel
        following = tasks.create_task(guard.mirror.run())
        pausing = tasks.create_task(pauser.run([port]))
        await guard.mirror.ready()
        try:
            yield made
        finally:
            await server.stop(None)
            following.cancel()
            pausing.cancel()


class _RecordingServer:
    """Wraps a server for the functions that add servicers; parsed calls are appended to `read`."""

    def __init__(self, server: grpc.aio.Server, read: list[str]) -> None:
        self._server, self._read = server, read

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Add the handlers, and record each parsed request."""
        self._server.add_generic_rpc_handlers(
            [_RecordingHandler(one, self._read) for one in handlers]
        )

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Ignore them: they are the generic ones again."""


class _RecordingHandler(grpc.GenericRpcHandler):
    def __init__(self, of: grpc.GenericRpcHandler, read: list[str]) -> None:
        self._of, self._read = of, read

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler: Any = self._of.service(handler_call_details)
        if handler is None:
            return None

        def parse(sent: bytes) -> Any:
            self._read.append(handler_call_details.method)
            return handler.request_deserializer(sent)

        return handler._replace(request_deserializer=parse)


def _by_path(
    service: ServiceDescriptor, handlers: grpc.GenericRpcHandler
) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """Return the handlers of a service, for streams of calls."""
    found: dict[str, Any] = {}
    for method in service.methods:
        details: Any = SimpleNamespace(method=f"/{service.full_name}/{method.name}")
        found[details.method] = handlers.service(details)
    return found


def _servicer(made: Scene, service: ServiceDescriptor) -> grpc.GenericRpcHandler:
    return grpc.method_handlers_generic_handler(
        service.full_name,
        {method.name: _handler(made, service, method) for method in service.methods},
    )


def _handler(
    made: Scene, service: ServiceDescriptor, method: MethodDescriptor
) -> grpc.RpcMethodHandler[Any, Any]:
    path, kind = f"/{service.full_name}/{method.name}", GetMessageClass(method.output_type)

    async def answer(request: Any) -> Any:
        made.served.append((path, request))
        if path in made.fails:
            raise made.fails[path]
        if path in made.holds:
            await asyncio.Event().wait()
        answered: Any = kind()
        if method.name in ("Append", "Schedule"):  # one outcome for each item
            for _ in getattr(request, "batches", ()) or getattr(request, "items", ()):
                answered.outcomes.add()
        return answered

    async def unary(request: Any, context: Any) -> Any:
        return await answer(request)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        yield await answer(request)

    async def duplex(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            yield await answer(request)
            while path in made.repeats:
                yield made.repeats[path]

    codec = (GetMessageClass(method.input_type).FromString, kind.SerializeToString)
    if method.client_streaming:
        return grpc.stream_stream_rpc_method_handler(duplex, *codec)
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(stream, *codec)
    return grpc.unary_unary_rpc_method_handler(unary, *codec)
