"""Which queue of a topic a message goes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from batonmq._connection.routes import queues_of, writable_queues_of
from batonmq._core.broker_health import BrokerHealth
from batonmq._core.keyed_queues import KeyedQueues
from batonmq._core.queue_sender import QueueSender
from batonmq._core.queues import QueueRef
from batonmq._producer.receipts import BatchOutcome, SendOptions
from batonmq.errors import NotWritable, QueueNotFound


@dataclass(frozen=True, slots=True)
class _Earlier:
    """How keys went before the queues changed, and the last batch of each queue at that time."""

    keyed: KeyedQueues
    last: Mapping[QueueRef, BatchOutcome]

    def delays(self, ordering_key: str, queue: QueueRef) -> bool:
        """Whether messages of the key may be under way elsewhere than to `queue`."""
        before = self.keyed.of(ordering_key)
        return before != queue and before in self.last and not self.last[before].settled


class TopicQueues:
    """The queues of a topic, and whose turn it is.

    When the queues change, a message with an ordering key that moves to another queue `must_wait`
    until what was under way of the key has its outcome: so the order of a key is that of sending.

    Args:
        brokers: Those to avoid.

    Attributes:
        queues: Those that take messages.
        current: Sender of the queue whose turn it is, once it was looked up.
    """

    def __init__(self, route: nameserver_pb.Route, brokers: BrokerHealth) -> None:
        self._brokers = brokers
        self._turn = 0
        self._earlier: list[_Earlier] = []
        self._read(route)

    def change(self, route: nameserver_pb.Route, last: Mapping[QueueRef, BatchOutcome]) -> None:
        """Go on by a newer route.

        Args:
            last: The last batch of each queue that has one under way.
        """
        if last:
            self._earlier.append(_Earlier(self._keyed, last))
        self._read(route)

    def _read(self, route: nameserver_pb.Route) -> None:
        self._name, self._all = route.topic.name, frozenset(queues_of(route))
        self.queues = writable_queues_of(route)
        self._keyed = KeyedQueues(self.queues)
        self.current: QueueSender[BatchOutcome] | None = None

    def next_turn(self) -> None:
        """It is another queue's turn."""
        self._turn += 1
        self.current = None

    def avoid(self, broker: str) -> None:
        """Look anew for the queue whose turn it is, if it is at a broker in trouble."""
        if self.current is not None and self.current.queue.broker == broker:
            self.current = None

    def must_wait(self, ordering_key: str | None) -> bool:
        """Whether a message of the key would overtake others."""
        if ordering_key is None or not self._earlier or not self.queues:
            return False
        self._earlier = [
            one
            for one in self._earlier
            if not all(outcome.settled for outcome in one.last.values())
        ]
        queue = self._keyed.of(ordering_key)
        return any(one.delays(ordering_key, queue) for one in self._earlier)

    def choose(self, options: SendOptions, now_ms: int) -> QueueRef:
        """The queue that was asked for, that of the key, or the one whose turn it is.

        Raises:
            QueueNotFound, NotWritable: there is none that takes messages.
        """
        if options.queue is not None:
            if options.queue not in self._all:
                raise QueueNotFound(f"{options.queue} is not a queue of the topic")
            if options.queue not in self.queues:
                raise NotWritable(f"queue {options.queue} takes no messages")
            return options.queue
        if not self.queues:
            raise NotWritable(f"topic {self._name} takes no messages")
        if options.ordering_key is not None:
            return self._keyed.of(options.ordering_key)
        return self._brokers.choose(self.queues, self._turn, now_ms)
