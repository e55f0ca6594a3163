"""The Prometheus metrics of a storage node."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from batonmq._core.dead_letters import DEAD_LETTER_PREFIX

_TOPIC, _GROUP = "topic", "consumer_group"
_LATENESS_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5, 60, 3_600)
_FSYNC_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5)


class StorageMetrics:
    """All metrics of a node; `traffic` holds those by topic and group.

    Every name begins with `baton_storage_`, except for the RocketMQ names in `traffic`.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.traffic = TrafficMetrics(registry)
        self.compaction, self.tier = CompactionMetrics(registry), TierMetrics(registry)
        self.appended_messages = Counter(
            "baton_storage_appended_messages", "Messages written to the log.", registry=registry
        )
        self.appended_bytes = Counter(
            "baton_storage_appended_bytes",
            "Bytes of batches written to the log.",
            registry=registry,
        )
        self.duplicate_batches = Counter(
            "baton_storage_duplicate_batches",
            "Batches that an earlier attempt had stored already.",
            registry=registry,
        )
        self.refused_batches = Counter(
            "baton_storage_refused_batches",
            "Batches that were rejected, by reason.",
            ("reason",),
            registry=registry,
        )
        self.fsync_seconds = Histogram(
            "baton_storage_fsync_seconds",
            "Duration of one sync of the log.",
            buckets=_FSYNC_BUCKETS,
            registry=registry,
        )
        self.waiting_pulls = Gauge(
            "baton_storage_waiting_pulls",
            "Long polls: pulls and deliveries by stream that wait for messages.",
            registry=registry,
        )
        self.delivered_messages = Counter(
            "baton_storage_delivered_messages",
            "Messages delivered: those that passed the filter.",
            registry=registry,
        )
        self.filtered_messages = Counter(
            "baton_storage_filtered_messages",
            "Messages that were not delivered because they did not pass the filter.",
            registry=registry,
        )
        self.unrecorded_deliveries = Counter(
            "baton_storage_unrecorded_deliveries",
            "Deliveries, or acks behind them, that were not recorded at offsets, by reason.",
            ("reason",),
            registry=registry,
        )
        self.replies = Counter(
            "baton_storage_replies",
            "Replies to requests, by outcome: delivered to the inbox; or dropped: late (there is "
            "no such inbox) or inbox_full (the requester reads too slowly).",
            ("outcome",),
            registry=registry,
        )
        self.reply_inboxes = Gauge(
            "baton_storage_reply_inboxes",
            "Open reply inboxes: one for each producer that has sent a request to any broker.",
            registry=registry,
        )
        self.descriptor_shortages = Counter(
            "baton_storage_descriptor_shortages",
            "Checkpoints, removals and scrubs that were postponed because the process had no free "
            "file descriptor.",
            registry=registry,
        )
        self.removed_segments = Counter(
            "baton_storage_removed_segments",
            "Log segments removed by retention.",
            registry=registry,
        )
        self.purged_bytes = Counter(
            "baton_storage_purged_bytes",
            "Bytes of log segments that were purged: they contained only messages of deleted "
            "topics, or messages that the retention of their topic had removed.",
            registry=registry,
        )
        self.disk_used_ratio = Gauge(
            "baton_storage_disk_used_ratio",
            "Used share of the file system of the log, 0 to 1.",
            registry=registry,
        )
        self.disk_free_bytes = Gauge(
            "baton_storage_disk_free_bytes",
            "Free bytes on the file system of the log.",
            registry=registry,
        )
        self.disk_seconds_until_full = Gauge(
            "baton_storage_disk_seconds_until_full",
            "Estimated time until writes are rejected, at the growth rate of the last 5 minutes; "
            "infinite if the disk does not fill.",
            registry=registry,
        )
        self.disk_state = Gauge(
            "baton_storage_disk_state",
            "Disk state: 1 ok, 2 warn, 3 clean, 4 clean forcibly, 5 full (writes are rejected).",
            registry=registry,
        )
        self.scheduled_batches = Gauge(
            "baton_storage_scheduled_batches",
            "Scheduled batches that are not due yet.",
            registry=registry,
        )
        self.scheduled_lateness_seconds = Histogram(
            "baton_storage_scheduled_lateness_seconds",
            "Time between the delivery time of a scheduled batch and its visibility to consumers.",
            buckets=_LATENESS_BUCKETS,
            registry=registry,
        )
        self.undeliverable_batches = Counter(
            "baton_storage_undeliverable_batches",
            "Scheduled batches that could not be delivered when they were due, by reason.",
            ("reason",),
            registry=registry,
        )
        self.remembered_outputs = Gauge(
            "baton_storage_remembered_outputs",
            "Remembered outputs of transformers: their inputs may be handled again.",
            registry=registry,
        )
        self.output_sources = Gauge(
            "baton_storage_output_sources",
            "Sources of outputs: input queues of groups that transform messages.",
            registry=registry,
        )
        self.open_transactions = Gauge(
            "baton_storage_open_transactions",
            "Half messages whose transaction has not ended.",
            registry=registry,
        )
        self.oldest_transaction_age_seconds = Gauge(
            "baton_storage_oldest_transaction_age_seconds",
            "Age of the oldest open transaction, reported by the leader; 0 if none is open.",
            registry=registry,
        )
        self.check_streams = Gauge(
            "baton_storage_check_streams",
            "Streams on which producers wait for checks of their transactions.",
            registry=registry,
        )
        self.transaction_checks = Counter(
            "baton_storage_transaction_checks",
            "Checks that were sent to producers.",
            registry=registry,
        )
        self.transaction_answers = Counter(
            "baton_storage_transaction_answers",
            "Answers that left a transaction open, by answer.",
            ("answer",),
            registry=registry,
        )
        self.ended_transactions = _from_zero(
            Counter(
                "baton_storage_ended_transactions",
                "Ended transactions by outcome: committed, rolled_back, discarded (a limit was "
                "reached), damaged.",
                ("outcome",),
                registry=registry,
            ),
            ("committed", "rolled_back", "discarded", "damaged"),
        )
        self.leader = Gauge(
            "baton_storage_leader",
            "1 if this node is the serving leader of its replica set, 0 if it is a follower.",
            registry=registry,
        )
        self.replicas = Gauge(
            "baton_storage_replicas",
            "Configured members of the replica set.",
            registry=registry,
        )
        self.in_sync_replicas = Gauge(
            "baton_storage_in_sync_replicas",
            "Members of the in-sync set that keep up, including the leader; 0 on followers.",
            registry=registry,
        )
        self.replica_lag_bytes = Gauge(
            "baton_storage_replica_lag_bytes",
            "Bytes of the log that a follower lacks, reported by the leader.",
            ("replica",),
            registry=registry,
        )
        self.replica_lag_seconds = Gauge(
            "baton_storage_replica_lag_seconds",
            "Time since a follower last had the whole log, reported by the leader.",
            ("replica",),
            registry=registry,
        )
        self.stuck = Gauge(
            "baton_storage_replica_stuck",
            "1 if this node can't follow its leader because of a fault that needs an operator.",
            registry=registry,
        )
        self.damaged_batches = Counter(
            "baton_storage_damaged_batches",
            "Damaged batches (bad checksum or unreadable) and damaged indexes, each counted once.",
            registry=registry,
        )
        self.rebuilt_queues = Counter(
            "baton_storage_rebuilt_queues",
            "Repairs of a consume queue with damaged entries, which were rebuilt from the log.",
            registry=registry,
        )
        self.rebuilt_key_runs = Counter(
            "baton_storage_rebuilt_key_runs",
            "Damaged files of the key index that were rebuilt from the log.",
            registry=registry,
        )


