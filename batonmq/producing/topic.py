"""Which queue of a topic a message goes to."""

from __future__ import annotations

from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb

from batonmq.common.errors import NotWritable, QueueNotFound
from batonmq.core.route import QueueId, queue_of_key
from batonmq.core.sending import QueueSender
from batonmq.producing.receipts import Outcome
from batonmq.routes import queues_of, writable_queues_of


class TopicQueues:
    """The queues of a topic, and whose turn it is.

    Attributes:
        queues: Those that take messages.
        current: Sender of the queue whose turn it is, once it was looked up.
    """

    def __init__(self, route: nameserver_pb.Route) -> None:
        self._turn = 0
        self.change(route)

    def change(self, route: nameserver_pb.Route) -> None:
        """Go on by a newer route."""
        self._name, self._all = route.topic.name, frozenset(queues_of(route))
        self.queues = writable_queues_of(route)
        self.current: QueueSender[Outcome] | None = None

    def next_turn(self) -> None:
        """It is another queue's turn."""
        self._turn += 1
        self.current = None

    def choose(self, ordering_key: str | None, queue: QueueId | None) -> QueueId:
        """The queue that was asked for, that of the key, or the one whose turn it is.

        Raises:
            QueueNotFound, NotWritable: there is none that takes messages.
        """
        if queue is not None:
            if queue not in self._all:
                raise QueueNotFound(f"{queue} is not a queue of the topic")
            if queue not in self.queues:
                raise NotWritable(f"queue {queue} takes no messages")
            return queue
        if not self.queues:
            raise NotWritable(f"topic {self._name} takes no messages")
        if ordering_key is not None:
            return queue_of_key(self.queues, ordering_key)
        return self.queues[self._turn % len(self.queues)]
