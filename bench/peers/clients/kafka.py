"""Client process of Kafka with confluent-kafka: `python -m bench.peers.clients.kafka TASK`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from bench.peers.clients.steps import Client, Sender, run
from bench.peers.clients.task import PARTITIONS, SENDS_IN_FLIGHT, TOPICS, Task, Work

_WAIT_S = 60


class KafkaSender(Sender):
    """The producer of confluent-kafka; its calls block, and its receipts come in callbacks."""

    bulk_messages = 50_000

    def __init__(self, task: Task) -> None:
        linger = {"linger.ms": 0} if task.kind == "send-one" else {}
        self._producer = Producer(
            {
                "bootstrap.servers": task.address,
                "acks": "all",
                "queue.buffering.max.messages": 1_000_000,
                **linger,
            }
        )
        self._topic = task.topic
        self._in_flight = 0

    def _delivered(self, error: KafkaError | None, _: Message) -> None:
        if error is not None:
            raise KafkaException(error)
        self._in_flight -= 1

    def _wait_until(self, in_flight_max: int) -> None:
        while self._in_flight > in_flight_max:
            self._producer.poll(0.01)

    async def send_bulk(self, bodies: Sequence[bytes]) -> None:  # noqa: D102
        # Returns while this call is in flight and the one before it is stored; `flush` is the end.
        self._wait_until(len(bodies))
        values = [{"value": body} for body in bodies]
        queued = self._producer.produce_batch(self._topic, values, on_delivery=self._delivered)
        assert queued == len(bodies), f"{len(bodies) - queued} messages were not queued"
        self._in_flight += queued

    async def send(self, body: bytes) -> None:  # noqa: D102
        self.post(body)
        while self._in_flight:
            self._producer.poll(1)

    def post(self, body: bytes) -> None:  # noqa: D102
        self._producer.produce(self._topic, body, on_delivery=self._delivered)
        self._in_flight += 1
        self._producer.poll(0)

    async def flush(self) -> None:  # noqa: D102
        self._producer.flush(_WAIT_S)
        assert not self._in_flight, f"{self._in_flight} messages have no receipt"

    async def keep_in_flight(self, body: bytes, work: Work) -> None:  # noqa: D102
        while not work.is_over():
            self.post(body)
            work.add(1)
            self._wait_until(SENDS_IN_FLIGHT - 1)


class KafkaClient(Client):
    """The library confluent-kafka."""

    async def create_topics(self, task: Task) -> None:  # noqa: D102
        topics = [NewTopic(topic, PARTITIONS, 1) for topic in TOPICS]
        admin = AdminClient({"bootstrap.servers": task.address})
        for created in admin.create_topics(topics).values():
            created.result(_WAIT_S)

    def sender(self, task: Task) -> Sender:  # noqa: D102
        return KafkaSender(task)

    async def receive(  # noqa: D102
        self, task: Task, handle: Callable[[Sequence[bytes]], bool]
    ) -> None:
        consumer = _consumer(task)
        while True:
            messages = consumer.consume(10_000, timeout=0.1)
            if messages and handle([_body(message) for message in messages]):
                break
        consumer.close()

    async def receive_each(  # noqa: D102
        self, task: Task, handle: Callable[[bytes], bool]
    ) -> None:
        consumer = _consumer(task)
        while True:
            message = consumer.poll(1)
            if message is not None and handle(_body(message)):
                break
        consumer.close()


def _body(message: Message) -> bytes:
    if (error := message.error()) is not None:
        raise KafkaException(error)
    body: bytes = message.value()
    return body


def _consumer(task: Task) -> Consumer:
    consumer = Consumer(
        {
            "bootstrap.servers": task.address,
            "group.id": task.group,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([task.topic])
    return consumer


if __name__ == "__main__":
    run(KafkaClient())
