"""What a storage node counts for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_FSYNC_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5)


class StorageMetrics:
    """Every series has the prefix `baton_storage_`."""

    def __init__(self, registry: CollectorRegistry) -> None:
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
        self.damaged_batches = Counter(
            "baton_storage_damaged_batches",
            "Reads that met a batch with a wrong checksum.",
            registry=registry,
        )
