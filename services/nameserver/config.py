"""Settings of the nameserver."""

from __future__ import annotations

from pydantic import Field, model_validator

from batonmq_server.nameserver.core.groups import MEMBERS_MAX
from batonmq_server.nameserver.core.topics import QUEUES_DEFAULT, QUEUES_MAX
from batonmq_server.runtime.settings import ServiceSettings


class NameserverSettings(ServiceSettings):
    """Read from BATON_NAMESERVER_<NAME> and the file that BATON_NAMESERVER_CONFIG_FILE names."""

    node_id: str = Field("nameserver-0", pattern=r"^[a-z0-9-]{1,63}$")
    """Name of the replica, unique among the nameservers of the cluster."""
    member_lease_ms: int = Field(30_000, ge=2_000)
    """Lease of a group member, in milliseconds: without a heartbeat for this time the member is
    removed. etcd rounds up to whole seconds."""
    heartbeat_interval_ms: int = Field(10_000, ge=100)
    """Interval of the heartbeats of group members, in milliseconds; at most half of
    member_lease_ms."""
    session_grace_ms: int = Field(5_000, ge=1_000, le=60_000)
    """Time after a broken connection until the member is removed if it sends no heartbeat, in
    milliseconds; rounded up to whole seconds."""
    auto_create_topics: bool = False
    """Whether a topic is created on demand when a producer requests its route."""
    auto_create_queue_count: int = Field(QUEUES_DEFAULT, ge=1, le=QUEUES_MAX)
    """Number of queues of a topic that is created on demand."""
    auto_create_template: str = ""
    """Template of the topics that are created on demand: they copy its number of queues, permission
    and retention. The template must exist and be marked as inherited (`baton topic update
    --inherited`); otherwise `auto_create_queue_count` holds. Empty: no template."""
    shrink_interval_ms: int = Field(2_000, ge=50)
    """Interval of checks whether retiring queues can be removed, in milliseconds."""
    inspect_interval_ms: int = Field(15_000, ge=100)
    """Interval of inspections of all groups for lag and stuck queues, in milliseconds; the replica
    with the lowest node id inspects."""
    metrics_queue_count: int = Field(QUEUES_DEFAULT, ge=1, le=QUEUES_MAX)
    """Number of queues of the topic BATON_SYS_METRICS when it is created; at least one per broker.
    A broker that is added later gets one queue."""
    watchers_max: int = Field(10_000, ge=1)
    """Maximum number of open streams of WatchRoute and WatchGroup; more are refused."""

    group_members_max: int = Field(MEMBERS_MAX, ge=1, le=10_000)
    """Maximum number of live members of a group; more are refused."""
    group_write_bytes_per_s: int = Field(262_144, ge=1_024)
    """Maximum bytes per second that a nameserver writes for the record of one group; each change
    counts the whole record. At the limit the nameserver changes the group less often, with more
    requests in each change. The records of the refused clients of a group have a limit of the same
    size."""
    joins_per_s_max: int = Field(50, ge=1)
    """Maximum number of joins and changed subscriptions of one identity per second, over all
    groups; a burst may have ten times as many. Without access control there are no identities and
    no limit."""
    sealing_key_file: str = ""
    """File with the keys that seal the secrets of access keys, the same for all nameservers and
    gateways: one line for each, 32 bytes in base64, the current key first. Empty: no access key can
    be created."""
    etcd_check_interval_ms: int = Field(10_000, ge=100)
    """Interval of checks of etcd's space and alarms, in milliseconds."""

    @model_validator(mode="after")
    def _one_heartbeat_may_be_lost(self) -> NameserverSettings:
        if self.heartbeat_interval_ms * 2 > self.member_lease_ms:
            raise ValueError("heartbeat_interval_ms must be at most half of member_lease_ms")
        return self
