"""What a storage node counts for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from batonmq_server.storage.traffic import Traffic

_LATENESS_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5, 60, 3_600)
_FSYNC_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5)


class StorageMetrics:
    """Every series has the prefix `baton_storage_`, but for some of `traffic`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.traffic = Traffic(registry)
        self.appended_messages = Counter(
            "baton_storage_appended_messages", "Messages written to the log.", registry=registry
        )
        self.appended_bytes = Counter(
            "baton_storage_appended_bytes", "Bytes of batches written.", registry=registry
        )
        self.duplicate_batches = Counter(
            "baton_storage_duplicate_batches",
            "Batches that had been stored by an earlier try.",
            registry=registry,
        )
        self.refused_batches = Counter(
            "baton_storage_refused_batches",
            "Batches that were refused, by reason.",
            ("reason",),
            registry=registry,
        )
        self.fsync_seconds = Histogram(
            "baton_storage_fsync_seconds",
            "Time of one sync of the log.",
            buckets=_FSYNC_BUCKETS,
            registry=registry,
        )
        self.parked_pulls = Gauge(
            "baton_storage_parked_pulls", "Pulls that are held.", registry=registry
        )
        self.delivered_messages = Counter(
            "baton_storage_delivered_messages",
            "Messages that passed the filter and left.",
            registry=registry,
        )
        self.filtered_messages = Counter(
            "baton_storage_filtered_messages",
            "Messages the filter dropped from deliveries.",
            registry=registry,
        )
        self.unrecorded_deliveries = Counter(
            "baton_storage_unrecorded_deliveries",
            "Pulls that offsets refused or did not answer, by reason.",
            ("reason",),
            registry=registry,
        )
        self.removed_segments = Counter(
            "baton_storage_removed_segments",
            "Segments of the log that retention removed.",
            registry=registry,
        )
        self.disk_used_ratio = Gauge(
            "baton_storage_disk_used_ratio",
            "Space in use on the file system of the log, 0 to 1.",
            registry=registry,
        )
        self.disk_free_bytes = Gauge(
            "baton_storage_disk_free_bytes",
            "Space free on the file system of the log.",
            registry=registry,
        )
        self.disk_seconds_until_full = Gauge(
            "baton_storage_disk_seconds_until_full",
            "Time until writes are refused, at the rate of the last minutes; infinite if that is "
            "not in sight.",
            registry=registry,
        )
        self.disk_state = Gauge(
            "baton_storage_disk_state",
            "1 ok, 2 warn, 3 clean, 4 clean forcibly, 5 full: writes are refused.",
            registry=registry,
        )
        self.scheduled_batches = Gauge(
            "baton_storage_scheduled_batches",
            "Batches that wait for their time.",
            registry=registry,
        )
        self.scheduled_lateness_seconds = Histogram(
            "baton_storage_scheduled_lateness_seconds",
            "Time from when a scheduled batch was due until consumers could see it.",
            buckets=_LATENESS_BUCKETS,
            registry=registry,
        )
        self.undeliverable_batches = Counter(
            "baton_storage_undeliverable_batches",
            "Scheduled batches that went nowhere when they were due, by reason.",
            ("reason",),
            registry=registry,
        )
        self.leader = Gauge(
            "baton_storage_leader",
            "1 on the leader of a replica set that serves, 0 on its followers.",
            registry=registry,
        )
        self.replicas = Gauge(
            "baton_storage_replicas",
            "Members of the replica set, by its settings.",
            registry=registry,
        )
        self.in_sync_replicas = Gauge(
            "baton_storage_in_sync_replicas",
            "Members of the in-sync set, the leader among them; 0 on followers.",
            registry=registry,
        )
        self.replica_lag_bytes = Gauge(
            "baton_storage_replica_lag_bytes",
            "How much of the log a follower lacks, as its leader knows.",
            ("replica",),
            registry=registry,
        )
        self.replica_lag_seconds = Gauge(
            "baton_storage_replica_lag_seconds",
            "For how long a follower has not had all of the log, as its leader knows.",
            ("replica",),
            registry=registry,
        )
        self.stuck = Gauge(
            "baton_storage_replica_stuck",
            "1 while this node can't follow its leader for a reason that does not pass by itself.",
            registry=registry,
        )
        self.damaged_batches = Counter(
            "baton_storage_damaged_batches",
            "Batches that failed their checksum or can't be read, and damaged indexes, each once.",
            registry=registry,
        )
