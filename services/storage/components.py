"""The components that work on an open data directory, and how they are built."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from baton.storage.v1.transaction_service_pb2 import TransactionCheck
from batonmq.errors import BatonError, NotLeader
from batonmq_server.runtime.access.stream_access import StreamAccess
from batonmq_server.runtime.app import Loop
from batonmq_server.runtime.group_gates import GroupGates
from batonmq_server.runtime.service_runtime import Runtime
from batonmq_server.storage.appender import Appender
from batonmq_server.storage.checkpointer import Checkpointer
from batonmq_server.storage.compaction_runner import CompactionLimits, CompactionRunner
from batonmq_server.storage.config import StorageSettings
from batonmq_server.storage.core.check_streams import CheckStreams
from batonmq_server.storage.core.commitlog import PositionRange
from batonmq_server.storage.core.keyindex import RunExtent
from batonmq_server.storage.core.queue_repair import QueueRepair
from batonmq_server.storage.core.retention import Retention
from batonmq_server.storage.damage_tracker import DamageTracker
from batonmq_server.storage.delivery_router import DeliveryRouter
from batonmq_server.storage.flusher import (
    BeginSync,
    Flusher,
    InThread,
    waiting_for_descriptors,
)
from batonmq_server.storage.key_run_repairer import KeyRunRepairer
from batonmq_server.storage.log_cleaner import CleaningBounds, LogCleaner
from batonmq_server.storage.long_polls import LongPolls
from batonmq_server.storage.metric_stream import FSYNC, StorageMetricStream
from batonmq_server.storage.metrics import StorageMetrics
from batonmq_server.storage.node import StorageNode
from batonmq_server.storage.node_role import NodeRole
from batonmq_server.storage.output_server import OutputServicer
from batonmq_server.storage.producer_expiry import expire_producers
from batonmq_server.storage.query_server import QueryServicer
from batonmq_server.storage.queue_repairer import QueueRepairer
from batonmq_server.storage.retention_losses import RetentionLosses
from batonmq_server.storage.schedule_server import ScheduleServicer
from batonmq_server.storage.scheduled_deliverer import ScheduledDeliverer
from batonmq_server.storage.scrubber import Scrubber
from batonmq_server.storage.segment_examiner import SegmentExaminer
from batonmq_server.storage.server import StorageServicer
from batonmq_server.storage.servicer_parts import StorageServicerParts
from batonmq_server.storage.tier_mover import TierMover, TierMoverParts
from batonmq_server.storage.tier_reader import LocalReads, RemoteReads, TierReader
from batonmq_server.storage.topic_cache import TopicCache
from batonmq_server.storage.topic_compactor import BrokerRetention, TopicCompactor
from batonmq_server.storage.topic_limits import TopicLimits
from batonmq_server.storage.topic_purger import TopicPurger
from batonmq_server.storage.topic_trimmer import TopicTrimmer
from batonmq_server.storage.transaction_checker import TransactionChecker, TransactionLimits
from batonmq_server.storage.transaction_server import TransactionServicer

DELIVER = "/baton.storage.v1.StorageService/Deliver"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageEnvironment:
    """The objects of a process that outlive a reopening of the data directory.

    Attributes:
        deliveries: Records deliveries at offsets; the app runs its loop.
        in_thread: Runs blocking calls outside the event loop.
        begin_sync: Syncs files without a thread; see `Flusher`.
        tier: Reads the object store of segments; None without a store.
        ensure_unresolved: Asks a nameserver for a queue of the topic of unresolved messages.
    """

    settings: StorageSettings
    runtime: Runtime
    metrics: StorageMetrics
    stream: StorageMetricStream
    topics: TopicCache
    gates: GroupGates
    deliveries: DeliveryRouter
    in_thread: InThread
    begin_sync: BeginSync
    ensure_unresolved: Callable[[], Awaitable[None]]
    tier: TierReader | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageComponents:
    """The components of an open data directory.

    Attributes:
        loops: Loops to run while the directory is open.
        tier: Reads segments that are only in the object store.
        due: Delivers scheduled batches; its loop runs on the leader only.
        checker: Checks open transactions; its loop runs on the leader only.
        trimmer: Trims topics with a retention of their own; its loop runs on the leader only.
        compactor: Compacts compacted topics; its loop runs on the leader only.
        examine: Checks a part of the log for damage; see `Scrubber.examine`.
    """

    node: StorageNode
    flusher: Flusher
    retention: Retention
    pulls: LongPolls
    checkpointer: Checkpointer
    cleaner: LogCleaner
    due: ScheduledDeliverer
    checker: TransactionChecker
    trimmer: TopicTrimmer
    compactor: TopicCompactor
    examine: Callable[[int, int], Awaitable[None]]
    damage: DamageTracker
    servicer: StorageServicer
    queries: QueryServicer
    scheduling: ScheduleServicer
    transactions: TransactionServicer
    outputs: OutputServicer
    tier: RemoteReads
    loops: Sequence[Loop]

    async def drain(self) -> None:
        """Sync the log; take a checkpoint if everything in the log is safe."""
        await self.flusher.sync()
        store = self.node.store
        if store.readable_position == store.log.next_position:
            await self.checkpointer.take()

    def fail_waiting_calls(self, why: str) -> None:
        """Fail all waiting calls, because this node is no longer the leader."""
        self.flusher.fail_waiters(why)
        self.end_reads(NotLeader(why, retry_after_ms=100))

    def end_reads(self, error: BatonError) -> None:
        """End all waiting pulls and all streams of deliveries with `error`."""
        self.pulls.end(error)
        self.servicer.streams.end(error)
        self.transactions.end_streams(error)


def build_components(
    node: StorageNode,
    environment: StorageEnvironment,
    role: NodeRole,
    leader_first_position: Callable[[], int | None] = lambda: None,
) -> StorageComponents:
    """Build the components that work on the open data directory `node`.

    Args:
        role: Role of this node in its replica set.
        leader_first_position: First position of the leader's log: a follower removes what lies
            before it.
    """
    settings, runtime, metrics = environment.settings, environment.runtime, environment.metrics
    in_thread, topics, stream = environment.in_thread, environment.topics, environment.stream
    require = runtime.guard.require if runtime.guard.on else None
    pulls = LongPolls(
        environment.deliveries.touch,
        polls_max=settings.long_polls_max,
        interval_ms=settings.touch_interval_ms,
    )
    metrics.waiting_pulls.set_function(lambda: len(pulls))
    flusher = Flusher(
        node,
        pulls.wake,
        partial(_synced, metrics, stream),
        interval_ms=settings.flush_interval_ms if settings.flush == "async" else 0,
        in_thread=in_thread,
        begin_sync=environment.begin_sync,
    )
    retention = Retention(settings.retention_policy(), settings.segment_bytes)
    stream.usage = lambda: retention.usage
    shortage = metrics.descriptor_shortages.inc

    async def free_reserve() -> None:
        await cleaner.free_reserve()

    checkpointer = Checkpointer(
        node, flusher, in_thread, shortage, partial(_count_purged, metrics), free_reserve
    )
    damage = DamageTracker(metrics.damaged_batches.inc)
    repairs = QueueRepairer(
        node, in_thread, partial(_queue_rebuilt, metrics, stream), runtime.random
    )
    key_repairs = KeyRunRepairer(node, in_thread, partial(_key_run_rebuilt, metrics, stream))
    patient = waiting_for_descriptors(in_thread, shortage)
    scrubber = Scrubber(
        node, damage, repairs.rebuild, bytes_per_s=settings.scrub_bytes_per_s, in_thread=patient
    )
    store = node.store
    limits = TopicLimits(store, topics, settings.retention_ms)
    tier: RemoteReads = environment.tier or LocalReads()
    movers: list[TierMover] = []
    cleaner = LogCleaner(
        store,
        node.disk,
        retention,
        CleaningBounds(
            needed_from=(
                store.schedule.waiting.oldest_position,
                store.transactions.open.oldest_position,
                limits.compacted_from,
                lambda: store.readable_position,
            ),
            checkpointed=checkpointer.position,
            checkpoint=checkpointer.take,
            wait_until_safe=flusher.wait_until_safe,
            is_gone=topics.is_gone,
            remove_later=node.checkpointing.remove_later,
            leader_first_position=leader_first_position,
            no_checkpoint=checkpointer.one_at_a_time,
            held_from=limits.held_from,
            gone_before=lambda: max((mover.gone_before() for mover in movers), default=0),
            repair=repairs.repair,
        ),
        metrics,
        clock=runtime.clock,
        interval_ms=settings.disk_interval_ms,
        in_thread=patient,
    )
    if environment.tier is not None:
        movers.append(
            TierMover(
                TierMoverParts(
                    node=node,
                    store=environment.tier.store,
                    role=role,
                    limits=limits,
                    retention=retention,
                    checkpointer=checkpointer,
                    cleaner=cleaner,
                    metrics=metrics.tier,
                    clock=runtime.clock,
                    in_thread=patient,
                    in_store_thread=environment.tier.in_thread,
                ),
                settings.tier_policy(),
                settings.tier_interval_ms,
            )
        )
    appender = Appender(
        broker=settings.broker_name,
        store=store,
        space=node.disk.space,
        flusher=flusher,
        retention=retention,
        role=role,
        metrics=metrics,
        stream=stream,
        clock=runtime.clock,
    )
    due = ScheduledDeliverer(appender, topics, age_ms_max=settings.retention_ms)
    check_streams: CheckStreams[TransactionCheck] = CheckStreams()
    checker = TransactionChecker(
        appender,
        topics,
        check_streams,
        TransactionLimits(
            check_interval_ms=settings.transaction_check_interval_ms,
            checks_max=settings.transaction_checks_max,
            age_ms_max=settings.transaction_age_ms_max,
            retention_ms=settings.retention_ms,
        ),
        environment.ensure_unresolved,
    )
    purger = TopicPurger(
        node.disk,
        appender,
        topics,
        checkpointer,
        cleaner.newest_unix_ms,
        age_ms_max=settings.retention_ms,
        in_thread=patient,
    )
    servicer = StorageServicer(
        StorageServicerParts(
            broker=settings.broker_name,
            syncs_at_once=settings.flush == "fsync",
            deliveries_max=settings.long_polls_max,
            store=store,
            appender=appender,
            topics=topics,
            gates=environment.gates,
            flusher=flusher,
            pulls=pulls,
            deliveries=environment.deliveries,
            retention=retention,
            role=role,
            losses=RetentionLosses(metrics.traffic),
            damage=damage,
            repair=repairs.repair,
            tier=tier,
            purge=purger.purge,
            scrubbed=lambda: scrubber.position,
            metrics=metrics,
            stream=stream,
            clock=runtime.clock,
            random=runtime.random,
            identity_of=runtime.guard.caller_identity,
            require=require,
            access_of=partial(StreamAccess, runtime.guard, DELIVER),
        )
    )

    return StorageComponents(
        node=node,
        flusher=flusher,
        retention=retention,
        pulls=pulls,
        checkpointer=checkpointer,
        cleaner=cleaner,
        due=due,
        checker=checker,
        trimmer=TopicTrimmer(
            appender,
            limits,
            SegmentExaminer(node.disk, store, topics, checkpointer.position, patient),
            tier,
        ),
        compactor=TopicCompactor(
            appender,
            limits,
            BrokerRetention(
                newest_unix_ms=cleaner.newest_unix_ms,
                age_ms_max=settings.retention_ms,
                log_bytes_max=settings.retention_bytes,
            ),
            CompactionRunner(
                appender,
                node.disk,
                CompactionLimits(
                    memory_bytes=settings.compaction_memory_bytes,
                    bytes_per_s=settings.compaction_bytes_per_s,
                ),
                patient,
                runtime.random,
            ),
        ),
        examine=scrubber.examine,
        damage=damage,
        servicer=servicer,
        queries=QueryServicer(
            settings.broker_name,
            store,
            topics,
            damage,
            role,
            require=require,
            repair=repairs.repair,
            repair_keys=key_repairs.repair,
            tier=tier,
        ),
        scheduling=ScheduleServicer(
            appender, topics, due.wake, require, runtime.guard.caller_identity, tier=tier
        ),
        transactions=TransactionServicer(
            appender,
            topics,
            check_streams,
            checker.wake,
            check_first_ms=settings.transaction_check_first_ms,
            require=require,
            identity_of=runtime.guard.caller_identity,
            tier=tier,
        ),
        outputs=OutputServicer(appender, require),
        tier=tier,
        loops=(
            flusher.run,
            pulls.run,
            servicer.streams.run,
            checkpointer.run,
            scrubber.run,
            cleaner.run,
            partial(expire_producers, store.producers, runtime.clock),
            *(mover.run for mover in movers),
        ),
    )


def _count_purged(metrics: StorageMetrics, segments: Sequence[PositionRange]) -> None:
    metrics.purged_bytes.inc(sum(end - begin for begin, end in segments))


def _queue_rebuilt(
    metrics: StorageMetrics, stream: StorageMetricStream, topic: str, repair: QueueRepair
) -> None:
    metrics.rebuilt_queues.inc()
    stream.queue_rebuilt(topic, repair.key[1], repair.first_offset, repair.next_offset)


def _key_run_rebuilt(
    metrics: StorageMetrics, stream: StorageMetricStream, extent: RunExtent
) -> None:
    metrics.rebuilt_key_runs.inc()
    stream.key_index_rebuilt(extent.first_position, extent.next_position)


def _synced(metrics: StorageMetrics, stream: StorageMetricStream, seconds: float) -> None:
    metrics.fsync_seconds.observe(seconds)
    stream.observe_us(FSYNC, int(seconds * 1e6))
