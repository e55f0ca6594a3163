"""Settings of the offsets service: BATON_OFFSETS_*."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from services.offsets.core.calls import Limits
from services.offsets.disk import FREE_BYTES_MIN
from services.runtime.settings import ServiceSettings


class OffsetsSettings(ServiceSettings):
    """What `python -m services.offsets` reads."""

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

    @property
    def limits(self) -> Limits:
        """Bounds on the state of one queue."""
        return Limits(
            span_max=self.span_max,
            ack_ranges_max=self.ack_ranges_max,
            ack_bytes_max=self.ack_bytes_max,
        )
