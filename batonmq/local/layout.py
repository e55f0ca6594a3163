"""What a local cluster consists of: programs, ports, folders.

lock          held while the cluster runs
ports.json    the services' ports
logs/         one file per process
etcd/         unless another etcd is used
storage/      what the service of that name keeps
offsets/
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from batonmq.channels import connect
from batonmq.common.health import SERVING, ask_health
from batonmq.local.child import Program
from batonmq.local.ports import HOST, keep_ports

SERVICES = ("offsets", "storage", "lockmgr", "nameserver")
"""The services, in the order in which they are started."""
_WITH_DATA = ("storage", "offsets")
_WATERMARKS = {
    "disk_warn_percent": 95,
    "disk_clean_percent": 96,
    "disk_clean_forcibly_percent": 97,
    "disk_full_percent": 98,
}
"""A person's disk may well be 90 % full of other things."""
_NODE_IDS = {"storage": "broker-0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """How a local cluster differs from the default.

    Attributes:
        cluster: Name of the cluster, for clusters that share an etcd.
        etcd: host:port of an etcd to use; one of its own if empty.
        nameserver_port: Port the nameserver gets if it is free and none was kept; 0 for any.
        log_level: Lowest level the services log.
        settings: Further settings by service, such as `{"storage": {"segment_bytes": 65536}}`.
        auto_restart: Start a process again that ended unasked.
    """

    cluster: str = "baton"
    etcd: str = ""
    nameserver_port: int = 0
    log_level: str = "INFO"
    settings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    auto_restart: bool = True


class Layout:
    """Addresses and programs of one data directory; the ports are chosen when it is made."""

    def __init__(self, data_dir: Path, options: ClusterOptions) -> None:
        self._data_dir, self._options = data_dir, options
        wanted = [port for name in SERVICES for port in (name, f"{name}-metrics")]
        preferred = {"nameserver": options.nameserver_port}
        self._ports = keep_ports(data_dir / "ports.json", wanted, preferred)

    @property
    def etcd_dir(self) -> Path:
        """Where an etcd of the cluster's own lives."""
        return self._data_dir / "etcd"

    def address(self, service: str) -> str:
        """host:port of its gRPC server."""
        return f"{HOST}:{self._ports[service]}"

    def metrics_address(self, service: str) -> str:
        """host:port of its Prometheus endpoint."""
        return f"{HOST}:{self._ports[f'{service}-metrics']}"

    def log_path(self, name: str) -> Path:
        """Where its output goes."""
        return self._data_dir / "logs" / f"{name}.log"

    def program(self, service: str, etcd: str) -> Program:
        """The process of a service.

        Args:
            etcd: host:port.
        """
        settings: dict[str, object] = {
            "cluster": self._options.cluster,
            "node_id": _NODE_IDS.get(service, f"{service}-0"),
            "host": HOST,
            "port": self._ports[service],
            "metrics_port": self._ports[f"{service}-metrics"],
            "etcd": etcd,
            "log_level": self._options.log_level,
        }
        if service in _WITH_DATA:
            settings["data_dir"] = self._data_dir / service
        if service == "storage":
            settings |= _WATERMARKS
        settings |= self._options.settings.get(service, {})
        return Program(
            name=service,
            # -P: a folder called `services` where the command was given is not ours.
            command=[sys.executable, "-P", "-m", f"services.{service}"],
            drop=("BATON_",),
            env={f"BATON_{service}_{key}".upper(): str(value) for key, value in settings.items()},
            log_path=self.log_path(service),
            is_ready=lambda: _serves(self.address(service)),
        )


async def _serves(address: str) -> bool:
    async with connect(address) as channel:
        return await ask_health(channel) == SERVING
