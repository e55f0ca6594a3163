"""The work of `baton traffic`: a steady flow of messages, and a check of their deliveries.

One producer sends at a steady rate; a few members, each a process, handle the messages and write
journals. Sending ends with SIGTERM or after a time. When all messages are handled, or none is for
a long time, the members leave, and the journals are compared with the sent messages. Meanwhile the
user may kill, pause or disconnect processes of the cluster.
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
from batonmq._producer.producer_settings import ProducerSettings
from batonmq._producer.receipts import PendingReceipt
from batonmq.admin.admin import Admin
from batonmq.errors import BatonError, TopicExists
from batonmq_server.demo.delivery_report import DeliveryReport, compare_deliveries
from batonmq_server.demo.journal import read
from batonmq_server.demo.member_processes import MemberGroup, MemberOptions

TOPIC, GROUP, QUEUE_COUNT = "traffic", "drivers", 8
TICKS_PER_S = 10
WAITING_MAX = 100_000
"""Sending pauses at this number of messages without a receipt."""
STALL_S = 120.0
"""After the last message, a message that is not handled for this long counts as lost."""
PATIENT = ProducerSettings(delivery_timeout_ms=600_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficPlan:
    """Options of the traffic.

    Attributes:
        nameserver: host:port of the nameservers.
        rate: Messages sent per second.
        members: Number of members that handle them.
        seconds: How long to send; 0: until SIGTERM.
        folder: Folder for the journals of the members; it must be empty.
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
    """Sends messages at a steady rate.

    Attributes:
        sent: Keys of messages with a receipt, with their position in the order of sending.
        unsure: Keys of messages that may be stored or not; they are not checked.
        stop: Set to end the sending.
    """

    sent: dict[str, int] = field(default_factory=dict)
    unsure: set[str] = field(default_factory=set)
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def produce(self, plan: TrafficPlan) -> None:
        """Send until `stop` is set, and wait for all receipts."""
        waiting: asyncio.Queue[tuple[str, int, PendingReceipt] | None] = asyncio.Queue(WAITING_MAX)
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

    async def _settle(self, waiting: asyncio.Queue[tuple[str, int, PendingReceipt] | None]) -> None:
        while (one := await waiting.get()) is not None:
            key, number, pending = one
            try:
                await pending
            except BatonError as error:
                print(f"no receipt: {error}", file=sys.stderr, flush=True)
                self.unsure.add(key)
            else:
                self.sent[key] = number


@dataclass(frozen=True, slots=True)
class TrafficResult:
    """The result of the traffic; see `DeliveryReport` for the figures."""

    sent: int
    unsure: int
    consumed: int
    lost: int
    duplicated: int
    unflagged: int
    misordered: int
    foreign: int

    def ok(self, repeats: bool) -> bool:
        """Return whether every message was handled once and in order.

        Args:
            repeats: Whether a message flagged as redelivered may be handled twice.
        """
        twice = self.unflagged if repeats else self.duplicated
        return self.lost == twice == self.misordered == self.foreign == 0 < self.sent


def balance(producer: TrafficProducer, journals: list[Path]) -> TrafficResult:
    """Compare the journals with the sent messages."""
    handled, _ = read(journals)
    report: DeliveryReport = compare_deliveries(
        [h for h in handled if h.key not in producer.unsure], producer.sent
    )
    return TrafficResult(sent=len(producer.sent), unsure=len(producer.unsure), **asdict(report))


async def run(plan: TrafficPlan) -> TrafficResult:
    """Run the traffic on a running cluster; print the progress once a second."""
    async with Admin(plan.nameserver, security=plan.security) as admin:
        try:
            await admin.create_topic(TOPIC, QUEUE_COUNT)
        except TopicExists:
            print(f"topic {TOPIC} exists already", file=sys.stderr)
    producer = TrafficProducer()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, producer.stop.set)
    part = MemberOptions(
        nameserver=plan.nameserver,
        group=GROUP,
        topic=TOPIC,
        expression="*",
        folder=plan.folder,
        security=plan.security,
    )
    async with MemberGroup(part, plan.members) as group, asyncio.TaskGroup() as tasks:
        for member in group.members:
            member.join()
        reporting = tasks.create_task(_report_progress(producer, group))
        stopping = tasks.create_task(_stop_after(producer, plan.seconds))
        await producer.produce(plan)
        stopping.cancel()
        await _wait_until_handled(producer, group)
        for member in group.members:
            member.leave()
        await group.ended(group.members)
        reporting.cancel()
        return balance(producer, group.journals)


async def _wait_until_handled(producer: TrafficProducer, group: MemberGroup) -> None:
    """Wait until all sent messages are handled, or none was for a long time."""
    loop = asyncio.get_running_loop()
    before, moved_s = -1, loop.time()
    while loop.time() - moved_s < STALL_S:
        if group.handled != before:
            before, moved_s = group.handled, loop.time()
            if before >= len(producer.sent) and not balance(producer, group.journals).lost:
                return
        await asyncio.sleep(0.5)


async def _report_progress(producer: TrafficProducer, group: MemberGroup) -> None:
    while True:
        print(json.dumps({"sent": len(producer.sent), "handled": group.handled}), flush=True)
        await asyncio.sleep(1)


async def _stop_after(producer: TrafficProducer, seconds: float) -> None:
    if seconds:
        await asyncio.sleep(seconds)
        producer.stop.set()
