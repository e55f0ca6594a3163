"""A run of requests with faults drawn from a seed, and its checks.

Requesters send requests from several tasks, and die at any step. Responders reply with the number
of the request, fail at times, and leave at any step. Storage nodes, which have the reply inboxes,
are killed at any moment, and the network loses, repeats and delays calls. In the end all faults
stop; then each request gets its reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from unittest.mock import patch

from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.handler_results import RetryLater
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.requests import Reply
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq._producer.requester import SILENCE_S_MAX, RequestFailed, RequestTimedOut
from batonmq.errors import BatonError
from batonmq_server.storage import reply_server
from batonmq_server.storage.core.reply_inboxes import ReplyInboxes
from batonmq_server.testing import MemoryBroker, run_virtual
from batonmq_server.testing.memory_network import Faults
from tests.simulation.run_record import RunRecord
from tests.support.conditions import until

TOPIC, GROUP = "prices", "quotes"
BROKERS, REQUESTERS, WORKERS, RESPONDERS = 3, 2, 3, 2
FAULTS_S, END_S = 15, 120
TIMEOUTS_MS = (500, 2_000, 10_000)
PATIENT_MS = 60_000
"""Longer than a retry and the silence of a node together: such a request never times out, because
the loss of its inbox is noticed."""
ROUNDING_MS = 1
FAULTS = Faults(loss=0.004, duplicate=0.02, slow=0.01, slow_ms_max=2_000)
PRODUCER = ProducerSettings(request_timeout_ms=2_000)
RETRIES_MAX = 1
CONSUMER = ConsumerSettings(consume_from="first", send_back=True, retries_max=RETRIES_MAX)


@dataclass(slots=True)
class RequestRun(RunRecord):
    """What is known of a run outside the cluster.

    Attributes:
        replied: Replies that handlers have returned, by number of the request.
        inboxes: The inboxes of each storage process that was started.
    """

    replied: dict[int, set[str]] = field(default_factory=dict)
    inboxes: list[ReplyInboxes[object]] = field(default_factory=list)

    def ended(self, number: int, outcome: str, timeout_ms: int, took_ms: float) -> None:
        """Judge the end of a request.

        Args:
            outcome: The text of the reply or of its error; empty if it timed out.
        """
        if took_ms > timeout_ms + ROUNDING_MS:
            self.fail("in time", f"{number} ended after {took_ms:.0f} of {timeout_ms} ms")
        if not outcome and took_ms < timeout_ms - ROUNDING_MS:
            self.fail("in time", f"{number} timed out after {took_ms:.0f} of {timeout_ms} ms")
        if not outcome and timeout_ms == PATIENT_MS:
            self.fail("failed at once", f"{number} waited for {timeout_ms} ms")
        if outcome and outcome not in self.replied.get(number, ()):
            self.fail("own reply", f"{number} got {outcome!r}: {self.replied.get(number)}")

    def judge_inboxes(self) -> None:
        """Check that nothing is left of requesters that have ended."""
        left = [len(each) for each in self.inboxes]
        waiting = [each._waiting_bytes for each in self.inboxes]
        if any(left) or any(waiting):
            self.fail("nothing left", f"open inboxes {left}, waiting bytes {waiting}")


@contextmanager
def _noted_inboxes(run: RequestRun) -> Iterator[None]:
    """Note the inboxes of each storage process that starts."""

    class Noted(ReplyInboxes[object]):
        def __init__(self, new_id: object) -> None:
            super().__init__(new_id)  # type: ignore[arg-type]
            run.inboxes.append(self)

    with patch.object(reply_server, "ReplyInboxes", Noted):
        yield


def play_requests(seed: str) -> RequestRun:
    """Play the run of a seed."""
    run = RequestRun(seed)
    broker = MemoryBroker(broker_count=BROKERS, seed=seed, faults=FAULTS)
    with _noted_inboxes(run):
        run_virtual(_play(run, Random(seed), broker))
    return run


async def _play(run: RequestRun, random: Random, cluster: MemoryBroker) -> None:
    now_s = asyncio.get_running_loop().time
    async with cluster as broker:
        await broker.create_topic(TOPIC, 2 * BROKERS)
        ended = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for number in range(RESPONDERS):
                draws = Random(f"{run.seed}/responder/{number}")
                tasks.create_task(_responders(run, broker, draws, ended))
            async with asyncio.TaskGroup() as requesters:
                for number in range(REQUESTERS):
                    draws = Random(f"{run.seed}/requester/{number}")
                    requesters.create_task(_requesters(run, broker, draws))
                requesters.create_task(_patient_requester(run, broker))
                end_s = now_s() + FAULTS_S
                while now_s() < end_s:
                    await asyncio.sleep(random.uniform(0.5, 5))
                    await broker.kill(f"broker-{random.randrange(BROKERS)}")
                    run.counts["broker kills"] += 1
            await _last_requests(run, broker)
            ended.set()
        with suppress(TimeoutError):
            await until(lambda: not any(map(len, run.inboxes)), timeout_s=SILENCE_S_MAX + 5)
        run.judge_inboxes()


async def _last_requests(run: RequestRun, broker: MemoryBroker) -> None:
    """Send requests after the end of the faults, until each has a reply."""
    broker._environment.network.faults = broker._quiet
    now_s = asyncio.get_running_loop().time
    end_s = now_s() + END_S
    async with broker.producer(PRODUCER) as producer:
        for _ in range(10):
            while not await _requested(run, producer, 20_000):
                if now_s() > end_s:
                    run.fail("answered", f"no reply within {END_S} s after the faults")
                    return


async def _patient_requester(run: RequestRun, broker: MemoryBroker) -> None:
    """Send requests that may take long, one after the other, until the faults end."""
    now_s = asyncio.get_running_loop().time
    end_s = now_s() + FAULTS_S
    async with broker.producer(PRODUCER) as producer:
        while now_s() < end_s:
            await _requested(run, producer, PATIENT_MS)


async def _requesters(run: RequestRun, broker: MemoryBroker, random: Random) -> None:
    """Run one requester after the other; each dies after a while, at any step."""
    end_s = asyncio.get_running_loop().time() + FAULTS_S
    while asyncio.get_running_loop().time() < end_s:
        try:
            async with (
                asyncio.timeout(random.uniform(1, 10)),
                broker.producer(PRODUCER) as producer,
                asyncio.TaskGroup() as tasks,
            ):
                for _ in range(WORKERS):
                    tasks.create_task(_ask(run, producer, Random(random.getrandbits(32))))
        except TimeoutError:
            run.counts["requester deaths"] += 1


async def _ask(run: RequestRun, producer: Producer, random: Random) -> None:
    """Send requests until the requester dies."""
    while True:
        await _requested(run, producer, random.choice(TIMEOUTS_MS))
        await asyncio.sleep(random.choice((0, 0.01, 0.5)))


async def _requested(run: RequestRun, producer: Producer, timeout_ms: int) -> bool:
    """Send a request, judge its end, and return whether it was replied to."""
    now_s = asyncio.get_running_loop().time
    number, begin_s, outcome, ended = run.next_number(), now_s(), "", True
    try:
        reply = await producer.request(TOPIC, b"%d" % number, timeout_ms=timeout_ms)
        outcome = reply.body.decode()
        run.counts["replied"] += 1
    except RequestFailed as error:
        outcome = str(error)
        run.counts["failed"] += 1
    except RequestTimedOut:
        run.counts["timed out"] += 1
    except BatonError:
        run.counts["lost inbox"] += 1
        ended = False
    took_ms = 1_000 * (now_s() - begin_s)
    if ended or took_ms > timeout_ms:
        run.ended(number, outcome, timeout_ms, took_ms)
    return bool(outcome)


async def _responders(
    run: RequestRun, broker: MemoryBroker, random: Random, ended: asyncio.Event
) -> None:
    """Run one responder after the other; each leaves after a while, the last one at the end."""
    end_s = asyncio.get_running_loop().time() + FAULTS_S

    async def reply(message: ReceivedMessage) -> Reply | RetryLater:
        number = int(message.body)
        await asyncio.sleep(random.choice((0, 0, 0.01, 0.1, 0.3, 3)))
        replies = run.replied.setdefault(number, set())
        kind = random.random()
        if kind < 0.1:
            if message.attempts > RETRIES_MAX:
                replies.add("the handler failed")
            return RetryLater(delay_ms=1_000)
        if kind < 0.2:
            replies.add(f"{number} is refused")
            return Reply(error=f"{number} is refused")
        if kind < 0.25:
            replies.add(f"ValueError: {number} is unknown")
            raise ValueError(f"{number} is unknown")
        text = f"{number}={random.randrange(100)}"
        replies.add(text)
        return Reply(text.encode())

    while not ended.is_set():
        async with (
            broker.consumer(GROUP, {TOPIC: "*"}, CONSUMER) as consumer,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(consumer.run(reply))
            faulty = asyncio.get_running_loop().time() < end_s
            try:
                async with asyncio.timeout(random.uniform(3, 15) if faulty else None):
                    await ended.wait()
            except TimeoutError:
                run.counts["responder ends"] += 1
            consumer.stop()
