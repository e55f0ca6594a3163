"""The telemetry streams of clients: their settings, answered, and pushed again.

Node.js clients miss an answer that arrives before their first routes, and then wait for minutes. So
the settings are pushed again a few times.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable

from apache.rocketmq.v2 import definition_pb2 as pb
from apache.rocketmq.v2 import service_pb2
from batonmq.errors import BatonError
from batonmq_server.gateway.callers import Caller
from batonmq_server.gateway.client_settings import SETTINGS_BYTES_MAX, settings_for
from batonmq_server.gateway.gateway_parts import GatewayParts
from batonmq_server.gateway.groups import Groups
from batonmq_server.gateway.message_proto import duration_ms, echoed
from batonmq_server.gateway.statuses import OK, Refused, check_size, status_of
from batonmq_server.gateway.transaction_checks import TransactionChecks

log = logging.getLogger(__name__)

PUSHES_AFTER_S = (0.5, 1.5, 3.0)
"""Pauses before the settings are pushed again: 0.5, 2 and 5 s after they came."""
UNSENT_MAX = 64
"""Answers that wait for a client which does not read; it is sent no more then."""
_CONSUMERS = (pb.PUSH_CONSUMER, pb.SIMPLE_CONSUMER)


def expression_of(sent: pb.FilterExpression) -> str:
    """Return a filter as an expression of BatonMQ.

    Raises:
        Refused: The type is unknown.
    """
    if sent.type == pb.SQL:
        return f"sql: {sent.expression}"
    if sent.type in (pb.TAG, pb.FILTER_TYPE_UNSPECIFIED):
        return sent.expression or "*"
    raise Refused(
        pb.ILLEGAL_FILTER_EXPRESSION, f"filter type {sent.type} is unknown; use TAG or SQL"
    )


class TelemetryStream:
    """One stream of one client."""

    def __init__(
        self, caller: Caller, parts: GatewayParts, groups: Groups, checks: TransactionChecks
    ) -> None:
        self._caller, self._parts, self._groups = caller, parts, groups
        self._checks = checks
        self._names: dict[str, pb.Resource] = {}
        self._answers: asyncio.Queue[service_pb2.TelemetryCommand | None] = asyncio.Queue(
            UNSENT_MAX
        )
        self._settings: service_pb2.TelemetryCommand | None = None
        self._renewed = asyncio.Event()

    async def serve(
        self,
        requests: AsyncIterator[service_pb2.TelemetryCommand],
        answered: Callable[[pb.Status], None],
    ) -> AsyncIterator[service_pb2.TelemetryCommand]:
        """Yield the answers until the client closes its side.

        Args:
            answered: Called with the status of each answer to settings.
        """
        with self._parts.clients.note(self._caller).calling(self._caller):
            reading = self._parts.spawn(self._read(requests, answered))
            pushing = self._parts.spawn(self._push())
            try:
                while (command := await self._answers.get()) is not None:
                    yield command
            finally:
                reading.cancel()
                pushing.cancel()
                self._checks.close(self._caller.client_id, self)
                self._parts.commands.close(self._caller.client_id, self)

    def command(self, command: service_pb2.TelemetryCommand) -> bool:
        """Send a command; return False if the client reads too slowly."""
        if self._answers.full():
            return False
        self._answers.put_nowait(command)
        return True

    def name_of(self, topic: str) -> pb.Resource:
        """Return a stored topic as the client names it."""
        namespace = self._caller.namespace
        plain = pb.Resource(
            resource_namespace=namespace,
            name=topic.removeprefix(f"{namespace}%") if namespace else topic,
        )
        return self._names.get(topic, plain)

    async def _read(
        self,
        requests: AsyncIterator[service_pb2.TelemetryCommand],
        answered: Callable[[pb.Status], None],
    ) -> None:
        try:
            async for command in requests:
                if command.WhichOneof("command") != "settings":
                    self._parts.commands.answered(self._caller.client_id, command)
                    continue
                answer = self._answer(command.settings)
                answered(answer.status)
                self._put(answer)
        except (BatonError, asyncio.CancelledError) as error:
            log.debug("telemetry ends client=%s error=%s", self._caller.client_id, error)
        except Exception as error:
            # Raised, it would end the gateway: the task belongs to it, not to this call.
            log.exception("unexpected error call=Telemetry")
            answered(status := status_of(error))
            self._put(service_pb2.TelemetryCommand(status=status))
        finally:
            self._put(None)

    def _put(self, command: service_pb2.TelemetryCommand | None) -> None:
        if self._answers.full():
            if command is not None:
                return
            self._answers.get_nowait()
        self._answers.put_nowait(command)

    async def _push(self) -> None:
        """Push the settings again after each answer."""
        while True:
            await self._renewed.wait()
            self._renewed.clear()
            for pause_s in PUSHES_AFTER_S:
                await asyncio.sleep(pause_s)
                if self._settings is not None:
                    self._put(self._settings)

    def _answer(self, sent: pb.Settings) -> service_pb2.TelemetryCommand:
        settings, fifo = self._parts.settings, False
        client = self._parts.clients.note(self._caller)
        client.describe(sent)
        try:
            check_size(sent, SETTINGS_BYTES_MAX)
            if client.reads_queues:
                pass  # it belongs to no plan of a group
            elif sent.WhichOneof("pub_sub") == "subscription":
                fifo = self._subscribe(sent)
            elif sent.WhichOneof("pub_sub") == "publishing":
                self._note_names(sent.publishing.topics)
                self._checks.open(self._caller.client_id, self, self._names)
        except (Refused, BatonError) as error:
            return service_pb2.TelemetryCommand(status=status_of(error))
        self._parts.commands.open(self._caller.client_id, self)
        polling_ms = duration_ms(sent.subscription.long_polling_timeout)
        if not 0 < polling_ms < settings.polling_ms_max:
            polling_ms = settings.polling_ms_max
        answer = settings_for(
            sent,
            attempts_max=settings.delivery_attempts_max,
            polling_ms=polling_ms,
            fifo=fifo,
        )
        self._settings = service_pb2.TelemetryCommand(status=OK, settings=answer)
        self._renewed.set()
        return self._settings

    def _note_names(self, topics: Iterable[pb.Resource]) -> None:
        self._names = {self._caller.topic(one): echoed(one, self._caller) for one in topics}

    def _subscribe(self, sent: pb.Settings) -> bool:
        """Join the group of a consumer; return whether its group works in FIFO mode."""
        if sent.client_type not in _CONSUMERS:
            raise Refused(
                pb.UNRECOGNIZED_CLIENT_TYPE,
                f"client type {sent.client_type} is not supported; use a simple, a push or a pull "
                "consumer",
            )
        group = self._caller.group(sent.subscription.group)
        entries = [
            (self._caller.topic(one.topic), expression_of(one.expression))
            for one in sent.subscription.subscriptions
        ]
        self._note_names(one.topic for one in sent.subscription.subscriptions)
        self._parts.clients.note(self._caller, group)
        if entries:
            self._groups.subscribe(group, entries, self._caller.client_id)
        fifo = self._parts.settings.fifo
        return sent.client_type == pb.PUSH_CONSUMER and group in fifo
