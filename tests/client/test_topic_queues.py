"""Goal: a producer keeps nothing of earlier routes of a topic once no message is in flight.

Method: the queues of one topic, and routes as after a new leader of its broker.
"""

from __future__ import annotations

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2 as storage_pb
from batonmq._core.broker_health import BrokerHealth
from batonmq._core.queues import QueueRef
from batonmq._producer.receipts import BatchOutcome
from batonmq._producer.topic_queues import TopicQueues

QUEUE = QueueRef("t", "a", 0)


def route(generation: int, queue_count: int = 1) -> pb.Route:
    spread = [pb.QueueSpread(broker="a", queue_count=queue_count)]
    return pb.Route(topic=pb.Topic(name="t", spread=spread), generation=generation)


def test_route_that_changes_again_and_again_leaves_nothing_of_earlier_ones() -> None:
    topic = TopicQueues(route(1), BrokerHealth())
    for generation in range(2, 100):
        in_flight = BatchOutcome(QUEUE)
        topic.change(route(generation), {QUEUE: in_flight})
        in_flight.settle(storage_pb.AppendReceipt(durability=storage_pb.DURABILITY_FSYNCED))
    assert len(topic._earlier) == 1


async def test_message_in_flight_before_several_changes_still_delays_its_key() -> None:
    topic = TopicQueues(route(1), BrokerHealth())
    in_flight = BatchOutcome(QUEUE)
    topic.change(route(2, 8), {QUEUE: in_flight})
    topic.change(route(3, 8), {})
    moved = next(key for key in map(str, range(100)) if topic._keyed.of(key) != QUEUE)
    assert topic.must_wait(moved)
    in_flight.settle(storage_pb.AppendReceipt(durability=storage_pb.DURABILITY_FSYNCED))
    assert not topic.must_wait(moved)
