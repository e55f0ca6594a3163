"""The message types of topics: what remote clients may send to each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from apache.rocketmq.v2 import definition_pb2 as pb
from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from batonmq._common.clock import Clock
from batonmq._connection.directory import Directory
from batonmq._connection.routes import query_route
from batonmq.errors import BatonError, TopicNotFound
from batonmq_server.gateway.message_proto import OutgoingMessage
from batonmq_server.gateway.statuses import Refused

TOPICS_MAX = 10_000
"""Topics whose type is remembered, at most."""
AGE_MS_MAX = 10_000
"""How long a type is used before the nameserver is asked again: a topic may be deleted, and created
with another type."""
ANY = (pb.NORMAL, pb.FIFO, pb.DELAY, pb.TRANSACTION)
_ACCEPTED: Mapping[int, tuple[pb.MessageType.ValueType, ...]] = {
    nameserver_pb.TOPIC_MESSAGE_TYPE_NORMAL: (pb.NORMAL,),
    nameserver_pb.TOPIC_MESSAGE_TYPE_FIFO: (pb.FIFO,),
    nameserver_pb.TOPIC_MESSAGE_TYPE_DELAY: (pb.DELAY,),
    nameserver_pb.TOPIC_MESSAGE_TYPE_TRANSACTION: (pb.TRANSACTION,),
}


def accepted_types(topic: nameserver_pb.Topic) -> tuple[pb.MessageType.ValueType, ...]:
    """Return the types of the messages that a topic takes; all for a type of a later version."""
    return _ACCEPTED.get(topic.message_type, ANY)


class TopicTypes:
    """Checks messages before they are sent; asks a nameserver now and then."""

    def __init__(self, directory: Directory, clock: Clock) -> None:
        self._directory, self._clock = directory, clock
        self._known: dict[str, tuple[int, tuple[pb.MessageType.ValueType, ...]]] = {}

    def note(self, topic: nameserver_pb.Topic) -> None:
        """Note a topic that a nameserver returned."""
        self._known.pop(topic.name, None)
        if len(self._known) >= TOPICS_MAX:
            del self._known[next(iter(self._known))]
        self._known[topic.name] = (self._clock.monotonic_ms(), accepted_types(topic))

    async def check(self, topic: str, messages: Iterable[OutgoingMessage]) -> None:
        """Return if a topic takes all of the messages.

        While no nameserver answers, the type that was known last is used.

        Raises:
            Refused: It does not take the type of one of them.
            TopicNotFound, Unreachable: The type is not known.
        """
        noted_ms, accepted = self._known.get(topic, (None, ANY))
        if noted_ms is None or self._clock.monotonic_ms() - noted_ms > AGE_MS_MAX:
            try:
                found = (await query_route(self._directory, topic)).topic
                self.note(found)
                accepted = accepted_types(found)
            except TopicNotFound:
                self._known.pop(topic, None)
                raise
            except BatonError:
                if noted_ms is None:
                    raise
        for message in messages:
            if message.kind not in accepted:
                (wanted,) = accepted
                raise Refused(
                    pb.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
                    f"topic {topic} takes messages of type {pb.MessageType.Name(wanted)}, not "
                    f"{pb.MessageType.Name(message.kind)}. Send it to a topic of that type",
                )
