"""Settings that every service has."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from batonmq.common.config import Settings


class ServiceSettings(Settings):
    """Read from BATON_<SERVICE>_<NAME> and the file BATON_<SERVICE>_CONFIG_FILE names."""

    cluster: str = Field("baton", pattern=r"^[A-Za-z0-9_-]{1,63}$")
    """Cluster the process belongs to; part of every key in etcd."""
    node_id: str = Field(pattern=r"^[a-z0-9-]{1,63}$")
    """Name of the process, unique within its service; for storage, the broker name."""
    host: str = "127.0.0.1"
    """Address the gRPC and metrics servers bind to."""
    port: int = Field(0, ge=0, le=65_535)
    """Port of the gRPC server; 0 takes a free one."""
    advertise_address: str = ""
    """host:port at which others reach the gRPC server; empty means host:port as bound."""
    metrics_port: int = Field(0, ge=0, le=65_535)
    """Port of the Prometheus endpoint; 0 takes a free one."""
    etcd: str = Field("127.0.0.1:2379", pattern=r"^[^,]+:\d+(,[^,]+:\d+)*$")
    """host:port of etcd; of several members separated by commas."""
    node_lease_ms: int = Field(5_000, ge=2_000)
    """A process that is silent for so long is no longer listed, in milliseconds."""
    metrics_stream: bool = True
    """Whether what the process does is published to the topic BATON_SYS_METRICS; at a nameserver,
    also whether it creates that topic and BATON_SYS_ALERTS."""
    metrics_encoding: Literal["protobuf", "arrow"] = "protobuf"
    """How: `arrow` is read faster by Spark, and needs the package pyarrow."""
    shutdown_grace_ms: int = Field(10_000, ge=0)
    """How long calls under way may take to end after SIGTERM, in milliseconds."""
