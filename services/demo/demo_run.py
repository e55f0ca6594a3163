"""The demo: a real data set goes through a real cluster, while queues change owners.

1. Every flight is published to a topic with 8 queues: key = flight id, tag = carrier.
2. A group consumes them with 1, then 3, 2, 4 and again 1 member. Members are processes that join
   and leave gracefully while messages flow. A second group subscribes to two carriers only.
3. The members' journals are compared with the sent messages, one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from batonmq._common.clock import Clock
from batonmq._connection.security import Security
from batonmq._core.records import Message
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq.admin.admin import Admin
from batonmq_server.demo.delivery_report import DeliveryReport, compare_deliveries, handovers_ms
from batonmq_server.demo.flights import Flight
from batonmq_server.demo.journal import read
from batonmq_server.demo.member_processes import MemberGroup, MemberOptions, MemberProcess

TOPIC = "flights"
QUEUE_COUNT = 8
GROUP = "travellers"
FILTERED_GROUP = "two-carriers"
CARRIERS = ("AA", "UA")
SIZES = (1, 3, 2, 4, 1)
SHARES = (0.12, 0.32, 0.52, 0.72)
"""Shares of the messages after which the number of members changes."""
STALL_S = 90.0
"""The demo fails if no message is handled for this long."""
TICK_S = 0.05

Progress = Callable[[str, int, int], None]
"""Takes the name of the phase, the number of messages done, and their total."""


class DemoStalled(Exception):
    """No message was handled for a long time."""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The figures of the demo; `ok` tells whether it succeeded.

    Attributes:
        published: Messages sent, with a receipt.
        consumed: Distinct messages that the first group handled.
        lost: Messages that the first group did not handle.
        duplicated: Deliveries beyond the first of a message.
        duplicated_unflagged: Duplicates that were not flagged as redelivered.
        misordered: Messages first handled after a later message of their queue.
        handovers: Hand-overs of a queue from one member to another.
        handover_p50_ms, handover_p99_ms, handover_max_ms: Time from the start of draining at the
            old owner to the grant to the new owner.
        publish_rate, consume_rate: Messages per second, of all members together.
        filtered_expected, filtered_consumed: Messages of the second group.
        filtered_wrong: Messages of the second group that were lost, duplicated, misordered or
            filtered wrongly.
    """

    published: int
    consumed: int
    lost: int
    duplicated: int
    duplicated_unflagged: int
    misordered: int
    handovers: int
    handover_p50_ms: int
    handover_p99_ms: int
    handover_max_ms: int
    publish_rate: int
    consume_rate: int
    filtered_expected: int
    filtered_consumed: int
    filtered_wrong: int

    @property
    def ok(self) -> bool:
        """Whether both groups handled every message once and in order."""
        return (
            self.lost == self.duplicated == self.misordered == self.filtered_wrong == 0
            and self.consumed == self.published
            and self.filtered_consumed == self.filtered_expected
        )

    def as_dict(self) -> dict[str, int]:
        """Return all figures by name."""
        return asdict(self)


