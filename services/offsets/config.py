"""Settings of the offsets service: BATON_OFFSETS_*."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from batonmq_server.offsets.core.values import QueueLimits
from batonmq_server.offsets.disk import FREE_BYTES_MIN
from batonmq_server.runtime.keeper import ReplicaPolicy
from batonmq_server.runtime.settings import ServiceSettings


class OffsetsSettings(ServiceSettings):
    """What `python -m batonmq_server.offsets` reads."""

    node_id: str = Field("offsets-0", pattern=r"^[a-z0-9-]{1,63}$")
    """Name of the process."""
    data_dir: Path
    """Folder that holds the progress; made if it does not exist; one process at a time."""
    span_max: int = Field(2_000, ge=1, le=1_000_000)
    """How far ahead of deliveries the delivered offset is made durable, in messages."""
    ack_ranges_max: int = Field(100_000, ge=1, le=1_000_000)
    """Acked ranges above the committed offset of a queue beyond which its delivery stops."""
    ack_bytes_max: int = Field(1024 * 1024, ge=64)
    """Stored size of those ranges beyond which delivery stops, in bytes."""
    disk_free_bytes_min: int = Field(FREE_BYTES_MIN, ge=0)
    """With less free on the disk every change is refused with DISK_FULL, in bytes."""
    replica_set: str = Field("offsets", pattern=r"^[a-z0-9-]{1,63}$")
    """Replica set the node belongs to."""
    replicas: str = Field("", pattern=r"^([a-z0-9-]{1,63}(,[a-z0-9-]{1,63}){0,4})?$")
    """Node ids of the replica set, this one among them, separated by commas, up to 5; empty for a
    node without followers."""
    min_in_sync: int = Field(1, ge=1, le=5)
    """With fewer replicas in sync, the leader among them, every change is refused with
    NOT_ENOUGH_REPLICAS."""
    leader_lease_ms: int = Field(5_000, ge=2_000)
    """After so long without a word of the leader another replica is elected, in milliseconds."""
    replica_lag_ms_max: int = Field(3_000, ge=500)
    """A follower that has not had everything for so long is out of sync, in milliseconds."""
    replica_kept_bytes_max: int = Field(64 * 1024 * 1024, ge=0)
    """So much of the newest changes is kept for followers that come back, in bytes."""

    @property
    def members(self) -> frozenset[str]:
        """Node ids of the replica set."""
        return frozenset(self.replicas.split(",")) if self.replicas else frozenset({self.node_id})

    @property
    def replica_policy(self) -> ReplicaPolicy:
        """How the replica set keeps together."""
        return ReplicaPolicy(
            min_in_sync=self.min_in_sync,
            lag_ms_max=self.replica_lag_ms_max,
            hold_ms=self.replica_lag_ms_max // 4,
        )

    @property
    def limits(self) -> QueueLimits:
        """Bounds on the state of one queue."""
        return QueueLimits(
            span_max=self.span_max,
            ack_ranges_max=self.ack_ranges_max,
            ack_bytes_max=self.ack_bytes_max,
        )
