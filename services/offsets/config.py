"""Settings of the offsets service: BATON_OFFSETS_*."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from batonmq_server.offsets.core.values import QueueLimits
from batonmq_server.offsets.disk import FREE_BYTES_MIN
from batonmq_server.runtime.replication.in_sync_set import ReplicaPolicy
from batonmq_server.runtime.settings import ServiceSettings


class OffsetsSettings(ServiceSettings):
    """Settings of an offsets node, read from the variables BATON_OFFSETS_<NAME>."""

    node_id: str = Field("offsets-0", pattern=r"^[a-z0-9-]{1,63}$")
    """Node id of this process."""
    data_dir: Path
    """Data directory: the progress of all groups. Created if it does not exist; used by one process
    at a time."""
    span_max: int = Field(2_000, ge=1, le=1_000_000)
    """Deliveries are recorded on disk in advance: the maximum number of messages recorded ahead of
    the deliveries of a queue. The number in use follows the rate of the queue and is at least
    16."""
    ack_ranges_max: int = Field(100_000, ge=1, le=1_000_000)
    """Number of acked ranges above the committed offset of a queue at which its delivery is
    paused."""
    ack_bytes_max: int = Field(1024 * 1024, ge=64)
    """Stored size of the acked ranges of a queue, in bytes, at which its delivery is paused."""
    disk_free_bytes_min: int = Field(FREE_BYTES_MIN, ge=0)
    """Minimum free space of the disk, in bytes. With less, every change is rejected with
    DISK_FULL."""
    replica_set: str = Field("offsets", pattern=r"^[a-z0-9-]{1,63}$")
    """Name of the replica set of this node."""
    replicas: str = Field("", pattern=r"^([a-z0-9-]{1,63}(,[a-z0-9-]{1,63}){0,4})?$")
    """Node ids of the replica set, including this node, separated by commas; up to 5. Empty for a
    node without replicas."""
    min_in_sync: int = Field(1, ge=1, le=5)
    """Minimum size of the in-sync set, including the leader. With fewer replicas in sync the leader
    rejects every change with NOT_ENOUGH_REPLICAS."""
    leader_lease_ms: int = Field(5_000, ge=2_000)
    """Lease of the leader, in milliseconds. If the leader does not renew it, another replica is
    elected."""
    replica_lag_ms_max: int = Field(3_000, ge=500)
    """A follower that has not had every change for this long leaves the in-sync set, in
    milliseconds."""
    replica_kept_bytes_max: int = Field(64 * 1024 * 1024, ge=0)
    """Size of the newest changes kept in memory for followers that lag, in bytes. A follower that
    lags further copies everything."""

    @property
    def members(self) -> frozenset[str]:
        """Node ids of the replica set; only this node if it has no replicas."""
        return frozenset(self.replicas.split(",")) if self.replicas else frozenset({self.node_id})

    @property
    def replica_policy(self) -> ReplicaPolicy:
        """The rules of the in-sync set."""
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
