"""Settings of the nameserver."""

from __future__ import annotations

from pydantic import Field, model_validator

from batonmq_server.nameserver.core.topics import QUEUES_DEFAULT, QUEUES_MAX
from batonmq_server.runtime.settings import ServiceSettings


class NameserverSettings(ServiceSettings):
    """Read from BATON_NAMESERVER_<NAME> and the file BATON_NAMESERVER_CONFIG_FILE names."""

    node_id: str = Field("nameserver-0", pattern=r"^[a-z0-9-]{1,63}$")
    """Name of the replica, unique among the nameservers of the cluster."""
    member_lease_ms: int = Field(30_000, ge=2_000)
    """A member that is silent for so long is removed from its group, in milliseconds; etcd
    rounds up to whole seconds."""
    heartbeat_interval_ms: int = Field(10_000, ge=100)
    """Members are told to send a heartbeat so often, in milliseconds."""
    session_grace_ms: int = Field(5_000, ge=1_000, le=60_000)
    """A member whose connection broke, and who sends no heartbeat, is removed after so long, in
    milliseconds; rounded up to whole seconds."""
    auto_create_topics: bool = False
    """Whether a topic that a producer asks for is created if it does not exist."""
    auto_create_queue_count: int = Field(QUEUES_DEFAULT, ge=1, le=QUEUES_MAX)
    """Queues of a topic that is created so."""
    auto_create_template: str = ""
    """A topic whose number of queues and permission a topic that is created so takes instead, if
    it is there and marked as inherited; empty for none."""
    shrink_interval_ms: int = Field(2_000, ge=50)
    """How often queues that are being given up are looked at, in milliseconds."""
    inspect_interval_ms: int = Field(15_000, ge=100)
    """How often all groups are looked at for lag and stuck queues, in milliseconds; the replica
    whose node id comes first does it."""
    metrics_queue_count: int = Field(QUEUES_DEFAULT, ge=1, le=QUEUES_MAX)
    """Queues of the topic BATON_SYS_METRICS when it is created, but one per broker at least; a
    broker that comes later gains one."""
    watchers_max: int = Field(10_000, ge=1)
    """Open watches of routes and groups; more are refused."""

    @model_validator(mode="after")
    def _one_heartbeat_may_be_lost(self) -> NameserverSettings:
        if self.heartbeat_interval_ms * 2 > self.member_lease_ms:
            raise ValueError("heartbeat_interval_ms must be at most half of member_lease_ms")
        return self
