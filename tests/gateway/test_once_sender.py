"""Messages that two gateways send again and again are stored once, under faults, in virtual time.

Method: two senders with the same ids, a network that loses, repeats and delays calls, and brokers
that are killed. Then the topic is read.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from batonmq._connection.directory import Directory
from batonmq._core.records import Message
from batonmq._producer.item_sender import ItemSender
from batonmq._producer.once_sender import OnceMessage, OnceSender, StoredOnce
from batonmq._producer.producer_settings import ProducerSettings
from batonmq.errors import BatonError, Unreachable
from batonmq_server.gateway.core.once_ids import SentMessage, once_id
from batonmq_server.testing import MemoryBroker, run_virtual
from batonmq_server.testing.memory_network import Faults
from tests.support.conditions import until

TOPIC = "numbers"
SETTINGS = ProducerSettings(request_timeout_ms=1_000)
FAULTS = Faults(loss=0.05, duplicate=0.05, slow=0.03, slow_ms_max=3_000)
KINDS = ("now", "ordered", "later", "transaction")
COUNT = 40


def message(number: int, kind: str = "now") -> OnceMessage:
    return OnceMessage(
        topic=TOPIC,
        message=Message(b"%d" % number),
        once=once_id("", "client", SentMessage(TOPIC, str(number), "", b"", "", (), {})),
        ordering_key="key" if kind == "ordered" else None,
        deliver_unix_ms=1_700_000_000_000 if kind == "later" else None,
        transaction_group="shop" if kind == "transaction" else "",
    )


@asynccontextmanager
async def sender(broker: MemoryBroker) -> AsyncIterator[OnceSender]:
    """Yield a sender of a gateway of its own."""
    environment = broker._client().client_environment()
    directory = Directory(broker.nameserver, environment.random, environment.connect)
    async with asyncio.TaskGroup() as tasks:
        started = set[asyncio.Task[None]]()

        def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            task = tasks.create_task(work)
            started.add(task)
            return task

        try:
            yield OnceSender(directory, environment, spawn, SETTINGS)
        finally:
            for task in started:
                task.cancel()
            await directory.close()


async def send_until_stored(
    senders: list[OnceSender], sending: OnceMessage, random: Random
) -> StoredOnce:
    """Send as a client does that gives up an attempt after a while, and asks any gateway."""
    while True:
        one = random.choice(senders)
        timeout_s = random.choice((0.002, 0.02, 1.0))
        try:
            async with asyncio.timeout(timeout_s):
                stored = await one.send(sending, int(timeout_s * 1_000))
            if random.random() < 0.5:
                return stored
        except (BatonError, TimeoutError):
            pass


async def _play(seed: str) -> tuple[Counter[bytes], dict[bytes, set[str]], int]:
    """Return how often each body is stored, the ids of transactions by body, and the repeats."""
    random, repeats = Random(seed), 0
    ids: dict[bytes, set[str]] = {}
    async with MemoryBroker(broker_count=2, seed=seed, faults=FAULTS) as broker:
        await broker.create_topic(TOPIC, 4)
        async with sender(broker) as first, sender(broker) as second:
            senders = [first, second]

            async def run(number: int) -> None:
                nonlocal repeats
                sending = message(number, KINDS[number % len(KINDS)])
                for _ in range(2):
                    stored = await send_until_stored(senders, sending, random)
                    repeats += stored.duplicate
                    if stored.transaction_id:
                        ids.setdefault(sending.message.body, set()).add(stored.transaction_id)

            async with asyncio.TaskGroup() as tasks:
                for number in range(COUNT):
                    tasks.create_task(run(number))
                for _ in range(3):
                    await asyncio.sleep(random.uniform(0.1, 2))
                    await broker.kill(f"broker-{random.randrange(2)}")
        broker._environment.network.faults = Faults()
        await asyncio.sleep(30)  # the messages for later are delivered
        return Counter(one.body for one in await broker.messages(TOPIC)), ids, repeats


@pytest.mark.parametrize("seed", ["a", "b"])
def test_message_that_two_gateways_repeat_is_stored_once(seed: str) -> None:
    bodies, ids, repeats = run_virtual(_play(seed))
    visible = {b"%d" % n for n in range(COUNT) if KINDS[n % len(KINDS)] != "transaction"}
    assert set(bodies) == visible
    assert set(bodies.values()) == {1}, bodies.most_common(3)
    assert len(ids) == COUNT // len(KINDS)
    assert all(len(one) == 1 for one in ids.values()), "a transaction begins once"
    assert repeats > COUNT // 2, "messages were repeated"


def test_runs_find_senders_that_do_not_use_the_id_of_the_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real: Callable[..., Any] = ItemSender._take_lane
    monkeypatch.setattr(ItemSender, "_take_lane", lambda self, queue, once: real(self, queue, 0))
    bodies, _, _ = run_virtual(_play("a"))
    assert max(bodies.values()) > 1


async def reaches(one: OnceSender, sending: OnceMessage, broker: str) -> bool:
    try:
        return (await one.send(sending, 1_000)).queue.broker == broker
    except Unreachable:
        return False


def test_message_of_a_broker_that_is_not_listed_goes_to_another_one() -> None:
    async def play() -> None:
        async with MemoryBroker(broker_count=2) as broker:
            await broker.create_topic(TOPIC, 2)
            async with sender(broker) as one:
                before = [await one.send(message(n), 1_000) for n in range(20)]
                gone = [n for n in range(20) if before[n].queue.broker == "broker-0"]
                await broker._kill(["broker-0"])
                more = [message(n) for n in range(100, 110)]
                lost = [each for each in more if each.once % 2 == 0]
                assert gone, "some were for the broker that is gone"
                assert lost
                with pytest.raises(Unreachable):
                    await one.send(lost[0], 1_000)
                await until(lambda: reaches(one, lost[0], "broker-1"), 120)  # a lease of 60 s
                stored = await one.send(lost[0], 1_000)
                again = await one.send(lost[0], 1_000)
                assert (again.offset, again.duplicate) == (stored.offset, True)
                keyed = message(200, "ordered")
                assert one._topics[TOPIC].choose(keyed, frozenset()).broker == "broker-0"
                with pytest.raises(Unreachable):  # the order of a key is kept
                    await one.send(keyed, 1_000)
                broker._start(broker._running["broker-0"].service)
                await broker._registered()
                await until(lambda: reaches(one, lost[1], "broker-0"), 60)

    run_virtual(play())


def test_id_is_that_of_the_client_the_message_id_and_the_content() -> None:
    sent = SentMessage("orders", "m-1", "", b"body", "tag", ("k",), {"a": "b", "c": "d"})
    one = once_id("", "client", sent)
    assert 0 < one < 1 << 63
    assert once_id("", "client", sent._replace(properties={"c": "d", "a": "b"})) == one
    others = [
        once_id("alice", "client", sent),
        once_id("", "client-2", sent),
        *(
            once_id("", "client", sent._replace(**change))
            for change in (
                {"topic": "refunds"},
                {"message_id": "m-2"},
                {"message_group": "g"},
                {"body": b"other"},
                {"tag": ""},
                {"keys": ("k", "l")},
                {"keys": ()},
                {"properties": {"a": "b"}},
                {"properties": {"a": "bc", "": "d"}},
            )
        ),
    ]
    assert len({one, *others}) == len(others) + 1
