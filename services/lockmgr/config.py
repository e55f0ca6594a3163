"""Settings of the lock manager."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from batonmq_server.lockmgr.core.lock_entry import DecisionProfile, LockPolicy
from batonmq_server.runtime.settings import ServiceSettings

CLIENT_MARGIN_MS = 3_000
"""An owner stops so long before its lease ends, by its own clock (protocol section 8)."""


class LockmgrSettings(ServiceSettings):
    """Read from BATON_LOCKMGR_<NAME>. All state is in etcd: there is no directory."""

    node_id: str = Field("lockmgr-0", pattern=r"^[a-z0-9-]{1,63}$")
    """Name of the process, unique among lock managers."""
    profile: Literal["default", "defibus"] = "default"
    """Decision table: `default`, or `defibus`, which counts polls and takes a queue from an owner
    that was silent for 100 ms. For comparison; what it takes comes again, flagged."""
    lock_lease_ms: int = 30_000
    """An owner that is silent for longer may lose its queues, in milliseconds. Clients stop 3 s
    before, so it has to be longer than that."""
    slot_ms: int = Field(500, ge=10)
    """A waited-for queue is looked at once in this time, in milliseconds."""
    slots_min: int = Field(3, ge=1)
    """A drained queue goes to a newcomer after so many slots without a delivery."""
    leader_lease_ms: int = Field(5_000, ge=2_000)
    """Another lock manager takes over when the leader has been silent for so long."""
    hold_ms_max: int = Field(15_000, ge=0)
    """Longest time a refused request is held, in milliseconds."""
    watchers_max: int = Field(10_000, ge=1)
    """Clients that may watch their queues at a time."""

    @field_validator("lock_lease_ms")
    @classmethod
    def _leaves_time(cls, lease_ms: int) -> int:
        if lease_ms <= CLIENT_MARGIN_MS:
            raise ValueError(
                f"{lease_ms} leaves an owner no time: it stops {CLIENT_MARGIN_MS} ms before its "
                "lease ends"
            )
        return lease_ms

    def policy(self) -> LockPolicy:
        """The times of the decision table."""
        return LockPolicy(
            profile=DecisionProfile(self.profile),
            lease_ms=self.lock_lease_ms,
            slot_ms=self.slot_ms,
            slots_min=self.slots_min,
        )
