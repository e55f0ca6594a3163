"""What operators see of a gateway, and ask its remote clients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from heapq import nsmallest
from typing import Any

from apache.rocketmq.v2 import definition_pb2 as remote_pb
from baton.common.v1 import queue_pb2
from baton.gateway.v1 import gateway_service_pb2 as pb
from baton.gateway.v1 import gateway_service_pb2_grpc as pb_grpc
from batonmq._common.clock import Clock
from batonmq._core.names import check_group
from batonmq._core.queues import QueueRef
from batonmq_server.gateway.clients import RemoteClient, RemoteClients
from batonmq_server.gateway.core.message_leases import LeaseState, MessageLease
from batonmq_server.gateway.group_consumer import GroupConsumer
from batonmq_server.gateway.groups import Groups
from batonmq_server.gateway.operator_commands import (
    OperatorCommands,
    cut,
    position_of,
    question_of,
)
from batonmq_server.runtime.paging import key_of_token, malformed_token, page_of, page_size_of

SERVICE = "baton.gateway.v1.GatewayService"
GROUPS_MAX = 64
"""Groups of one client in an answer, at most."""
_KINDS = {
    remote_pb.PRODUCER: pb.CLIENT_KIND_PRODUCER,
    remote_pb.PUSH_CONSUMER: pb.CLIENT_KIND_PUSH_CONSUMER,
    remote_pb.SIMPLE_CONSUMER: pb.CLIENT_KIND_SIMPLE_CONSUMER,
    remote_pb.PULL_CONSUMER: pb.CLIENT_KIND_PULL_CONSUMER,
}
_STATES = {
    LeaseState.WAITING: pb.HELD_STATE_WAITING,
    LeaseState.READY: pb.HELD_STATE_READY,
    LeaseState.LEASED: pb.HELD_STATE_LEASED,
    LeaseState.ENDING: pb.HELD_STATE_ENDING,
}
_Key = tuple[QueueRef, int]
"""A queue and an offset."""


class GatewayServicer(pb_grpc.GatewayServiceServicer):
    """Serves `baton.gateway.v1.GatewayService`."""

    def __init__(
        self,
        clients: RemoteClients,
        groups: Groups,
        clock: Clock,
        commands: OperatorCommands,
    ) -> None:
        self._clients, self._groups, self._clock = clients, groups, clock
        self._commands = commands

    async def ListClients(
        self, request: pb.ListClientsRequest, context: Any
    ) -> pb.ListClientsResponse:
        """See the proto."""
        group = check_group(request.group) if request.group else ""
        after = key_of_token(request.page_token)
        member = self._groups.find(group) if group else None
        groups = [one for one in self._groups if not group or one is member]
        names = self._names(group, member)
        chosen = nsmallest(
            page_size_of(request.page_size) + 1,
            (name for name in names if name > after and request.client_id in ("", name)),
        )
        held = _held_by(groups, set(chosen))
        now_ms = self._clock.monotonic_ms()
        entries = ((name, self._described(name, held.get(name), now_ms)) for name in chosen)
        page = page_of(entries, request.page_size)
        return pb.ListClientsResponse(
            clients=page.entries,
            next_page_token=page.next_page_token,
            member_client_id=member.member_id if member else "",
        )

    async def ListHeldMessages(
        self, request: pb.ListHeldMessagesRequest, context: Any
    ) -> pb.ListHeldMessagesResponse:
        """See the proto."""
        group = self._groups.find(check_group(request.group))
        after = _key_of(request.page_token)
        if group is None:
            return pb.ListHeldMessagesResponse()
        queue = None
        if request.HasField("queue"):
            named = request.queue
            queue = QueueRef(named.topic, named.broker, named.queue_id)
        messages = _messages(group, queue, request.client_id, after)
        page = page_of(self._held_messages(messages), request.page_size)
        return pb.ListHeldMessagesResponse(
            messages=page.entries,
            next_page_token=page.next_page_token,
            member_client_id=group.member_id,
            waiting_call_count=group.waiting_count,
        )

    async def VerifyMessage(
        self, request: pb.VerifyMessageRequest, context: Any
    ) -> pb.VerifyMessageResponse:
        """See the proto."""
        group = check_group(request.group)
        question = question_of(request.client_id, group, context.time_remaining())
        queue, offset = position_of(request)
        begin_ms = self._clock.monotonic_ms()
        outcome, text = await self._commands.verify(question, queue, offset)
        took_ms = self._clock.monotonic_ms() - begin_ms
        return pb.VerifyMessageResponse(outcome=outcome, text=text, took_ms=took_ms)

    async def GetStackTraces(
        self, request: pb.GetStackTracesRequest, context: Any
    ) -> pb.GetStackTracesResponse:
        """See the proto."""
        question = question_of(request.client_id, request.group, context.time_remaining())
        begin_ms = self._clock.monotonic_ms()
        text, cut_bytes = cut(await self._commands.stack_traces(question))
        took_ms = self._clock.monotonic_ms() - begin_ms
        return pb.GetStackTracesResponse(text=text, cut_bytes=cut_bytes, took_ms=took_ms)

    def _names(self, group: str, member: GroupConsumer | None) -> Iterable[str]:
        """Return the clients of a group, or all; also those of which only messages are known."""
        if not group:
            return self._clients
        holders = {
            name for _, leases in (member.leases() if member else ()) for name in leases.leased
        }
        return holders.union(
            name
            for name in self._clients
            if (client := self._clients.find(name)) is not None and group in client.groups
        )

    def _described(
        self, client_id: str, held: tuple[int, int] | None, now_ms: int
    ) -> pb.RemoteClient:
        """Return a client with what it holds: the number, and when the oldest delivery began."""
        client = self._clients.find(client_id)
        answer = self._named(client_id, client)
        answer.in_flight_count = held[0] if held else 0
        answer.oldest_lease_ms = now_ms - held[1] if held else -1
        if client is not None:
            answer.groups.extend(sorted(client.groups)[:GROUPS_MAX])
        return answer

    def _named(self, client_id: str, client: RemoteClient | None) -> pb.RemoteClient:
        if client is None:
            return pb.RemoteClient(client_id=client_id, silent_ms=-1)
        return pb.RemoteClient(
            client_id=client_id,
            language=client.language,
            version=client.version,
            host=client.host,
            kind=_KINDS.get(client.kind, pb.CLIENT_KIND_UNSPECIFIED),
            namespace=client.namespace,
            identity=client.identity,
            silent_ms=self._clients.silent_ms(client),
            open_call_count=client.connections.open_calls,
        )

    def _held_messages(
        self, messages: Iterable[tuple[QueueRef, MessageLease]]
    ) -> Iterator[tuple[str, pb.HeldMessage]]:
        now_ms = self._clock.monotonic_ms()
        for ref, message in messages:
            entry = pb.HeldMessage(
                queue=queue_pb2.QueueRef(topic=ref.topic, broker=ref.broker, queue_id=ref.queue_id),
                offset=message.offset,
                state=_STATES[message.state],
                attempt=message.attempt,
                message_group=message.message_group,
            )
            if message.state is LeaseState.LEASED and message.terms is not None:
                client_id = message.terms.client_id
                entry.client.CopyFrom(self._named(client_id, self._clients.find(client_id)))
                entry.held_ms = now_ms - message.begin_ms
                entry.lease_left_ms = max(0, message.expires_ms - now_ms)
                entry.renewed = message.terms.renewed
            yield f"{ref.topic}/{ref.broker}/{ref.queue_id}/{message.offset}", entry


def _held_by(groups: Iterable[GroupConsumer], wanted: set[str]) -> dict[str, tuple[int, int]]:
    """Return how many messages each client holds, and when the oldest delivery of them began."""
    found: dict[str, tuple[int, int]] = {}
    for group in groups:
        for _, leases in group.leases():
            for client_id in wanted & leases.leased.keys():
                held = leases.leased[client_id]
                oldest_ms = next(iter(held.values())).begin_ms
                count, before_ms = found.get(client_id, (0, oldest_ms))
                found[client_id] = count + len(held), min(before_ms, oldest_ms)
    return found


def _messages(
    group: GroupConsumer, queue: QueueRef | None, client_id: str, after: _Key | None
) -> Iterator[tuple[QueueRef, MessageLease]]:
    """Yield the messages of a group by queue and offset, from the one behind `after` on."""
    parts = defaultdict(list)
    for ref, leases in group.leases():
        if queue in (None, ref) and (after is None or ref >= after[0]):
            parts[ref].append(leases)
    for ref in sorted(parts):
        every = (message for leases in parts[ref] for message in leases.messages(client_id))
        for message in sorted(every, key=lambda one: one.offset):
            if after is None or (ref, message.offset) > after:
                yield ref, message


def _key_of(page_token: str) -> _Key | None:
    """Return the key after which a page starts; None for the first page.

    Raises:
        InvalidArgument: The token is malformed.
    """
    encoded = key_of_token(page_token)
    if not encoded:
        return None
    match encoded.split("/"):
        case [topic, broker, queue_id, offset] if queue_id.isdecimal() and offset.isdecimal():
            return QueueRef(topic, broker, int(queue_id)), int(offset)
    raise malformed_token(page_token)