def _from_zero(counter: Counter, values: Sequence[str]) -> Counter:
    """Return the counter with these series, so that increase() sees the first count of each."""
    for value in values:
        counter.labels(value)
    return counter


class TrafficMetrics:
    """Messages stored and delivered, by topic and group.

    Most names are those of RocketMQ. Series of deleted topics and groups are removed.

    Source: RocketMQ BrokerMetricsConstant, the names and the labels `topic` and `consumer_group`;
    cluster, node_type and node_id are labels of the target.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._messages_in = Counter(
            "rocketmq_messages_in", "Messages stored.", (_TOPIC,), registry=registry
        )
        self._bytes_in = Counter(
            "rocketmq_throughput_in", "Bytes of batches stored.", (_TOPIC,), registry=registry
        )
        self._messages_out = Counter(
            "rocketmq_messages_out",
            "Messages delivered, redeliveries included.",
            (_TOPIC, _GROUP),
            registry=registry,
        )
        self._bytes_out = Counter(
            "rocketmq_throughput_out",
            "Bytes of batches delivered.",
            (_TOPIC, _GROUP),
            registry=registry,
        )
        self._dead = Counter(
            "rocketmq_send_to_dlq_messages",
            "Messages sent to the dead-letter topic of a group.",
            (_GROUP,),
            registry=registry,
        )
        self._lost = Counter(
            "baton_storage_lost_messages",
            "Messages that retention removed before the group read them.",
            ("group", _TOPIC),
            registry=registry,
        )
        self._trimmed = Counter(
            "baton_storage_trimmed_messages",
            "Messages that the retention of their topic removed, counted on the leader.",
            (_TOPIC,),
            registry=registry,
        )
        self._topics: set[str] = set()
        self._groups: set[str] = set()

    def stored(self, topic: str, count: int, size: int) -> None:
        """Count `count` messages that were appended, in batches of `size` bytes."""
        self._topics.add(topic)
        self._messages_in.labels(topic).inc(count)
        self._bytes_in.labels(topic).inc(size)
        if topic.startswith(DEAD_LETTER_PREFIX):
            group = topic.removeprefix(DEAD_LETTER_PREFIX)
            self._groups.add(group)
            self._dead.labels(group).inc(count)

    def delivered(self, topic: str, group: str, count: int, size: int) -> None:
        """Count `count` messages that were delivered to a group, in batches of `size` bytes."""
        self._topics.add(topic)
        self._groups.add(group)
        self._messages_out.labels(topic, group).inc(count)
        self._bytes_out.labels(topic, group).inc(size)

    def lost(self, topic: str, group: str, count: int) -> None:
        """Count messages that retention removed before the group read them."""
        self._topics.add(topic)
        self._groups.add(group)
        self._lost.labels(group, topic).inc(count)

    def trimmed(self, topic: str, count: int) -> None:
        """Count messages that the retention of their topic has removed."""
        self._topics.add(topic)
        self._trimmed.labels(topic).inc(count)

    def keep_topics(self, exists: Callable[[str], bool]) -> None:
        """Remove the series of topics that no longer exist."""
        gone = {topic for topic in self._topics if not exists(topic)}
        self._topics -= gone
        for topic in gone:
            for counter in (self._messages_in, self._bytes_in):
                counter.remove(topic)
            for counter in (self._messages_out, self._bytes_out, self._lost, self._trimmed):
                counter.remove_by_labels({_TOPIC: topic})

    def keep_groups(self, exists: Callable[[str], bool]) -> None:
        """Remove the series of groups that no longer exist."""
        gone = {group for group in self._groups if not exists(group)}
        self._groups -= gone
        for group in gone:
            for counter in (self._messages_out, self._bytes_out, self._dead):
                counter.remove_by_labels({_GROUP: group})
            self._lost.remove_by_labels({"group": group})


class CompactionMetrics:
    """What the leader has compacted, by topic."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._removed = Counter(
            "baton_storage_compacted_messages",
            "Messages that a compaction has removed: older ones of their key, and tombstones.",
            (_TOPIC,),
            registry=registry,
        )
        self._runs = Counter(
            "baton_storage_compaction_runs",
            "Compactions of a queue, by topic and outcome: done or failed.",
            (_TOPIC, "outcome"),
            registry=registry,
        )
        self._dirty = Gauge(
            "baton_storage_compaction_dirty_ratio",
            "Share of the bytes of a compacted topic that were stored since its last compaction, "
            "0 to 1; only messages that are old enough count.",
            (_TOPIC,),
            registry=registry,
        )
        self._overdue = Gauge(
            "baton_storage_compaction_overdue_seconds",
            "How long a queue of the topic has been due for a compaction; 0 if none is due.",
            (_TOPIC,),
            registry=registry,
        )
        self._last = Gauge(
            "baton_storage_compaction_last_run_timestamp_seconds",
            "Time at which a queue of the topic was compacted last, in Unix seconds.",
            (_TOPIC,),
            registry=registry,
        )

    def done(self, topic: str, removed_count: int, unix_ms: int) -> None:
        """Count a compaction that removed `removed_count` messages."""
        self._removed.labels(topic).inc(removed_count)
        self._runs.labels(topic, "done").inc()
        self._last.labels(topic).set(unix_ms / 1000)

    def failed(self, topic: str) -> None:
        """Count a compaction that was given up."""
        self._runs.labels(topic, "failed").inc()

    def looked(self, topic: str, dirty_ratio: float, overdue_ms: int) -> None:
        """Show how much of a topic is not compacted, and since when a queue of it is due."""
        self._dirty.labels(topic).set(dirty_ratio)
        self._overdue.labels(topic).set(overdue_ms / 1000)

    def forget(self, topic: str) -> None:
        """Remove the series of a topic."""
        for metric in (self._removed, self._runs, self._dirty, self._overdue, self._last):
            metric.remove_by_labels({_TOPIC: topic})

    def clear(self) -> None:
        """Remove the gauges: another node is the leader now."""
        for gauge in (self._dirty, self._overdue, self._last):
            gauge.clear()


