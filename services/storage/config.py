"""Settings of a storage node."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from services.runtime.settings import ServiceSettings


class StorageSettings(ServiceSettings):
    """Read from BATON_STORAGE_<NAME>."""

    node_id: str = Field("broker-a", pattern=r"^[a-z0-9-]{1,63}$")
    """Broker name: under it the topics know the queues of this node."""
    data_dir: Path = Path("data/storage")
    """Folder of the log and everything else that must survive."""
    segment_bytes: int = Field(1 << 30, ge=4_096)
    """Size of new log segments; a batch can't be longer than one."""
    flush: Literal["fsync", "async"] = "fsync"
    """`fsync`: sync at once, all waiting batches together. `async`: sync at intervals."""
    flush_interval_ms: int = Field(200, ge=1, le=60_000)
    """Time between syncs with `flush = async`; consumers see messages after the sync."""
    parked_pulls_max: int = Field(100_000, ge=1)
    """More pulls than this are not held."""
    touch_interval_ms: int = Field(5_000, ge=100, le=10_000)
    """How often offsets is told that the holders of parked pulls are alive."""
    verdict_age_ms_max: int = Field(2_000, ge=100)
    """A verdict of offsets that was asked for longer ago is not acted upon."""
    accept_loss: bool = False
    """Start even if acknowledged messages are damaged: cut the log there."""
