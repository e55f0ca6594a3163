"""A node in memory; the test controls its clock, its scheduled deliveries and its checks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry

from baton.storage.v1 import schedule_service_pb2 as pb
from baton.storage.v1 import transaction_service_pb2 as transaction_pb
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_from_pb
from batonmq._core.names import UNRESOLVED_TOPIC
from batonmq._telemetry.event_hub import EventHub
from batonmq.errors import BatonError, TopicNotFound, TopicNotFoundDetail
from batonmq_server.storage.appender import Appender
from batonmq_server.storage.core.check_streams import CheckStreams
from batonmq_server.storage.core.checks import LocalTopic
from batonmq_server.storage.core.retention import Retention, RetentionPolicy
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.flusher import Flusher
from batonmq_server.storage.metric_stream import StorageMetricStream
from batonmq_server.storage.metrics import StorageMetrics
from batonmq_server.storage.node import StorageNode, recover_directory
from batonmq_server.storage.node_role import StandaloneRole
from batonmq_server.storage.schedule_server import ScheduleServicer
from batonmq_server.storage.scheduled_deliverer import ScheduledDeliverer
from batonmq_server.storage.topic_cache import TopicCache
from batonmq_server.storage.transaction_checker import TransactionChecker, TransactionLimits
from batonmq_server.storage.transaction_server import TransactionServicer
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage.batches import NOW, TOPIC, TOPIC_ID, bodies

BROKER = "broker-a"
SEGMENT_BYTES = 4_096
UNRESOLVED_ID = 99


class SetClock(Clock):
    """Wall and monotonic time that a test sets."""

    def __init__(self) -> None:
        self.now_unix_ms, self.now_ms = NOW, 1_000_000

    def unix_ms(self) -> int:
        return self.now_unix_ms

    def monotonic_ms(self) -> int:
        return self.now_ms

    def pass_ms(self, ms: int) -> None:
        """Advance both clocks."""
        self.now_unix_ms += ms
        self.now_ms += ms


class TopicsTwin(TopicCache):
    """A topic cache that the test fills; `errors` has the error of topics that can't be looked up.

    Attributes:
        lookup_started: Set when `find` is called; the call then waits for `gate`.
    """

    def __init__(self) -> None:
        self.topics = {TOPIC: LocalTopic(TOPIC_ID, 8)}
        self.errors: dict[str, BatonError] = {}
        self.lookup_started, self.gate = asyncio.Event(), asyncio.Event()
        self.gate.set()

    def known(self, name: str) -> LocalTopic | None:
        return self.topics.get(name) if name not in self.errors else None

    async def find(self, name: str, epoch: int = 0) -> LocalTopic:
        self.lookup_started.set()
        await self.gate.wait()
        if name in self.errors:
            raise self.errors[name]
        if name not in self.topics:
            raise TopicNotFound(
                f"topic {name} does not exist", detail=TopicNotFoundDetail(topic=name)
            )
        return self.topics[name]


class Scene:
    """See the module."""

    def __init__(
        self, node: StorageNode, disk: MemoryDisk, clock: SetClock, in_thread: Any
    ) -> None:
        self.node, self.disk, self.clock = node, disk, clock
        self.identity = ""
        self.registry = CollectorRegistry()
        self.topics = TopicsTwin()
        metrics = StorageMetrics(self.registry)
        self.flusher = Flusher(
            node, lambda _: None, metrics.fsync_seconds.observe, in_thread=in_thread
        )
        policy = RetentionPolicy(age_ms_max=48 * 3_600_000, hours=frozenset({4}), log_bytes_max=0)
        self.retention = Retention(policy, SEGMENT_BYTES)
        self.appender = Appender(
            broker=BROKER,
            store=node.store,
            space=disk.space,
            flusher=self.flusher,
            retention=self.retention,
            role=StandaloneRole(node.store),
            metrics=metrics,
            stream=StorageMetricStream(EventHub("storage/a", 1, clock), BROKER),
            clock=clock,
        )
        self.due = ScheduledDeliverer(self.appender, self.topics, age_ms_max=policy.age_ms_max)
        self.servicer = ScheduleServicer(
            self.appender, self.topics, self.due.wake, identity_of=lambda _: self.identity
        )
        self.streams: CheckStreams[transaction_pb.TransactionCheck] = CheckStreams()
        limits = TransactionLimits(
            check_interval_ms=30_000,
            checks_max=3,
            age_ms_max=86_400_000,
            retention_ms=policy.age_ms_max,
        )
        self.checker = TransactionChecker(
            self.appender, self.topics, self.streams, limits, self.add_unresolved
        )
        self.transactions = TransactionServicer(
            self.appender, self.topics, self.streams, self.checker.wake, check_first_ms=6_000
        )

    @property
    def store(self) -> MessageStore:
        return self.node.store

    async def add_unresolved(self) -> None:
        """Add the topic of unresolved messages, as a nameserver does."""
        self.topics.topics[UNRESOLVED_TOPIC] = LocalTopic(UNRESOLVED_ID, 1)

    async def begin(
        self, *batches: bytes, group: str = "shop", check_after_ms: int = 0
    ) -> list[str]:
        """Begin transactions; return their ids, or the reasons of errors."""
        items = [
            transaction_pb.BeginItem(batch=one, group=group, check_after_ms=check_after_ms)
            for one in batches
        ]
        request = transaction_pb.BeginRequest(items=items)
        answer = await self.transactions.Begin(request, None)  # type: ignore[arg-type]
        return [
            error_from_pb(one.error).reason if one.HasField("error") else one.receipt.transaction_id
            for one in answer.outcomes
        ]

    async def end_all(self, *ends: tuple[str, str]) -> list[str]:
        """End transactions by one call; return offset, state or reason of each outcome."""
        items = [
            transaction_pb.EndItem(
                transaction_id=name,
                state=transaction_pb.TransactionState.Value(f"TRANSACTION_STATE_{state}"),
            )
            for name, state in ends
        ]
        request = transaction_pb.EndRequest(items=items)
        answer = await self.transactions.End(request, None)  # type: ignore[arg-type]
        return [_end_text(one) for one in answer.outcomes]

    def open_count(self) -> int:
        return len(self.store.transactions.open)

    async def outcomes(self, *items: tuple[bytes, int]) -> list[pb.ScheduleOutcome]:
        request = pb.ScheduleRequest(
            items=[pb.ScheduleItem(batch=raw, deliver_unix_ms=at) for raw, at in items]
        )
        answer = await self.servicer.Schedule(request, None)  # type: ignore[arg-type]
        return list(answer.outcomes)

    async def schedule(self, raw: bytes, deliver_unix_ms: int) -> pb.ScheduleReceipt:
        """Schedule a batch and return its receipt; raise the item's error."""
        (outcome,) = await self.outcomes((raw, deliver_unix_ms))
        if outcome.HasField("error"):
            raise error_from_pb(outcome.error)
        return outcome.receipt

    async def schedule_after(
        self, raw: bytes, delay_ms: int, *, sender_unix_ms: int
    ) -> pb.ScheduleReceipt:
        """Schedule a batch with a delay, as a sender with its own clock does."""
        item = pb.ScheduleItem(
            batch=raw, deliver_unix_ms=sender_unix_ms + max(delay_ms, 0), delay_ms=delay_ms
        )
        request = pb.ScheduleRequest(items=[item])
        (outcome,) = (await self.servicer.Schedule(request, None)).outcomes  # type: ignore[arg-type]
        if outcome.HasField("error"):
            raise error_from_pb(outcome.error)
        return outcome.receipt

    async def cancel(self, schedule_id: str) -> None:
        request = pb.CancelScheduledRequest(schedule_id=schedule_id)
        await self.servicer.CancelScheduled(request, None)  # type: ignore[arg-type]

    async def deliver(self) -> None:
        """Run rounds until no batch is due."""
        while await self.due.deliver():
            pass

    async def rewrite_old(self) -> None:
        """Run rounds until no batch must be rewritten."""
        self.clock.now_ms += 10_000
        while await self.due.rewrite_old():
            pass

    def waiting(self) -> int:
        return len(self.store.schedule.waiting)

    def bodies(self, queue_id: int = 0) -> list[bytes]:
        return bodies(self.store, queue_id)

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"baton_storage_{name}", labels) or 0


def _end_text(outcome: transaction_pb.EndOutcome) -> str:
    if outcome.HasField("error"):
        return error_from_pb(outcome.error).reason
    receipt = outcome.receipt
    state = transaction_pb.TransactionState.Name(receipt.state).removeprefix("TRANSACTION_STATE_")
    place = f" {receipt.first_offset}" if state == "COMMITTED" else ""
    return f"{state}{place}{' again' if receipt.duplicate else ''}"


async def at_once(call: Callable[[Any], None], argument: Any) -> None:
    """Run the blocking call in the event loop, so that tests are deterministic."""
    call(argument)


@asynccontextmanager
async def new_scene(
    disk: MemoryDisk | None = None, clock: SetClock | None = None, in_thread: Any = at_once
) -> AsyncIterator[Scene]:
    """Yield a node recovered from `disk`; its flusher runs."""
    disk = disk or MemoryDisk()
    with recover_directory(disk, segment_bytes=SEGMENT_BYTES, monotonic_ms=lambda: 0) as node:
        scene = Scene(node, disk, clock or SetClock(), in_thread)
        async with asyncio.TaskGroup() as tasks:
            flushing = tasks.create_task(scene.flusher.run())
            yield scene
            flushing.cancel()
