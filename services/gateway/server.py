"""The calls of the RocketMQ 5 contract: translated, done, and answered with a status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from apache.rocketmq.v2 import definition_pb2 as pb
from apache.rocketmq.v2 import service_pb2, service_pb2_grpc
from batonmq._common import timeouts
from batonmq._connection.directory import Directory
from batonmq._connection.routes import query_route, queues_of
from batonmq._producer.once_sender import OnceSender
from batonmq._producer.producer import Producer
from batonmq.errors import BatonError, InvalidArgument, NotScheduled
from batonmq_server.gateway.callers import Caller, Context
from batonmq_server.gateway.client_settings import retry_ms
from batonmq_server.gateway.core.client_connections import Reception
from batonmq_server.gateway.core.long_polls import shared_wait_ms
from batonmq_server.gateway.core.message_leases import LeaseTerms
from batonmq_server.gateway.core.receipt_handles import BadHandle, ForeignHandle, ReceiptHandle
from batonmq_server.gateway.gateway_parts import GatewayParts
from batonmq_server.gateway.group_consumer import Delivery, GroupConsumer
from batonmq_server.gateway.groups import Groups
from batonmq_server.gateway.message_proto import (
    DeliveryFields,
    OutgoingMessage,
    duration_ms,
    echoed,
    outgoing,
    received,
    timestamp,
)
from batonmq_server.gateway.message_sender import RECALL, MessageSender
from batonmq_server.gateway.metrics import GatewayMetrics
from batonmq_server.gateway.ports import port_kind
from batonmq_server.gateway.queue_reader import PulledMessages, QueueReader
from batonmq_server.gateway.routes import ANY_QUEUE, Routes
from batonmq_server.gateway.statuses import OK, NotHeld, Refused, check_size, status_of
from batonmq_server.gateway.telemetry import TelemetryStream, expression_of
from batonmq_server.gateway.topic_types import TopicTypes, accepted_types
from batonmq_server.gateway.transaction_checks import TransactionChecks
from batonmq_server.gateway.transactions import Transactions

log = logging.getLogger(__name__)

MESSAGES_MAX = 1_024
"""Messages of one send or receive call, and entries of one acknowledgement, at most."""
ATTEMPT_ID_CHARACTERS_MAX = 64
"""A longer id of a receive call is ignored."""
ROUTE_REQUEST_BYTES_MAX = 16 * 1024
"""Greatest size of a request for a route: its endpoints and its topic are in each queue of the
answer."""
DEADLINE_MARGIN_S = 0.3
"""How long before the deadline of its client a call is answered."""
Answer = TypeVar("Answer", bound=Any)


class MessagingServicer(service_pb2_grpc.MessagingServiceServicer):
    """Serves remote clients. A refusal is a status in the answer, never an error of gRPC."""

    def __init__(
        self,
        parts: GatewayParts,
        groups: Groups,
        routes: Routes,
        producer: Producer,
        directory: Directory,
        metrics: GatewayMetrics,
    ) -> None:
        self._parts, self._groups, self._routes = parts, groups, routes
        self._producer, self._directory, self._metrics = producer, directory, metrics
        self._sender = MessageSender(OnceSender(directory, parts.environment, parts.spawn), parts)
        self._clock = parts.environment.clock
        self._checks = TransactionChecks(directory, parts.spawn, metrics)
        self._transactions = Transactions(producer, directory, self._clock)
        self._types = TopicTypes(directory, self._clock)
        self._reader = QueueReader(directory, parts.environment)

    # ---- where

    async def QueryRoute(
        self, request: service_pb2.QueryRouteRequest, context: Context
    ) -> service_pb2.QueryRouteResponse:
        """See the proto."""

        async def route(caller: Caller) -> service_pb2.QueryRouteResponse:
            queues = await self._queues(caller, request, context)
            return service_pb2.QueryRouteResponse(status=OK, message_queues=queues)

        return await self._answer("QueryRoute", context, route, service_pb2.QueryRouteResponse)

    async def QueryAssignment(
        self, request: service_pb2.QueryAssignmentRequest, context: Context
    ) -> service_pb2.QueryAssignmentResponse:
        """See the proto."""

        async def assign(caller: Caller) -> service_pb2.QueryAssignmentResponse:
            group = caller.group(request.group)
            queue_id = 0 if group in self._parts.settings.fifo else ANY_QUEUE
            queues = await self._queues(caller, request, context, queue_id)
            return service_pb2.QueryAssignmentResponse(
                status=OK, assignments=[pb.Assignment(message_queue=queue) for queue in queues]
            )

        return await self._answer(
            "QueryAssignment", context, assign, service_pb2.QueryAssignmentResponse
        )

    async def _queues(
        self,
        caller: Caller,
        request: service_pb2.QueryRouteRequest | service_pb2.QueryAssignmentRequest,
        context: Context,
        queue_id: int = 0,
    ) -> list[pb.MessageQueue]:
        """Return one queue per gateway; to a client that reads by itself the stored queues.

        Raises:
            TopicNotFound: The topic does not exist.
            Refused: The request is too large; or no gateway is registered yet, and the client names
                no address.
        """
        check_size(request, ROUTE_REQUEST_BYTES_MAX)
        route = await query_route(self._directory, caller.topic(request.topic))
        self._types.note(route.topic)
        topic, access_point, kind = request.topic, request.endpoints, port_kind(context)
        if self._parts.clients.reads_queues(caller.client_id):
            return self._routes.stored_queues(topic, queues_of(route), access_point, kind)
        accepted = accepted_types(route.topic)
        return self._routes.queues(topic, access_point, queue_id, kind, accepted)

    # ---- clients

    async def Heartbeat(
        self, request: service_pb2.HeartbeatRequest, context: Context
    ) -> service_pb2.HeartbeatResponse:
        """See the proto."""

        async def beat(caller: Caller) -> service_pb2.HeartbeatResponse:
            group = caller.group(request.group) if request.group.name else ""
            self._parts.clients.note(caller, group)
            return service_pb2.HeartbeatResponse(status=OK)

        return await self._answer("Heartbeat", context, beat, service_pb2.HeartbeatResponse)

    async def NotifyClientTermination(
        self, request: service_pb2.NotifyClientTerminationRequest, context: Context
    ) -> service_pb2.NotifyClientTerminationResponse:
        """See the proto."""

        async def end(caller: Caller) -> service_pb2.NotifyClientTerminationResponse:
            for name in self._parts.clients.remove(caller.client_id):
                if (group := self._groups.find(name)) is not None:
                    group.terminated(caller.client_id)
            return service_pb2.NotifyClientTerminationResponse(status=OK)

        return await self._answer(
            "NotifyClientTermination", context, end, service_pb2.NotifyClientTerminationResponse
        )

    async def Telemetry(
        self, requests: AsyncIterator[service_pb2.TelemetryCommand], context: Context
    ) -> AsyncGenerator[service_pb2.TelemetryCommand, None]:
        """See the proto."""
        try:
            caller = Caller.of(context)
        except Refused as refused:
            self._metrics.answered("Telemetry", "OTHER", refused.code)
            yield service_pb2.TelemetryCommand(status=status_of(refused))
            return

        def answered(status: pb.Status) -> None:
            self._metrics.answered("Telemetry", caller.language, status.code)

        stream = TelemetryStream(caller, self._parts, self._groups, self._checks)
        try:
            async for command in stream.serve(requests, answered):
                yield command
        finally:
            if not _is_due(context):
                self._parts.clients.broke(caller)  # or the client has closed its side

    # ---- sending

    async def SendMessage(
        self, request: service_pb2.SendMessageRequest, context: Context
    ) -> service_pb2.SendMessageResponse:
        """See the proto."""

        async def send(caller: Caller) -> service_pb2.SendMessageResponse:
            topic, messages = self._checked(caller, request.messages)
            await self._types.check(topic, messages)
            if any(one.transactional for one in messages):
                self._checks.publish(caller.client_id, [topic])
            left_s = max(0.0, _left_s(context) - DEADLINE_MARGIN_S)
            try:
                async with timeouts.timeout(left_s):
                    entries = await self._sender.send(caller, topic, messages, int(1_000 * left_s))
            except TimeoutError:
                return service_pb2.SendMessageResponse(status=_SEND_TIMED_OUT)
            stored = sum(entry.status.code == pb.OK for entry in entries)
            self._metrics.sent.inc(stored)
            size = sum(len(message.body) for message in request.messages)
            failed = len(entries) - stored
            self._parts.events.sent(
                topic, caller.client_id, stored=stored, failed=failed, size=size
            )
            return service_pb2.SendMessageResponse(status=_summary(entries), entries=entries)

        return await self._answer("SendMessage", context, send, service_pb2.SendMessageResponse)

    def _checked(
        self, caller: Caller, sent: Sequence[pb.Message]
    ) -> tuple[str, list[OutgoingMessage]]:
        """Return the topic and the messages; all of them are valid.

        Raises:
            Refused: One is not valid; none is sent.
        """
        if not 0 < len(sent) <= MESSAGES_MAX:
            raise Refused(
                pb.BAD_REQUEST, f"messages must have 1 to {MESSAGES_MAX} entries, got {len(sent)}"
            )
        topics = {caller.topic(message.topic) for message in sent}
        if len(topics) > 1:
            raise Refused(pb.BAD_REQUEST, "all messages of one call must have the same topic")
        now_unix_ms = self._clock.unix_ms()
        return topics.pop(), [outgoing(message, now_unix_ms) for message in sent]

    async def RecallMessage(
        self, request: service_pb2.RecallMessageRequest, context: Context
    ) -> service_pb2.RecallMessageResponse:
        """See the proto."""

        async def recall(caller: Caller) -> service_pb2.RecallMessageResponse:
            topic, handle = caller.topic(request.topic), self._handle(request.recall_handle)
            if handle.gateway != RECALL or handle.topic != topic:
                raise Refused(
                    pb.INVALID_RECEIPT_HANDLE, f"the handle is not of a message of topic {topic}"
                )
            schedule_id, _, message_id = handle.group.partition("/")
            try:
                async with timeouts.timeout(max(0.0, _left_s(context) - DEADLINE_MARGIN_S)):
                    await self._producer.cancel(schedule_id)
            except TimeoutError:
                return service_pb2.RecallMessageResponse(status=_RECALL_TIMED_OUT)
            except NotScheduled as error:
                raise Refused(
                    pb.MESSAGE_NOT_FOUND, f"message {message_id}: {error.message}"
                ) from error
            return service_pb2.RecallMessageResponse(status=OK, message_id=message_id)

        return await self._answer(
            "RecallMessage", context, recall, service_pb2.RecallMessageResponse
        )

    # ---- receiving

    async def ReceiveMessage(
        self, request: service_pb2.ReceiveMessageRequest, context: Context
    ) -> AsyncGenerator[service_pb2.ReceiveMessageResponse, None]:
        """See the proto."""
        call, language = "ReceiveMessage", "OTHER"
        group: GroupConsumer | None = None
        batch: list[Delivery] = []
        begun_count, ended = 0, False
        reception = Reception(context.peer() or "")
        try:
            caller = Caller.of(context)
            language = caller.language
            group, batch = await self._receive(caller, request, context, reception)
            topic = echoed(request.message_queue.topic, caller)
            code = pb.OK if batch else pb.MESSAGE_NOT_FOUND
            text = "OK" if batch else "no message arrived in time"
            self._metrics.answered(call, language, code)
            yield service_pb2.ReceiveMessageResponse(status=pb.Status(code=code, message=text))
            now_unix_ms = self._clock.unix_ms()
            yield service_pb2.ReceiveMessageResponse(delivery_timestamp=timestamp(now_unix_ms))
            for one in batch:
                begun_count += 1
                message = self._received(group.group, one, topic)
                yield service_pb2.ReceiveMessageResponse(message=message)
                group.handed_out(one)
                self._metrics.delivered.inc()
            reception.sent_ms, ended = self._clock.monotonic_ms(), True
        except (Refused, BatonError) as error:
            ended = not batch
            self._metrics.answered(call, language, status_of(error).code)
            yield service_pb2.ReceiveMessageResponse(status=status_of(error))
        finally:
            if not ended and not _is_due(context):
                self._parts.clients.broke(Caller.of(context))
            if not ended and batch and group is not None:
                group.undo(batch, begun_count)

    async def _receive(
        self,
        caller: Caller,
        request: service_pb2.ReceiveMessageRequest,
        context: Context,
        reception: Reception,
    ) -> tuple[GroupConsumer, list[Delivery]]:
        name, topic = caller.group(request.group), caller.topic(request.message_queue.topic)
        settings = self._parts.settings
        _check_batch_size(request.batch_size)
        terms = LeaseTerms(caller.client_id, settings.renew_ms, renewed=True, reception=reception)
        if not request.auto_renew:
            hold_ms = duration_ms(request.invisible_duration)
            if not settings.invisible_ms_min <= hold_ms <= settings.invisible_ms_max:
                raise Refused(
                    pb.ILLEGAL_INVISIBLE_TIME,
                    f"invisible_duration must be {settings.invisible_ms_min} to "
                    f"{settings.invisible_ms_max} ms, got {hold_ms}",
                )
            terms = LeaseTerms(caller.client_id, hold_ms)
        wait_ms = self._wait_ms(request, context)
        expression = expression_of(request.filter_expression)
        known = self._groups.find(name)
        if known is None or not known.subscribes(topic):
            await query_route(self._directory, topic)
        client = self._parts.clients.note(caller, name)
        group = self._groups.subscribe(name, [(topic, expression)], caller.client_id)
        with client.calling(caller):
            known_id = len(request.attempt_id) <= ATTEMPT_ID_CHARACTERS_MAX
            attempt_id = request.attempt_id if known_id else ""
            batch = await group.receive(topic, request.batch_size, terms, wait_ms, attempt_id)
        return group, batch

    def _wait_ms(
        self,
        request: service_pb2.ReceiveMessageRequest | service_pb2.PullMessageRequest,
        context: Context,
    ) -> int:
        """Return how long a call may wait for a message, so that it ends before its deadline.

        Raises:
            Refused: The time that the client asks for is negative.
        """
        polling_ms = self._parts.settings.polling_ms_max
        if request.HasField("long_polling_timeout"):
            polling_ms = min(polling_ms, duration_ms(request.long_polling_timeout))
        if polling_ms < 0:
            raise Refused(pb.ILLEGAL_POLLING_TIME, "long_polling_timeout must not be negative")
        left_ms = 1_000 * (_left_s(context) - DEADLINE_MARGIN_S)
        wait_ms = max(0, int(min(polling_ms, left_ms)))
        return shared_wait_ms(self._clock.monotonic_ms(), wait_ms)

    def _received(self, group: str, delivery: Delivery, topic: pb.Resource) -> pb.Message:
        terms = delivery.terms
        handle = self._write_handle(group, delivery, renewed=terms.renewed)
        return received(
            delivery.message, topic, DeliveryFields(handle, delivery.attempt, terms.hold_ms)
        )

    def _write_handle(self, group: str, one: Delivery, *, renewed: bool) -> str:
        expires_in_ms = one.expires_ms - self._clock.monotonic_ms()
        return self._parts.signer.write(
            ReceiptHandle(
                self._parts.settings.node_id,
                group,
                one.queue.topic,
                one.queue.broker,
                one.queue.queue_id,
                one.offset,
                one.message.token,
                one.serial,
                one.attempt,
                0 if renewed else max(1, self._clock.unix_ms() + expires_in_ms),
            )
        )

    # ---- ending what was received

    async def AckMessage(
        self, request: service_pb2.AckMessageRequest, context: Context
    ) -> service_pb2.AckMessageResponse:
        """See the proto."""

        async def ack(caller: Caller) -> service_pb2.AckMessageResponse:
            group, topic = caller.group(request.group), caller.topic(request.topic)
            if not 0 < len(request.entries) <= MESSAGES_MAX:
                raise Refused(
                    pb.BAD_REQUEST,
                    f"entries must be 1 to {MESSAGES_MAX}, got {len(request.entries)}",
                )
            self._parts.clients.note(caller, group)
            begun = [self._begin_ack(group, topic, entry) for entry in request.entries]
            waits = {one for one in begun if isinstance(one, asyncio.Future)}
            if waits:
                await asyncio.wait(waits, timeout=max(0.0, _left_s(context) - DEADLINE_MARGIN_S))
            entries = [
                service_pb2.AckMessageResultEntry(
                    message_id=entry.message_id,
                    receipt_handle=entry.receipt_handle,
                    status=one if isinstance(one, pb.Status) else _ended(one),
                )
                for entry, one in zip(request.entries, begun, strict=True)
            ]
            self._metrics.acknowledged.inc(sum(one.status.code == pb.OK for one in entries))
            return service_pb2.AckMessageResponse(status=_summary(entries), entries=entries)

        return await self._answer("AckMessage", context, ack, service_pb2.AckMessageResponse)

    def _begin_ack(
        self, group: str, topic: str, entry: service_pb2.AckMessageEntry
    ) -> asyncio.Future[None] | pb.Status:
        try:
            handle, consumer = self._held(group, entry.receipt_handle)
            return consumer.acknowledge(handle, topic)
        except Refused as refused:
            return status_of(refused)

    async def ChangeInvisibleDuration(
        self, request: service_pb2.ChangeInvisibleDurationRequest, context: Context
    ) -> service_pb2.ChangeInvisibleDurationResponse:
        """See the proto."""

        async def change(caller: Caller) -> service_pb2.ChangeInvisibleDurationResponse:
            name, topic = caller.group(request.group), caller.topic(request.topic)
            hold_ms = duration_ms(request.invisible_duration)
            if not 0 <= hold_ms <= self._parts.settings.invisible_ms_max:
                raise Refused(
                    pb.ILLEGAL_INVISIBLE_TIME,
                    f"invisible_duration must be 0 to {self._parts.settings.invisible_ms_max} ms, "
                    f"got {hold_ms}",
                )
            client = self._parts.clients.note(caller, name)
            handle, group = self._held(name, request.receipt_handle)
            if client.kind == pb.PUSH_CONSUMER:
                hold_ms = retry_ms(handle.attempt, hold_ms)
            lease = group.change(handle, topic, hold_ms)
            expires = max(1, self._clock.unix_ms() + lease.expires_ms - self._clock.monotonic_ms())
            changed = ReceiptHandle(
                handle.gateway,
                handle.group,
                handle.topic,
                handle.broker,
                handle.queue_id,
                handle.offset,
                handle.token,
                lease.serial,
                lease.attempt,
                expires,
            )
            return service_pb2.ChangeInvisibleDurationResponse(
                status=OK, receipt_handle=self._parts.signer.write(changed)
            )

        return await self._answer(
            "ChangeInvisibleDuration",
            context,
            change,
            service_pb2.ChangeInvisibleDurationResponse,
        )

    async def ForwardMessageToDeadLetterQueue(
        self, request: service_pb2.ForwardMessageToDeadLetterQueueRequest, context: Context
    ) -> service_pb2.ForwardMessageToDeadLetterQueueResponse:
        """See the proto."""
        kind = service_pb2.ForwardMessageToDeadLetterQueueResponse

        async def forward(
            caller: Caller,
        ) -> service_pb2.ForwardMessageToDeadLetterQueueResponse:
            name, topic = caller.group(request.group), caller.topic(request.topic)
            self._parts.clients.note(caller, name)
            try:
                handle, group = self._held(name, request.receipt_handle)
                async with timeouts.timeout(max(0.0, _left_s(context) - DEADLINE_MARGIN_S)):
                    await group.forward(handle, topic)
            except TimeoutError:
                return kind(status=_TIMED_OUT)
            except NotHeld as error:
                # Most official clients repeat a refused call for ever, and hold up other messages.
                text = f"nothing was forwarded: {error.message}"
                return kind(status=pb.Status(code=pb.OK, message=text))
            return kind(status=OK)

        return await self._answer("ForwardMessageToDeadLetterQueue", context, forward, kind)

    def _handle(self, text: str) -> ReceiptHandle:
        try:
            return self._parts.signer.read(text)
        except BadHandle as error:
            message = f"{error}. Use the handle of the last delivery"
            if isinstance(error, ForeignHandle):
                raise NotHeld(message) from error
            raise Refused(pb.INVALID_RECEIPT_HANDLE, message) from error

    def _held(self, group: str, text: str) -> tuple[ReceiptHandle, GroupConsumer]:
        """Return a handle of the group, and its consumer.

        Raises:
            Refused: The handle is not valid, or is of another group.
            NotHeld: It was signed with another key, or the gateway has left the group.
        """
        handle = self._handle(text)
        if handle.group != group:
            raise Refused(
                pb.INVALID_RECEIPT_HANDLE, f"the handle is not of a message of group {group}"
            )
        consumer = self._groups.find(group)
        if consumer is None:
            raise NotHeld(
                f"this gateway holds no message of group {group}; the message is delivered again"
            )
        return handle, consumer

    # ---- transactions

    async def EndTransaction(
        self, request: service_pb2.EndTransactionRequest, context: Context
    ) -> service_pb2.EndTransactionResponse:
        """See the proto."""
        kind = service_pb2.EndTransactionResponse

        async def end(caller: Caller) -> service_pb2.EndTransactionResponse:
            topic = caller.topic(request.topic)
            try:
                async with timeouts.timeout(max(0.0, _left_s(context) - DEADLINE_MARGIN_S)):
                    await self._transactions.end(topic, request.transaction_id, request.resolution)
            except TimeoutError:
                return kind(status=_END_TIMED_OUT)
            return kind(status=OK)

        return await self._answer("EndTransaction", context, end, kind)

    # ---- reading without a group's plan

    async def PullMessage(
        self, request: service_pb2.PullMessageRequest, context: Context
    ) -> AsyncGenerator[service_pb2.PullMessageResponse, None]:
        """See the proto."""
        call, language = "PullMessage", "OTHER"
        try:
            caller = Caller.of(context)
            language = caller.language
            pulled = await self._pull(caller, request, context)
        except (Refused, BatonError) as error:
            self._metrics.answered(call, language, status_of(error).code)
            yield service_pb2.PullMessageResponse(status=status_of(error))
            return
        code = pb.OK if pulled.messages else pb.MESSAGE_NOT_FOUND
        text = "OK" if pulled.messages else "no message arrived in time"
        if pulled.lost_count:
            text = f"{pulled.lost_count} messages from offset {request.offset} on are not kept"
        self._metrics.answered(call, language, code)
        yield service_pb2.PullMessageResponse(status=pb.Status(code=code, message=text))
        topic = echoed(request.message_queue.topic, caller)
        for message in pulled.messages:
            fields = DeliveryFields("", 1, 0)
            yield service_pb2.PullMessageResponse(message=received(message, topic, fields))
        self._metrics.delivered.inc(len(pulled.messages))
        yield service_pb2.PullMessageResponse(next_offset=pulled.next_offset)

    async def _pull(
        self, caller: Caller, request: service_pb2.PullMessageRequest, context: Context
    ) -> PulledMessages:
        _check_batch_size(request.batch_size)
        wait_ms = self._wait_ms(request, context)
        with self._parts.clients.note(caller).calling(caller):
            return await self._reader.pull(caller, request, wait_ms)

    async def UpdateOffset(
        self, request: service_pb2.UpdateOffsetRequest, context: Context
    ) -> service_pb2.UpdateOffsetResponse:
        """See the proto."""

        async def update(caller: Caller) -> service_pb2.UpdateOffsetResponse:
            return await self._reader.update_offset(caller, request)

        return await self._answer("UpdateOffset", context, update, service_pb2.UpdateOffsetResponse)

    async def GetOffset(
        self, request: service_pb2.GetOffsetRequest, context: Context
    ) -> service_pb2.GetOffsetResponse:
        """See the proto."""

        async def get(caller: Caller) -> service_pb2.GetOffsetResponse:
            return await self._reader.get_offset(caller, request)

        return await self._answer("GetOffset", context, get, service_pb2.GetOffsetResponse)

    async def QueryOffset(
        self, request: service_pb2.QueryOffsetRequest, context: Context
    ) -> service_pb2.QueryOffsetResponse:
        """See the proto."""

        async def query(caller: Caller) -> service_pb2.QueryOffsetResponse:
            return await self._reader.query_offset(caller, request)

        return await self._answer("QueryOffset", context, query, service_pb2.QueryOffsetResponse)

    # ---- not supported

    async def SyncLiteSubscription(
        self, request: service_pb2.SyncLiteSubscriptionRequest, context: Context
    ) -> service_pb2.SyncLiteSubscriptionResponse:
        """See the proto."""
        return await self._unsupported(
            "SyncLiteSubscription", context, service_pb2.SyncLiteSubscriptionResponse
        )

    async def _unsupported(
        self, call: str, context: Context, kind: Callable[..., Answer]
    ) -> Answer:
        async def refuse(_: Caller) -> Answer:
            raise Refused(pb.NOT_IMPLEMENTED, f"{call} is not supported by the gateway")

        return await self._answer(call, context, refuse, kind)

    async def _answer(
        self,
        call: str,
        context: Context,
        work: Callable[[Caller], Awaitable[Answer]],
        kind: Callable[..., Answer],
    ) -> Answer:
        """Return the answer of `work`, or one with the status of its failure; count it."""
        language = "OTHER"
        try:
            caller = Caller.of(context)
            language = caller.language
            answer = await work(caller)
        except (Refused, BatonError) as error:
            answer = kind(status=status_of(error))
        except Exception as error:
            log.exception("unexpected error call=%s", call)
            answer = kind(status=status_of(error))
        self._metrics.answered(call, language, answer.status.code)
        return answer


_TIMED_OUT = pb.Status(
    code=pb.PROXY_TIMEOUT,
    message="the outcome is not durable in time; repeat the call with the same handle",
)

_SEND_TIMED_OUT = pb.Status(
    code=pb.PROXY_TIMEOUT,
    message="no outcome before the deadline of the call; the messages may be stored or not. Send "
    "them again with the same message ids: what is stored is not stored twice",
)


_RECALL_TIMED_OUT = pb.Status(
    code=pb.PROXY_TIMEOUT,
    message="no outcome before the deadline of the call; the message may be recalled. Repeat the "
    "call",
)


_END_TIMED_OUT = pb.Status(
    code=pb.PROXY_TIMEOUT,
    message="no outcome before the deadline of the call; the transaction may have ended. Repeat "
    "the call, or wait for the check",
)


def _ended(outcome: asyncio.Future[None]) -> pb.Status:
    """Return the status of an acknowledgement, which may still be on its way."""
    if not outcome.done():
        return _TIMED_OUT
    if outcome.exception() is None:
        return OK
    return pb.Status(
        code=pb.INVALID_RECEIPT_HANDLE,
        message="the queue was lost before the acknowledgement was durable; the message may be "
        "delivered again",
    )


def _summary(entries: Sequence[Any]) -> pb.Status:
    """Return the status of a call by those of its entries."""
    first: pb.Status = entries[0].status
    if all(entry.status.code == first.code for entry in entries):
        return first
    return pb.Status(code=pb.MULTIPLE_RESULTS, message="the entries have different outcomes")


def _check_batch_size(batch_size: int) -> None:
    if not 0 < batch_size <= MESSAGES_MAX:
        raise Refused(pb.BAD_REQUEST, f"batch_size must be 1 to {MESSAGES_MAX}, got {batch_size}")


def _is_due(context: Context) -> bool:
    """Whether a call has reached its deadline; that of its client is a little earlier."""
    left_s = context.time_remaining()
    return left_s is not None and left_s < DEADLINE_MARGIN_S


def _left_s(context: Context) -> float:
    """Return the time until the deadline of a call; the edge rejects calls without one."""
    left_s = context.time_remaining()
    if left_s is None:
        raise InvalidArgument("the call has no deadline")
    return float(left_s)
