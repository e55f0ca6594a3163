"""What operators ask one remote client: to consume a message, and for its stack traces."""

from __future__ import annotations

from typing import NamedTuple

from apache.rocketmq.v2 import definition_pb2 as remote_pb
from apache.rocketmq.v2 import service_pb2
from baton.gateway.v1 import gateway_service_pb2 as pb
from batonmq._connection.directory import ClientEnvironment, Directory
from batonmq._consumer.batch_decoder import decode_batch
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.reader_calls import FetchLimits, ReaderCalls
from batonmq._consumer.retry_sender import restore_copy
from batonmq._core.names import check_group, check_topic
from batonmq._core.queues import QueueRef
from batonmq._core.retries import group_of
from batonmq._core.subscription import parse_filter
from batonmq.errors import (
    InvalidArgument,
    MessageNotFound,
    NotMember,
    NotSubscribed,
    RemoteClientNotFound,
    RemoteClientSilent,
    RemoteCommandUnsupported,
)
from batonmq_server.gateway.client_commands import ClientCommands
from batonmq_server.gateway.clients import RemoteClient, RemoteClients
from batonmq_server.gateway.groups import Groups
from batonmq_server.gateway.message_proto import DeliveryFields, received
from batonmq_server.gateway.metrics import GatewayMetrics

WAIT_S_MAX = 60.0
"""A command waits this long for its client, at most."""
MARGIN_S = 0.5
"""How long before the deadline of the operator the wait ends."""
TRACE_BYTES_MAX = 1024 * 1024
"""Bytes of stack traces in an answer."""
TEXT_CHARACTERS_MAX = 1_000
_READ_BYTES = 1024 * 1024
_OUTCOMES = {
    remote_pb.OK: pb.VERIFY_OUTCOME_CONSUMED,
    remote_pb.FAILED_TO_CONSUME_MESSAGE: pb.VERIFY_OUTCOME_FAILED,
    remote_pb.MESSAGE_CORRUPTED: pb.VERIFY_OUTCOME_CORRUPTED,
}
_NO_TRACES = frozenset({"mock stack", "PrintStackTrace is not supported"})
"""Texts that the clients of Node.js and C++ send in place of stack traces."""
_IGNORES_COMMANDS = frozenset({"PYTHON", "RUST"})
"""Official clients of these languages read the commands and do nothing."""


class Question(NamedTuple):
    """What every command has.

    Attributes:
        group: Group that the client must consume for; empty for any client.
        left_s: Time that the operator waits.
    """

    client_id: str
    group: str
    left_s: float

    @property
    def wait_s(self) -> float:
        """Time that the client has."""
        return max(0.0, min(self.left_s - MARGIN_S, WAIT_S_MAX))


class Verified(NamedTuple):
    """What a client says of a message, and its text; empty without one."""

    outcome: pb.VerifyOutcome.ValueType
    text: str


class StoredMessages:
    """Reads single messages, as they were first sent."""

    def __init__(self, directory: Directory, environment: ClientEnvironment) -> None:
        self._calls = ReaderCalls(directory, environment, "")

    async def read(self, queue: QueueRef, offset: int) -> ReceivedMessage:
        """Return the message at an offset.

        Raises:
            MessageNotFound: No message is there yet.
            OffsetOutOfRange: It is beyond the end, or not kept.
        """
        every = parse_filter("*")
        fetched = await self._calls.read(queue, offset, every, FetchLimits(_READ_BYTES, 1))
        for raw in fetched.batches:
            for header, record in decode_batch(raw, offset, offset + 1, every):
                message = ReceivedMessage(queue, 0, header, record, redelivered=False)
                if group_of(queue.topic):
                    restore_copy(message)
                return message
        raise MessageNotFound(
            f"queue {queue} has no message at offset {offset}", facts={"offset": offset}
        )