class TierMetrics:
    """What is in the object store of segments; all zero without a store."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.stored_bytes = Counter(
            "baton_storage_tier_written_bytes",
            "Bytes of log segments that this node has written to the object store.",
            registry=registry,
        )
        self.read_bytes = Counter(
            "baton_storage_tier_read_bytes",
            "Bytes of log segments that this node has read from the object store.",
            registry=registry,
        )
        self.moved_segments = Counter(
            "baton_storage_tier_moved_segments",
            "Log segments whose local copy was removed because the object store has them.",
            registry=registry,
        )
        self.removed_segments = Counter(
            "baton_storage_tier_removed_segments",
            "Log segments that retention has removed from the object store.",
            registry=registry,
        )
        self.failures = Counter(
            "baton_storage_tier_failures",
            "Failed work with the object store: read (for a reader of messages), write (a segment "
            "is not stored), move (the local copy stays), list or remove.",
            ("work",),
            registry=registry,
        )
        self.remote_bytes = Gauge(
            "baton_storage_tier_remote_bytes",
            "Bytes of the log that are in the object store and not on the local disk.",
            registry=registry,
        )
        self.waiting_segments = Gauge(
            "baton_storage_tier_waiting_segments",
            "Closed log segments that are not in the object store yet, on the leader.",
            registry=registry,
        )
        self.waiting_seconds = Gauge(
            "baton_storage_tier_waiting_seconds",
            "Waiting time of the oldest closed log segment for the object store, on the leader.",
            registry=registry,
        )
