"""Settings of the lock manager."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from batonmq_server.lockmgr.core.lock_entry import DecisionProfile, LockPolicy
from batonmq_server.runtime.settings import ServiceSettings

CLIENT_MARGIN_MS = 3_000
"""An owner stops this long before its lease expires by its own clock (protocol section 8)."""


class LockmgrSettings(ServiceSettings):
    """Settings from BATON_LOCKMGR_<NAME>. The state is in etcd, so there is no directory."""

    node_id: str = Field("lockmgr-0", pattern=r"^[a-z0-9-]{1,63}$")
    """Name of this node, unique among the lock managers."""
    profile: Literal["default", "defibus"] = "default"
    """Decision rules: `default`; `defibus` is for comparisons only. `defibus` counts polls and
    takes a queue from an owner that was silent for 100 ms; messages in flight are redelivered,
    flagged."""
    lock_lease_ms: int = 30_000
    """Lease of a queue in milliseconds: an owner that is silent for longer may lose its queues.
    Must be more than 3,000, since clients stop 3 s before the lease expires."""
    slot_ms: int = Field(500, ge=10)
    """Length of a slot in milliseconds: a queue with waiting clients is observed once per slot."""
    slots_min: int = Field(3, ge=1)
    """Slots without a delivery after which a drained queue is granted to a new member."""
    leader_lease_ms: int = Field(5_000, ge=2_000)
    """Lease of the leader in milliseconds: another lock manager takes over once it has expired."""
    hold_ms_max: int = Field(15_000, ge=0)
    """Longest time that an Acquire request is held until its queues are free, in milliseconds."""
    watchers_max: int = Field(10_000, ge=1)
    """Maximum number of clients with an open Watch stream; more are refused."""

    @field_validator("lock_lease_ms")
    @classmethod
    def _leaves_time(cls, lease_ms: int) -> int:
        if lease_ms <= CLIENT_MARGIN_MS:
            raise ValueError(
                f"lock_lease_ms must be more than {CLIENT_MARGIN_MS}, got {lease_ms}: clients stop "
                f"{CLIENT_MARGIN_MS} ms before the lease expires"
            )
        return lease_ms

    def policy(self) -> LockPolicy:
        """Return the times of the decision table."""
        return LockPolicy(
            profile=DecisionProfile(self.profile),
            lease_ms=self.lock_lease_ms,
            slot_ms=self.slot_ms,
            slots_min=self.slots_min,
        )