async def run_demo(
    nameserver: str,
    flights: Sequence[Flight],
    folder: Path,
    progress: Progress,
    *,
    pace: int = 0,
    security: Security | None = None,
) -> DemoResult:
    """Run the demo on a running cluster.

    Args:
        security: How to use TLS; None for none.
        nameserver: host:port.
        folder: Folder for the journals of the members; it must be empty.
        pace: Messages that a member handles per second, at most; 0 for no limit.

    Raises:
        DemoStalled: no message was handled for a long time.
        MemberFailed: a member's process failed.
    """
    clock = Clock()
    async with Admin(nameserver, security=security) as admin:
        await admin.create_topic(TOPIC, QUEUE_COUNT)
    started_ms = clock.monotonic_ms()
    settings = ProducerSettings(security=security)
    async with Producer(nameserver, settings) as producer:
        await publish(producer, flights, progress)
    publish_ms = clock.monotonic_ms() - started_ms

    main = MemberOptions(
        nameserver=nameserver,
        group=GROUP,
        topic=TOPIC,
        expression="*",
        folder=folder / "main",
        pace=pace,
        security=security,
    )
    filtered = MemberOptions(
        nameserver=nameserver,
        group=FILTERED_GROUP,
        topic=TOPIC,
        expression=" || ".join(CARRIERS),
        folder=folder / "filtered",
        pace=pace,
        security=security,
    )
    wanted = {f.flight_id: position for position, f in enumerate(flights) if f.carrier in CARRIERS}
    for part in (main, filtered):
        part.folder.mkdir(parents=True)
    async with AsyncExitStack() as groups:
        group = await groups.enter_async_context(MemberGroup(main, _group_size()))
        other = await groups.enter_async_context(MemberGroup(filtered, 1))
        started_ms = clock.monotonic_ms()
        other.members[0].join()
        present = await _change_members(group, len(flights), progress)
        consume_ms = clock.monotonic_ms() - started_ms
        await _until(other, len(wanted), progress, "filtered group")
        for member in (*present, *other.members):
            member.leave()
        await group.ended(present)
        await other.ended(other.members)
    sent = {flight.flight_id: position for position, flight in enumerate(flights)}
    handled, events = read(group.journals)
    filtered_handled, _ = read(other.journals)
    report, filtered_report = (
        compare_deliveries(handled, sent),
        compare_deliveries(filtered_handled, wanted),
    )
    durations = handovers_ms(events)
    return DemoResult(
        published=len(flights),
        consumed=report.consumed,
        lost=report.lost,
        duplicated=report.duplicated,
        duplicated_unflagged=report.unflagged,
        misordered=report.misordered,
        handovers=len(durations),
        handover_p50_ms=_percentile(durations, 50),
        handover_p99_ms=_percentile(durations, 99),
        handover_max_ms=durations[-1] if durations else 0,
        publish_rate=round(1000 * len(flights) / max(publish_ms, 1)),
        consume_rate=round(1000 * len(flights) / max(consume_ms, 1)),
        filtered_expected=len(wanted),
        filtered_consumed=filtered_report.consumed,
        filtered_wrong=_wrong(filtered_report),
    )


async def publish(producer: Producer, flights: Sequence[Flight], progress: Progress) -> None:
    """Send every flight, and wait for every receipt."""
    pending = []
    for number, flight in enumerate(flights):
        message = Message(flight.row.encode(), flight.carrier, (flight.flight_id,))
        pending.append(await producer.submit(TOPIC, message, ordering_key=flight.flight_id))
        if number % 1000 == 0:
            progress("publish", number, len(flights))
            await asyncio.sleep(0)
    for number, receipt in enumerate(pending):
        await receipt
        if number % 10_000 == 0:
            progress("publish", number, len(flights))
    progress("publish", len(flights), len(flights))


async def _change_members(
    group: MemberGroup, count: int, progress: Progress
) -> list[MemberProcess]:
    """Let members join and leave while messages flow; return the members at the end."""
    idle = list(group.members)
    present: list[MemberProcess] = []
    for phase, (size, share) in enumerate(zip(SIZES, (*SHARES, 1.0), strict=True), start=1):
        while len(present) < size:
            member = idle.pop(0)
            member.join()
            present.append(member)
        gone = [present.pop(0) for _ in range(len(present) - size)]
        for member in gone:
            member.leave()
        await _until(group, int(share * count), progress, f"{phase}: consume with {size}")
        if gone:
            await group.ended(gone)
    return present


async def _until(group: MemberGroup, count: int, progress: Progress, what: str) -> None:
    """Wait until the group has handled `count` messages.

    Raises:
        DemoStalled: it handled no message for a long time.
    """
    loop = asyncio.get_running_loop()
    before, moved_s = -1, loop.time()
    while (now := group.handled) < count:
        progress(what, now, count)
        if now != before:
            before, moved_s = now, loop.time()
        elif loop.time() - moved_s > STALL_S:
            raise DemoStalled(f"{what}: no progress for {STALL_S:g} s at {now} of {count} messages")
        await asyncio.sleep(TICK_S)
    progress(what, count, count)


def _group_size() -> int:
    joins = [max(after - before, 0) for before, after in zip((0, *SIZES), SIZES, strict=False)]
    return sum(joins)


def _wrong(report: DeliveryReport) -> int:
    return report.lost + report.duplicated + report.misordered + report.foreign


def _percentile(ascending: Sequence[int], percent: int) -> int:
    if not ascending:
        return 0
    return ascending[min(len(ascending) * percent // 100, len(ascending) - 1)]
