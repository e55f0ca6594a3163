"""The queues of a topic, and the choice of a queue for each message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from batonmq._connection.routes import queues_of, topic_epoch_of, writable_queues_of
from batonmq._core.broker_health import BrokerHealth
from batonmq._core.keyed_queues import KeyedQueues
from batonmq._core.queue_sender import QueueSender
from batonmq._core.queues import QueueRef
from batonmq._producer.receipts import BatchOutcome, SendOptions
from batonmq.errors import BadBatch, InvalidArgument, NotWritable, QueueNotFound


@dataclass(frozen=True, slots=True)
class _Earlier:
    """Key assignment before the queues changed, and the last batch of each queue at that time."""

    keyed: KeyedQueues
    last: Mapping[QueueRef, BatchOutcome]

    def delays(self, ordering_key: str, queue: QueueRef) -> bool:
        """Return whether messages of the key may be in flight to another queue than `queue`."""
        before = self.keyed.of(ordering_key)
        return before != queue and before in self.last and not self.last[before].settled


class TopicQueues:
    """The queues of a topic, used in rotation.

    If the queues change, an ordering key may move to another queue. A message of such a key
    `must_wait` until the earlier messages of the key have an outcome. This keeps the send order.

    Args:
        brokers: Health of the brokers; unhealthy brokers are avoided.
        turn: Where the rotation begins. Producers of one message each must not all begin with the
            same queue.

    Attributes:
        epoch: Of the topic, as its newest route says; None if it does not.
        queues: The writable queues.
        current: Sender of the queue whose turn it is; None if it was not looked up yet.
    """

    def __init__(self, route: nameserver_pb.Route, brokers: BrokerHealth, turn: int = 0) -> None:
        self._brokers, self._turn = brokers, turn
        self._earlier: list[_Earlier] = []
        self._read(route)

    def change(self, route: nameserver_pb.Route, last: Mapping[QueueRef, BatchOutcome]) -> None:
        """Replace the queues by those of a newer route.

        Args:
            last: The last batch in flight of each queue.
        """
        self._forget_settled()
        if last:
            self._earlier.append(_Earlier(self._keyed, last))
        self._read(route)

    def _read(self, route: nameserver_pb.Route) -> None:
        self._name, self._all = route.topic.name, frozenset(queues_of(route))
        self.queues = writable_queues_of(route)
        self.epoch = topic_epoch_of(route)
        self._compacted = route.topic.HasField("compaction")
        self._keyed = KeyedQueues(self.queues)
        self.current: QueueSender[BatchOutcome] | None = None

    def avoid(self, broker: str) -> None:
        """Forget the current queue if it is on `broker`; the next message chooses again."""
        if self.current is not None and self.current.queue.broker == broker:
            self.current = None

    def must_wait(self, ordering_key: str | None) -> bool:
        """Return whether a message of the key could overtake messages in flight."""
        if ordering_key is None or not self._earlier or not self.queues:
            return False
        self._forget_settled()
        queue = self._keyed.of(ordering_key)
        return any(one.delays(ordering_key, queue) for one in self._earlier)

    def _forget_settled(self) -> None:
        """Forget earlier assignments of keys with no message in flight."""
        self._earlier = [
            one
            for one in self._earlier
            if not all(outcome.settled for outcome in one.last.values())
        ]

    def choose(self, options: SendOptions, now_ms: int) -> QueueRef:
        """Return the requested queue, the queue of the ordering key, or the next in the rotation.

        The rotation advances with each queue that it returns.

        Raises:
            QueueNotFound: The requested queue does not exist.
            NotWritable: The requested queue, or every queue of the topic, is not writable.
            BadBatch: The topic is compacted, and the message has no ordering key.
            InvalidArgument: The topic is compacted, and the requested queue is not that of the key.
        """
        if self._compacted:
            self._check_compacted(options)
        if options.queue is not None:
            if options.queue not in self._all:
                raise QueueNotFound(f"{options.queue} is not a queue of the topic")
            if options.queue not in self.queues:
                raise NotWritable(f"queue {options.queue} is not writable")
            return options.queue
        if not self.queues:
            raise NotWritable(f"topic {self._name} has no writable queue")
        if options.ordering_key is not None:
            return self._keyed.of(options.ordering_key)
        self._turn += 1
        return self._brokers.choose(self.queues, self._turn, now_ms)

    def _check_compacted(self, options: SendOptions) -> None:
        """Check that a message goes to the queue of its key, as a compacted topic demands."""
        if options.ordering_key is None:
            raise BadBatch(
                f"a message for topic {self._name} has no ordering key; the topic is compacted: it "
                "keeps the newest message of each key",
                remedy="Send the message with ordering_key=..., or to a topic without compaction.",
                facts={"field": "ordering_key"},
            )
        if options.queue is not None and options.queue != self._keyed.of(options.ordering_key):
            raise InvalidArgument(
                f"queue {options.queue} is not that of the ordering key; topic {self._name} is "
                "compacted, so all messages of a key must be in one queue",
                remedy="Leave out the queue.",
                facts={"field": "queue"},
            )
