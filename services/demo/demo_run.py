"""The demo: a real data set through a real cluster, while queues change hands.

1. Every flight is published to a topic with 8 queues: key = flight id, tag = carrier.
2. A group consumes them with 1, then 3, 2, 4 and again 1 member, processes of their own that
   join and leave gracefully while messages flow. A second group takes two carriers only.
3. Journals that the members wrote are compared with what was sent, message by message.
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
from batonmq._producer.settings import ProducerSettings
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
"""Parts of the messages after which the number of members changes."""
STALL_S = 90.0
"""No message in so long: the demo gives up and says what is missing."""
TICK_S = 0.05

Progress = Callable[[str, int, int], None]
"""Told: what is going on, how much of it is done, out of how much."""


class DemoStalled(Exception):
    """Nothing has moved for a long time."""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo found; `ok` is its verdict.

    Attributes:
        published: Messages sent and confirmed.
        consumed: Different messages the first group handled.
        lost: Messages it did not handle.
        duplicated: Handlings beyond the first of a message.
        duplicated_unflagged: Those of them that did not say so.
        misordered: Messages handled after one that stands behind them in their queue.
        handovers: Times a queue went from one member to another.
        handover_p50_ms, handover_p99_ms, handover_max_ms: From the old owner's last start of a
            message to the new owner's grant.
        publish_rate, consume_rate: Messages per second, all members together.
        filtered_expected, filtered_consumed: Messages of the second group.
        filtered_wrong: Messages of the second group that were lost, doubled, misordered or
            not its own.
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
        """Nothing lost, nothing twice, everything in order, in both groups."""
        return (
            self.lost == self.duplicated == self.misordered == self.filtered_wrong == 0
            and self.consumed == self.published
            and self.filtered_consumed == self.filtered_expected
        )

    def as_dict(self) -> dict[str, int]:
        """All numbers by name."""
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
    """Run the demo against a cluster that is up.

    Args:
        security: How to use TLS; None for none.
        nameserver: host:port.
        folder: Where the members write their journals; empty.
        pace: Messages a member handles in a second, at most; 0 for no limit.

    Raises:
        DemoStalled: messages stopped flowing.
        MemberFailed: a member's process died.
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
    wanted = {f.flight_id: place for place, f in enumerate(flights) if f.carrier in CARRIERS}
    for part in (main, filtered):
        part.folder.mkdir(parents=True)
    async with AsyncExitStack() as crews:
        crew = await crews.enter_async_context(MemberGroup(main, _crew_size()))
        other = await crews.enter_async_context(MemberGroup(filtered, 1))
        started_ms = clock.monotonic_ms()
        other.members[0].join()
        present = await _change_members(crew, len(flights), progress)
        consume_ms = clock.monotonic_ms() - started_ms
        await _until(other, len(wanted), progress, "filtered group")
        for member in (*present, *other.members):
            member.leave()
        await crew.ended(present)
        await other.ended(other.members)
    sent = {flight.flight_id: place for place, flight in enumerate(flights)}
    handled, events = read(crew.journals)
    filtered_handled, _ = read(other.journals)
    verdict, filtered_verdict = (
        compare_deliveries(handled, sent),
        compare_deliveries(filtered_handled, wanted),
    )
    took = handovers_ms(events)
    return DemoResult(
        published=len(flights),
        consumed=verdict.consumed,
        lost=verdict.lost,
        duplicated=verdict.duplicated,
        duplicated_unflagged=verdict.unflagged,
        misordered=verdict.misordered,
        handovers=len(took),
        handover_p50_ms=_percentile(took, 50),
        handover_p99_ms=_percentile(took, 99),
        handover_max_ms=took[-1] if took else 0,
        publish_rate=round(1000 * len(flights) / max(publish_ms, 1)),
        consume_rate=round(1000 * len(flights) / max(consume_ms, 1)),
        filtered_expected=len(wanted),
        filtered_consumed=filtered_verdict.consumed,
        filtered_wrong=_wrong(filtered_verdict),
    )


async def publish(producer: Producer, flights: Sequence[Flight], progress: Progress) -> None:
    """Send every flight and wait for every receipt."""
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


async def _change_members(crew: MemberGroup, count: int, progress: Progress) -> list[MemberProcess]:
    """Let the group grow and shrink while it consumes; the members that are left."""
    idle = list(crew.members)
    present: list[MemberProcess] = []
    for phase, (size, share) in enumerate(zip(SIZES, (*SHARES, 1.0), strict=True), start=1):
        while len(present) < size:
            member = idle.pop(0)
            member.join()
            present.append(member)
        gone = [present.pop(0) for _ in range(len(present) - size)]
        for member in gone:
            member.leave()
        await _until(crew, int(share * count), progress, f"{phase}: consume with {size}")
        if gone:
            await crew.ended(gone)
    return present


async def _until(crew: MemberGroup, count: int, progress: Progress, what: str) -> None:
    """Until the crew has handled `count` messages.

    Raises:
        DemoStalled: it handles no more.
    """
    loop = asyncio.get_running_loop()
    before, moved_s = -1, loop.time()
    while (now := crew.handled) < count:
        progress(what, now, count)
        if now != before:
            before, moved_s = now, loop.time()
        elif loop.time() - moved_s > STALL_S:
            raise DemoStalled(f"{what}: {now} of {count} messages, and no more for {STALL_S:g} s")
        await asyncio.sleep(TICK_S)
    progress(what, count, count)


def _crew_size() -> int:
    joins = [max(after - before, 0) for before, after in zip((0, *SIZES), SIZES, strict=False)]
    return sum(joins)


def _wrong(verdict: DeliveryReport) -> int:
    return verdict.lost + verdict.duplicated + verdict.misordered + verdict.foreign


def _percentile(ascending: Sequence[int], percent: int) -> int:
    if not ascending:
        return 0
    return ascending[min(len(ascending) * percent // 100, len(ascending) - 1)]
