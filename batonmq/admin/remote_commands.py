"""Commands to one remote client behind a gateway: consume a message, send stack traces."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import grpc.aio

from baton.gateway.v1 import gateway_service_pb2 as pb
from baton.gateway.v1 import gateway_service_pb2_grpc as gateway_grpc
from batonmq._common.rpc import from_rpc_error
from batonmq._core.queues import QueueRef
from batonmq.admin.admin import Admin
from batonmq.admin.remote_clients import RemoteClients
from batonmq.admin.reports import queue_to_pb
from batonmq.errors import InvalidArgument, RemoteClientNotFound, Unreachable

COMMAND_TIMEOUT_S = 10.0
TIMEOUT_S_MAX = 60.0
VerifyOutcome = Literal["consumed", "failed", "corrupted"]
_Answer = TypeVar("_Answer")
_OUTCOMES: dict[int, VerifyOutcome] = {
    pb.VERIFY_OUTCOME_CONSUMED: "consumed",
    pb.VERIFY_OUTCOME_FAILED: "failed",
    pb.VERIFY_OUTCOME_CORRUPTED: "corrupted",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageVerification:
    """What a remote client says of a message that it was to consume.

    Attributes:
        gateway: Node id of the gateway that asked the client.
        outcome: consumed: its listener has consumed the message. failed: its listener has failed.
            corrupted: the client could not read the message.
        text: What the client adds; empty for most clients.
        took_ms: Time from the command to the answer.
    """

    gateway: str
    client_id: str
    queue: QueueRef
    offset: int
    outcome: VerifyOutcome
    text: str
    took_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StackTraces:
    """The stack traces of a remote client.

    Attributes:
        gateway: Node id of the gateway that asked the client.
        text: As the library of the client writes them; at most 1 MiB.
        cut_bytes: Bytes that were cut off behind that.
        took_ms: Time from the command to the answer.
    """

    gateway: str
    client_id: str
    text: str
    cut_bytes: int
    took_ms: int


class RemoteCommands:
    """Asks remote clients through the gateway that has the client's telemetry stream.

    A command is sent once: if its outcome is unknown, it is not repeated.

    Args:
        admin: Client of the cluster; the caller closes it.
        timeout_s: Time that the client has, at most 60 s.
    """

    def __init__(self, admin: Admin, *, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        if not 0 < timeout_s <= TIMEOUT_S_MAX:
            raise InvalidArgument(
                f"timeout_s must be greater than 0 and at most {TIMEOUT_S_MAX:g}, got {timeout_s}",
                facts={"field": "timeout_s"},
            )
        self._admin, self._timeout_s = admin, timeout_s

    async def verify_message(
        self, group: str, client_id: str, queue: QueueRef, offset: int
    ) -> MessageVerification:
        """Let the listener of a push consumer consume a stored message, once.

        The message is not held or acknowledged by that: the progress of the group stays as it is.

        Args:
            queue: Of a topic that the group subscribes to, or of a retry or dead letter topic.

        Raises:
            RemoteClientNotFound: No gateway has a telemetry stream of the client.
            RemoteCommandUnsupported: It is no push consumer, or its library can't do this.
            NotMember, NotSubscribed: The client does not consume for the group, or the group not
                from the topic.
            RemoteClientSilent: It has not answered in time. Its listener may have run.
        """
        request = pb.VerifyMessageRequest(
            group=group, client_id=client_id, queue=queue_to_pb(queue), offset=offset
        )
        gateway, answer = await self._ask(
            client_id, group, lambda stub, limit_s: stub.VerifyMessage(request, timeout=limit_s)
        )
        return MessageVerification(
            gateway=gateway,
            client_id=client_id,
            queue=queue,
            offset=offset,
            outcome=_OUTCOMES[answer.outcome],
            text=answer.text,
            took_ms=answer.took_ms,
        )

    async def stack_traces(self, client_id: str, group: str = "") -> StackTraces:
        """Return the stack traces of a client.

        Args:
            group: A group that the client consumes for; empty for any client, which needs the role
                admin of the cluster.

        Raises:
            RemoteClientNotFound: No gateway has a telemetry stream of the client.
            RemoteCommandUnsupported: Its library can't do this.
            NotMember: The client does not consume for the group.
            RemoteClientSilent: It has not answered in time.
        """
        request = pb.GetStackTracesRequest(client_id=client_id, group=group)
        gateway, answer = await self._ask(
            client_id, group, lambda stub, limit_s: stub.GetStackTraces(request, timeout=limit_s)
        )
        return StackTraces(
            gateway=gateway,
            client_id=client_id,
            text=answer.text,
            cut_bytes=answer.cut_bytes,
            took_ms=answer.took_ms,
        )

    async def _ask(
        self,
        client_id: str,
        group: str,
        ask: Callable[[gateway_grpc.GatewayServiceAsyncStub, float], Awaitable[_Answer]],
    ) -> tuple[str, _Answer]:
        """Ask the gateways that know the client, until one has its stream."""
        report = await RemoteClients(self._admin).clients(group, client_id=client_id)
        # A client with calls open first: a gateway that it has left has none.
        known = sorted(report.clients, key=lambda client: not client.open_call_count)
        for client in known:
            stub = self._admin.directory.gateway(client.gateway)
            try:
                return client.gateway, await ask(stub, self._timeout_s + 0.5)
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error)
                if not isinstance(failure, RemoteClientNotFound):
                    raise failure from error
        if report.problems:
            raise Unreachable(
                f"no gateway that answers has client {client_id}: {'; '.join(report.problems)}"
            )
        raise RemoteClientNotFound(
            f"no gateway has a telemetry stream of client {client_id}"
            + (f" of group {group}" if group else ""),
            facts={"client_id": client_id},
        )
