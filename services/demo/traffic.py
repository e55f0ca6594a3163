"""Messages that flow until somebody says stop, and what became of each.

`baton traffic`: one producer sends at a steady rate, and a few members, processes of their own,
handle and journal. SIGTERM, or the end of the time, ends the sending; once everything is handled,
or nothing moves any more, the members leave, and what was sent is compared with what was handled.
Meanwhile somebody kills, pauses and cuts off whatever the cluster consists of.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from batonmq._connection.security import Security
from batonmq._core.records import Message
from batonmq._producer.producer import Producer
from batonmq._producer.receipts import Pending
from batonmq._producer.settings import ProducerSettings
from batonmq.admin.admin import Admin
from batonmq.errors import BatonError, TopicExists
from batonmq_server.demo.delivery_report import DeliveryReport, compare_deliveries
from batonmq_server.demo.journal import read
from batonmq_server.demo.member_processes import MemberGroup, MemberOptions

TOPIC, GROUP, QUEUE_COUNT = "traffic", "drivers", 8
TICKS_PER_S = 10
WAITING_MAX = 100_000
"""Messages without an outcome; sending waits then."""
STALL_S = 120.0
"""Nothing was handled for so long after the last message was sent: what is missing is lost."""
PATIENT = ProducerSettings(delivery_timeout_ms=600_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficPlan:
    """What is to flow.

    Attributes:
        rate: Messages sent in a second.
        members: How many handle them.
        seconds: How long is sent; 0: until SIGTERM.
        folder: Where members write their journals; empty.
        security: How to use TLS; None for none.
    """

    nameserver: str
    rate: int
    members: int
    seconds: float
    folder: Path
    security: Security | None = None


@dataclass(slots=True)
class TrafficProducer:
    """What was sent, as it happens.

    Attributes:
        sent: Confirmed messages by key, with their place in the order of sending.
        unsure: Keys of those that may be stored or not; nothing is asked of them.
    """

    sent: dict[str, int] = field(default_factory=dict)
    unsure: set[str] = field(default_factory=set)
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def produce(self, plan: TrafficPlan) -> None:
        """Send until told to stop, and wait for all outcomes."""
        waiting: asyncio.Queue[tuple[str, int, Pending] | None] = asyncio.Queue(WAITING_MAX)
        number = 0
        settings = replace(PATIENT, security=plan.security)
        async with Producer(plan.nameserver, settings) as producer, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._settle(waiting))
            while not self.stop.is_set():
                for _ in range(max(plan.rate // TICKS_PER_S, 1)):
                    key = f"m{number}"
                    message = Message(key.encode(), keys=(key,))
                    pending = await producer.submit(TOPIC, message, ordering_key=key)
                    await waiting.put((key, number, pending))
                    number += 1
                await asyncio.sleep(1 / TICKS_PER_S)
            await waiting.put(None)

    async def _settle(self, waiting: asyncio.Queue[tuple[str, int, Pending] | None]) -> None:
        while (one := await waiting.get()) is not None:
            key, number, pending = one
            try:
                await pending
            except BatonError as error:
                print(f"not confirmed: {error}", file=sys.stderr, flush=True)
                self.unsure.add(key)
            else:
                self.sent[key] = number


@dataclass(frozen=True, slots=True)
class TrafficResult:
    """The balance; see `batonmq_server.demo.journal.Verdict` for the words."""

    sent: int
    unsure: int
    consumed: int
    lost: int
    duplicated: int
    unflagged: int
    misordered: int
    foreign: int

    def ok(self, repeats: bool) -> bool:
        """Nothing lost, everything in order, nothing twice.

        Args:
            repeats: Whether a message that says so may come twice.
        """
        twice = self.unflagged if repeats else self.duplicated
        return self.lost == twice == self.misordered == self.foreign == 0 < self.sent


def balance(flow: TrafficProducer, journals: list[Path]) -> TrafficResult:
    """Compare the journals with what was sent."""
    handled, _ = read(journals)
    verdict: DeliveryReport = compare_deliveries(
        [h for h in handled if h.key not in flow.unsure], flow.sent
    )
    return TrafficResult(sent=len(flow.sent), unsure=len(flow.unsure), **asdict(verdict))


async def run(plan: TrafficPlan) -> TrafficResult:
    """Let messages flow on a cluster that is up, until told to stop; a line a second says how."""
    async with Admin(plan.nameserver, security=plan.security) as admin:
        try:
            await admin.create_topic(TOPIC, QUEUE_COUNT)
        except TopicExists:
            print("the topic is there already", file=sys.stderr)
    flow = TrafficProducer()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, flow.stop.set)
    part = MemberOptions(
        nameserver=plan.nameserver,
        group=GROUP,
        topic=TOPIC,
        expression="*",
        folder=plan.folder,
        security=plan.security,
    )
    async with MemberGroup(part, plan.members) as crew, asyncio.TaskGroup() as tasks:
        for member in crew.members:
            member.join()
        telling = tasks.create_task(_tell(flow, crew))
        ending = tasks.create_task(_end(flow, plan.seconds))
        await flow.produce(plan)
        ending.cancel()
        await _handled(flow, crew)
        for member in crew.members:
            member.leave()
        await crew.ended(crew.members)
        telling.cancel()
        return balance(flow, crew.journals)


async def _handled(flow: TrafficProducer, crew: MemberGroup) -> None:
    """Until everything sent is handled, or nothing has been for long."""
    loop = asyncio.get_running_loop()
    before, moved_s = -1, loop.time()
    while loop.time() - moved_s < STALL_S:
        if crew.handled != before:
            before, moved_s = crew.handled, loop.time()
            if before >= len(flow.sent) and not balance(flow, crew.journals).lost:
                return
        await asyncio.sleep(0.5)


async def _tell(flow: TrafficProducer, crew: MemberGroup) -> None:
    while True:
        print(json.dumps({"sent": len(flow.sent), "handled": crew.handled}), flush=True)
        await asyncio.sleep(1)


async def _end(flow: TrafficProducer, seconds: float) -> None:
    if seconds:
        await asyncio.sleep(seconds)
        flow.stop.set()
