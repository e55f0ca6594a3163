"""Settings of a storage node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from batonmq_server.runtime.replication.in_sync_set import ReplicaPolicy
from batonmq_server.runtime.settings import ServiceSettings
from batonmq_server.storage.core.retention import Policy


class StorageSettings(ServiceSettings):
    """Read from BATON_STORAGE_<NAME>."""

    node_id: str = Field("broker-a", pattern=r"^[a-z0-9-]{1,63}$")
    """Name of the process."""
    broker: str = Field("", pattern=r"^([a-z0-9-]{1,63})?$")
    """Broker name: under it the topics know the queues of this node and its replicas; empty means
    `node_id`."""
    replicas: str = Field("", pattern=r"^([a-z0-9-]{1,63}(,[a-z0-9-]{1,63}){0,4})?$")
    """Node ids of the replica set, this one among them, separated by commas, up to 5; empty for a
    node without followers."""
    min_in_sync: int = Field(1, ge=1, le=5)
    """With fewer replicas in sync, the leader among them, nothing is written: messages are refused
    with NOT_ENOUGH_REPLICAS."""
    leader_lease_ms: int = Field(3_000, ge=2_000)
    """After so long without a word of the leader another replica is elected, in milliseconds."""
    replica_lag_ms_max: int = Field(3_000, ge=500)
    """A follower that has not had everything for so long is out of sync, in milliseconds."""
    room: str = Field("", pattern=r"^[ -~]{0,127}$")
    """Machine room, for groups whose strategy deals queues by it; empty for none."""
    data_dir: Path = Path("data/storage")
    """Folder of the log and everything else that must survive."""
    segment_bytes: int = Field(1 << 30, ge=4_096)
    """Size of new log segments; a batch can't be longer than one."""
    flush: Literal["fsync", "async"] = "fsync"
    """`fsync`: sync at once, all waiting batches together. `async`: sync at intervals."""
    flush_interval_ms: int = Field(200, ge=1, le=60_000)
    """Time between syncs with `flush = async`; consumers see messages after the sync."""
    memory_window_bytes: int = Field(0, ge=0)
    """Who is further behind the end of the log is sent to a follower, in bytes; 0 means 40 % of the
    machine's memory, about what of the log is still in it."""
    parked_pulls_max: int = Field(100_000, ge=1)
    """More pulls than this are not held."""
    touch_interval_ms: int = Field(5_000, ge=100, le=10_000)
    """How often offsets is told that the holders of parked pulls are alive."""
    verdict_age_ms_max: int = Field(2_000, ge=100)
    """A verdict of offsets that was asked for longer ago is not acted upon."""
    retention_ms: int = Field(172_800_000, ge=0)
    """Older messages are removed, in milliseconds; 48 h by default, 0 keeps them for ever."""
    retention_hours: str = Field("4", pattern=r"^(any|\d{1,2}(,\d{1,2})*)$")
    """Hours of the day, local time, at which they are: such as `4`, `4,16` or `any`."""
    retention_bytes: int = Field(0, ge=0)
    """The log is cut to this size, in bytes, at any hour; 0 for no bound."""
    disk_warn_percent: int = Field(70, ge=1, le=100)
    """Disk in use, in percent, that is worth a warning."""
    disk_clean_percent: int = Field(75, ge=1, le=100)
    """Disk in use, in percent, from which on old messages are removed at any hour."""
    disk_clean_forcibly_percent: int = Field(85, ge=1, le=100)
    """Disk in use, in percent, from which on the oldest messages are removed, however young."""
    disk_full_percent: int = Field(90, ge=1, le=100)
    """Disk in use, in percent, from which on writes are refused; below
    `disk_clean_forcibly_percent` they are taken again."""
    disk_interval_ms: int = Field(1_000, ge=10, le=60_000)
    """How often the disk is looked at, in milliseconds."""
    scrub_bytes_per_s: int = Field(4 * 1024 * 1024, ge=0)
    """How fast the log is read again in the background to find damage; 0 for not at all."""
    accept_loss: bool = False
    """Start even if acknowledged messages are damaged: cut the log there."""

    @field_validator("retention_hours")
    @classmethod
    def _hours_of_a_day(cls, value: str) -> str:
        if any(hour > 23 for hour in _hours(value)):
            raise ValueError("an hour is 0 to 23")
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
            raise ValueError(f"replicas names {self.replicas}, but not {self.node_id}")
        if self.min_in_sync > len(self.members):
            raise ValueError(
                f"min_in_sync is {self.min_in_sync}, but there are {len(self.members)} replicas"
            )
        return self

    @property
    def broker_name(self) -> str:
        """Broker name."""
        return self.broker or self.node_id

    @property
    def members(self) -> frozenset[str]:
        """Node ids of the replica set."""
        return frozenset(self.replicas.split(",")) if self.replicas else frozenset({self.node_id})

    @property
    def memory_window(self) -> int:
        """As `memory_window_bytes`, with its default."""
        # Source: RocketMQ accessMessageInMemoryMaxRatio.
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return self.memory_window_bytes or memory_bytes * 40 // 100

    @property
    def replica_policy(self) -> ReplicaPolicy:
        """How the replica set keeps together."""
        return ReplicaPolicy(
            min_in_sync=self.min_in_sync,
            lag_ms_max=self.replica_lag_ms_max,
            hold_ms=self.replica_lag_ms_max // 4,
        )

    def retention_policy(self) -> Policy:
        """What is kept, and when the disk is full."""
        return Policy(
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