class OperatorCommands:
    """Asks remote clients for operators. No message is held or acknowledged for it."""

    def __init__(
        self,
        clients: RemoteClients,
        groups: Groups,
        commands: ClientCommands,
        messages: StoredMessages,
        metrics: GatewayMetrics,
    ) -> None:
        self._clients, self._groups, self._commands = clients, groups, commands
        self._messages, self._metrics = messages, metrics

    async def verify(self, question: Question, queue: QueueRef, offset: int) -> Verified:
        """Let the listener of a push consumer consume a message, once.

        Raises:
            RemoteClientSilent: It did not answer in time; the listener may have run.
            BatonError: Refused, or the message can't be read: the listener has not run.
        """
        client = self._known(question)
        if client.kind != remote_pb.PUSH_CONSUMER:
            raise self._unable(question, client, "is no push consumer, so it has no listener")
        message = await self._messages.read(queue, offset)
        group = self._groups.find(question.group)
        if group is None or not group.subscribes(message.topic):
            raise NotSubscribed(
                f"group {question.group} does not subscribe to topic {message.topic} at this "
                "gateway",
                remedy="Name a message of a topic of the group, or of its retry or dead letter "
                "topic.",
                facts={"group": question.group, "topic": message.topic},
            )
        topic = self._commands.stream(question.client_id).name_of(message.topic)
        command = service_pb2.TelemetryCommand(
            verify_message_command=service_pb2.VerifyMessageCommand(
                message=received(message, topic, DeliveryFields("", message.attempts + 1, 0))
            )
        )
        answer = await self._ask(question, client, command)
        outcome = _OUTCOMES.get(answer.status.code)
        if outcome is None:
            raise self._unable(question, client, f"can't verify messages: {_said(answer.status)}")
        return Verified(outcome, _said(answer.status) if answer.status.message else "")

    async def stack_traces(self, question: Question) -> bytes:
        """Return the stack traces of a client, in UTF-8, as long as its library writes them.

        Raises:
            RemoteClientSilent: It did not answer in time.
            BatonError: Refused.
        """
        client = self._known(question)
        command = service_pb2.TelemetryCommand(
            print_thread_stack_trace_command=service_pb2.PrintThreadStackTraceCommand()
        )
        answer = await self._ask(question, client, command)
        text = answer.thread_stack_trace.thread_stack_trace
        refused = answer.status.code not in (remote_pb.OK, remote_pb.CODE_UNSPECIFIED)
        if refused or text.strip() in _NO_TRACES or not text:
            said = _said(answer.status) if refused else f"it answered {text!r}"
            raise self._unable(question, client, f"can't print stack traces: {said}")
        return text.encode("utf-8", "replace")

    def _known(self, question: Question) -> RemoteClient:
        """Return the client, which has a stream.

        Raises:
            RemoteClientNotFound: It has none, or has ended.
            NotMember: It does not consume for the group.
        """
        self._commands.stream(question.client_id)
        client = self._clients.find(question.client_id)
        if client is None:
            raise RemoteClientNotFound(
                f"client {question.client_id} has ended", facts={"client_id": question.client_id}
            )
        if question.group and question.group not in client.groups:
            raise NotMember(
                f"client {question.client_id} does not consume for group {question.group}",
                remedy=f"See: baton gateway clients --group {question.group}.",
                facts={"group": question.group, "client_id": question.client_id},
            )
        return client

    async def _ask(
        self, question: Question, client: RemoteClient, command: service_pb2.TelemetryCommand
    ) -> service_pb2.TelemetryCommand:
        name = command.WhichOneof("command") or ""
        try:
            answer = await self._commands.ask(question.client_id, command, question.wait_s)
        except RemoteClientSilent as error:
            self._metrics.commands.labels(name, "silent").inc()
            if client.language not in _IGNORES_COMMANDS:
                raise
            note = f"official clients of {client.language} ignore this command"
            raise RemoteClientSilent(f"{error.message}; {note}", facts=error.facts) from error
        self._metrics.commands.labels(name, "answered").inc()
        return answer

    def _unable(
        self, question: Question, client: RemoteClient, why: str
    ) -> RemoteCommandUnsupported:
        library = f"{client.language} {client.version}".strip()
        return RemoteCommandUnsupported(
            f"client {question.client_id} ({library}) {why}",
            facts={"client_id": question.client_id, "language": client.language},
        )


def question_of(client_id: str, group: str, left_s: float | None) -> Question:
    """Return what a request asks.

    Raises:
        InvalidArgument, InvalidName: A field is not valid.
    """
    if not client_id:
        raise InvalidArgument("client_id is required", facts={"field": "client_id"})
    return Question(client_id, check_group(group) if group else "", left_s or WAIT_S_MAX)


def position_of(request: pb.VerifyMessageRequest) -> tuple[QueueRef, int]:
    """Return the queue and the offset of a request.

    Raises:
        InvalidArgument, InvalidName: A field is not valid.
    """
    queue = request.queue
    if not request.HasField("queue") or not queue.broker:
        raise InvalidArgument("queue with its broker is required", facts={"field": "queue"})
    if request.offset < 0:
        text = f"offset must not be negative, got {request.offset}"
        raise InvalidArgument(text, facts={"field": "offset"})
    return QueueRef(check_topic(queue.topic), queue.broker, queue.queue_id), request.offset


def cut(text: bytes) -> tuple[str, int]:
    """Return the text of stack traces as far as it fits, and the number of bytes behind it."""
    kept = text[:TRACE_BYTES_MAX].decode("utf-8", "ignore")
    return kept, len(text) - len(kept.encode())


def _said(status: remote_pb.Status) -> str:
    """Return the text of a status; its code if it has none."""
    known = status.code in remote_pb.Code.values()
    name = remote_pb.Code.Name(status.code) if known else f"code {status.code}"
    text = "".join(each if each.isprintable() else " " for each in status.message)
    return text[:TEXT_CHARACTERS_MAX] or name
