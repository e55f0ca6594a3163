"""Settings of a storage node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from batonmq_server.runtime.replication.in_sync_set import ReplicaPolicy
from batonmq_server.runtime.settings import ServiceSettings
from batonmq_server.storage.core.retention import RetentionPolicy
from batonmq_server.storage.core.tier import TierPolicy


class StorageSettings(ServiceSettings):
    """Settings of a storage node, read from the variables BATON_STORAGE_<NAME>."""

    node_id: str = Field("broker-a", pattern=r"^[a-z0-9-]{1,63}$")
    """Node id of this process."""
    broker: str = Field("", pattern=r"^([a-z0-9-]{1,63})?$")
    """Broker name of the replica set: part of the name of each of its queues. Empty means
    `node_id`."""
    replicas: str = Field("", pattern=r"^([a-z0-9-]{1,63}(,[a-z0-9-]{1,63}){0,4})?$")
    """Node ids of the replica set, including this node, separated by commas; up to 5. Empty for a
    node without replicas."""
    min_in_sync: int = Field(1, ge=1, le=5)
    """Minimum size of the in-sync set, including the leader. With fewer replicas in sync the leader
    rejects messages with NOT_ENOUGH_REPLICAS."""
    leader_lease_ms: int = Field(5_000, ge=2_000)
    """Lease of the leader, in milliseconds. If the leader does not renew it, another replica is
    elected."""
    replica_lag_ms_max: int = Field(3_000, ge=500)
    """A follower that has not had the whole log for this long leaves the in-sync set, in
    milliseconds."""
    room: str = Field("", pattern=r"^[ -~]{0,127}$")
    """Machine room, for groups with a strategy that assigns queues by room; empty for none."""
    data_dir: Path = Path("data/storage")
    """Data directory: the log, its indexes and all other durable files."""
    segment_bytes: int = Field(1 << 30, ge=4_096)
    """Size of a new log segment. A batch can't be longer than a segment."""
    flush: Literal["fsync", "async"] = "fsync"
    """`fsync`: sync at once; all waiting batches share one sync. `async`: sync at intervals."""
    flush_interval_ms: int = Field(200, ge=1, le=60_000)
    """Time between two syncs with `flush = async`. Consumers see messages after the sync."""
    memory_window_bytes: int = Field(0, ge=0)
    """Consumers that lag more than this many bytes behind the end of the log are redirected to a
    follower. 0 means 40 % of the machine's memory: older data is probably not in the page cache."""
    long_polls_max: int = Field(100_000, ge=1)
    """Maximum number of long polls, and of deliveries by stream. Further pulls that find no
    message, and further deliveries, are rejected with OVERLOADED."""
    touch_interval_ms: int = Field(5_000, ge=100, le=10_000)
    """Interval at which the node tells the offsets service that the owners of long polls are alive,
    in milliseconds."""
    record_age_ms_max: int = Field(2_000, ge=100)
    """Maximum age of a delivery record of the offsets service, in milliseconds, from its request to
    its use. A pull with an older record gets no messages."""
    retention_ms: int = Field(172_800_000, ge=0)
    """Retention time of messages, in milliseconds; 48 h by default, 0 for unlimited."""
    retention_hours: str = Field("4", pattern=r"^(any|\d{1,2}(,\d{1,2})*)$")
    """Hours of the day, in local time, at which expired messages are removed: for example `4`,
    `4,16` or `any`."""
    retention_bytes: int = Field(0, ge=0)
    """Maximum size of the log, in bytes. The oldest segments are removed at any hour; 0 for
    unlimited."""
    disk_warn_percent: int = Field(70, ge=1, le=100)
    """Disk usage, in percent, from which the node warns."""
    disk_clean_percent: int = Field(75, ge=1, le=100)
    """Disk usage, in percent, from which expired messages are removed at any hour."""
    disk_clean_forcibly_percent: int = Field(85, ge=1, le=100)
    """Disk usage, in percent, from which the oldest messages are removed even if they have not
    expired."""
    disk_full_percent: int = Field(90, ge=1, le=100)
    """Disk usage, in percent, from which writes are rejected. Below `disk_clean_forcibly_percent`
    they are accepted again."""
    disk_interval_ms: int = Field(1_000, ge=10, le=60_000)
    """Interval between two checks of the disk usage, in milliseconds."""
    scrub_bytes_per_s: int = Field(4 * 1024 * 1024, ge=0)
    """Maximum read rate of the background scrub, which re-reads the log to find damage; 0 turns the
    scrub off."""
    compaction_memory_bytes: int = Field(64 * 1024 * 1024, ge=16 * 1024 * 1024)
    """Memory for the keys of the queue that is being compacted: 96 bytes per key that is new since
    the last compaction. A queue with more such keys is compacted in several runs."""
    compaction_bytes_per_s: int = Field(16 * 1024 * 1024, ge=0)
    """Maximum read rate of the compaction of topics; 0 turns it off."""
    transaction_check_first_ms: int = Field(6_000, ge=0, le=86_400_000)
    """Age of a transaction without an end at its first check, in milliseconds. Checks are due at
    whole seconds."""
    transaction_check_interval_ms: int = Field(30_000, ge=1_000, le=86_400_000)
    """Interval between two checks of a transaction, in milliseconds."""
    transaction_checks_max: int = Field(15, ge=1, le=255)
    """Number of checks without an answer, after which a transaction is discarded: its message moves
    to the topic BATON_SYS_UNRESOLVED."""
    transaction_age_ms_max: int = Field(86_400_000, ge=1_000)
    """Age at which a transaction without an end is discarded, in milliseconds; 24 h by default. A
    transaction gets this old if no producer of its group is alive."""
    tier_url: str = ""
    """Object store for closed log segments: a URL of fsspec such as s3://bucket/folder, or a path.
    Empty: all segments stay on the local disk."""
    tier_local_age_ms: int = Field(14_400_000, ge=0)
    """Age at which the local copy of a segment that is in the object store is removed, in
    milliseconds; 4 h by default. Messages are kept as long as `retention_ms` says."""
    tier_local_bytes: int = Field(0, ge=0)
    """Maximum size of the log on the local disk, in bytes: the oldest segments that are in the
    object store are removed from the disk. 0 for unlimited."""
    tier_cache_bytes: int = Field(128 * 1024 * 1024, ge=64 * 1024 * 1024)
    """Memory for what is read from the object store, in bytes."""
    tier_timeout_ms: int = Field(10_000, ge=100, le=300_000)
    """Time that a reader of messages waits for the object store, in milliseconds."""
    tier_interval_ms: int = Field(5_000, ge=10, le=600_000)
    """Interval between two searches for segments to store or to remove, in milliseconds."""
    accept_loss: bool = False
    """Start even if acknowledged messages are damaged: the log is cut at the damage, and what
    follows is lost."""

    @field_validator("retention_hours")
    @classmethod
    def _hours_of_a_day(cls, value: str) -> str:
        if any(hour > 23 for hour in _hours(value)):
            raise ValueError(f"retention_hours must be hours from 0 to 23, got {value}")
        return value

    @model_validator(mode="after")
    def _watermarks_rise(self) -> StorageSettings:
        percents = (
            self.disk_warn_percent,
            self.disk_clean_percent,
            self.disk_clean_forcibly_percent,
            self.disk_full_percent,
        )
        if sorted(set(percents)) != list(percents):
            raise ValueError(
                "disk_warn_percent, disk_clean_percent, disk_clean_forcibly_percent and "
                "disk_full_percent must rise in this order"
            )
        return self

    @model_validator(mode="after")
    def _belongs_to_its_set(self) -> StorageSettings:
        if self.node_id not in self.members:
            raise ValueError(
                f"replicas must include node_id {self.node_id}, got {self.replicas or 'none'}"
            )
        if self.min_in_sync > len(self.members):
            raise ValueError(
                f"min_in_sync must be at most the number of replicas, {len(self.members)}, "
                f"got {self.min_in_sync}"
            )
        return self

    @property
    def broker_name(self) -> str:
        """Broker name: `broker`, or `node_id` if that is empty."""
        return self.broker or self.node_id

    @property
    def members(self) -> frozenset[str]:
        """Node ids of the replica set; only this node if it has no replicas."""
        return frozenset(self.replicas.split(",")) if self.replicas else frozenset({self.node_id})

    @property
    def memory_window(self) -> int:
        """`memory_window_bytes`, or its default, in bytes."""
        # Source: RocketMQ accessMessageInMemoryMaxRatio.
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return self.memory_window_bytes or memory_bytes * 40 // 100

    @property
    def replica_policy(self) -> ReplicaPolicy:
        """The rules of the in-sync set."""
        return ReplicaPolicy(
            min_in_sync=self.min_in_sync,
            lag_ms_max=self.replica_lag_ms_max,
            hold_ms=self.replica_lag_ms_max // 4,
        )

    def tier_policy(self) -> TierPolicy:
        """How long segments that are in the object store stay on the local disk."""
        return TierPolicy(local_age_ms=self.tier_local_age_ms, local_bytes=self.tier_local_bytes)

    def retention_policy(self) -> RetentionPolicy:
        """The rules of retention: how long messages are kept, and when the disk counts as full."""
        return RetentionPolicy(
            age_ms_max=self.retention_ms,
            hours=_hours(self.retention_hours),
            log_bytes_max=self.retention_bytes,
            warn_percent=self.disk_warn_percent,
            clean_percent=self.disk_clean_percent,
            clean_forcibly_percent=self.disk_clean_forcibly_percent,
            full_percent=self.disk_full_percent,
        )


def _hours(text: str) -> frozenset[int]:
    return frozenset(range(24)) if text == "any" else frozenset(map(int, text.split(",")))
