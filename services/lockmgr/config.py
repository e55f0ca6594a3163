"""Settings of the lock manager."""

from __future__ import annotations

from pydantic import Field

from services.lockmgr.core.locks import Policy
from services.runtime.settings import ServiceSettings


class LockmgrSettings(ServiceSettings):
    """Read from BATON_LOCKMGR_<NAME>. All state is in etcd: there is no directory."""

    node_id: str = Field("lockmgr-0", pattern=r"^[a-z0-9-]{1,63}$")
    """Name of the process, unique among lock managers."""
    lock_lease_ms: int = Field(30_000, ge=1_000)
    """An owner that is silent for longer may lose its queues, in milliseconds. Clients stop 3 s
    before."""
    slot_ms: int = Field(500, ge=10)
    """A waited-for queue is looked at once in this time, in milliseconds."""
    slots_min: int = Field(3, ge=1)
    """A drained queue goes to a newcomer after so many slots without a delivery."""
    leader_lease_ms: int = Field(5_000, ge=2_000)
    """Another lock manager takes over when the leader has been silent for so long."""
    hold_ms_max: int = Field(15_000, ge=0)
    """Longest time a refused request is held, in milliseconds."""

    def policy(self) -> Policy:
        """The times of the decision table."""
        return Policy(lease_ms=self.lock_lease_ms, slot_ms=self.slot_ms, slots_min=self.slots_min)
