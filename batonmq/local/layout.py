"""What a local cluster consists of: programs, ports, folders.

lock          held while the cluster runs
ports.json    the services' ports
logs/         one file per process
etcd/         unless another etcd is used
storage/      what the process of that name keeps
storage-1/    and so on, if there are several storage nodes
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

_WITH_DATA = ("storage", "offsets")
_WATERMARKS = {
    "disk_warn_percent": 95,
    "disk_clean_percent": 96,
    "disk_clean_forcibly_percent": 97,
    "disk_full_percent": 98,
}
"""A person's disk may well be 90 % full of other things."""


def storage_names(brokers: int) -> tuple[str, ...]:
    """Names of the storage processes: `storage` keeps `broker-0`, `storage-1` `broker-1`."""
    return tuple(f"storage-{number}" if number else "storage" for number in range(brokers))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """How a local cluster differs from the default.

    Attributes:
        cluster: Name of the cluster, for clusters that share an etcd.
        etcd: host:port of an etcd to use; one of its own if empty.
        brokers: How many storage nodes there are, at least 1: `broker-0` and so on.
        nameserver_port: Port the nameserver gets if it is free and none was kept; 0 for any.
        log_level: Lowest level the services log.
        settings: Further settings by service, for all its processes, such as
            `{"storage": {"segment_bytes": 65536}}`.
        auto_restart: Start a process again that ended unasked.
    """

    cluster: str = "baton"
    etcd: str = ""
    brokers: int = 1
    nameserver_port: int = 0
    log_level: str = "INFO"
    settings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    auto_restart: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The processes of the services, in the order in which they are started."""
        return ("offsets", *storage_names(self.brokers), "lockmgr", "nameserver")


class Layout:
    """Addresses and programs of one data directory; the ports are chosen when it is made."""

    def __init__(self, data_dir: Path, options: ClusterOptions) -> None:
        self._data_dir, self._options = data_dir, options
        wanted = [port for name in options.names for port in (name, f"{name}-metrics")]
        preferred = {"nameserver": options.nameserver_port}
        self._ports = keep_ports(data_dir / "ports.json", wanted, preferred)

    @property
    def etcd_dir(self) -> Path:
        """Where an etcd of the cluster's own lives."""
        return self._data_dir / "etcd"

    def address(self, name: str) -> str:
        """host:port of a process's gRPC server."""
        return f"{HOST}:{self._ports[name]}"

    def metrics_address(self, name: str) -> str:
        """host:port of a process's Prometheus endpoint."""
        return f"{HOST}:{self._ports[f'{name}-metrics']}"

    def log_path(self, name: str) -> Path:
        """Where its output goes."""
        return self._data_dir / "logs" / f"{name}.log"

    def program(self, name: str, etcd: str) -> Program:
        """A process of a service.

        Args:
            name: One of the options' `names`.
            etcd: host:port.
        """
        service, _, number = name.partition("-")
        kind = "broker" if service == "storage" else service
        settings: dict[str, object] = {
            "cluster": self._options.cluster,
            "node_id": f"{kind}-{number or 0}",
            "host": HOST,
            "port": self._ports[name],
            "metrics_port": self._ports[f"{name}-metrics"],
            "etcd": etcd,
            "log_level": self._options.log_level,
        }
        if service in _WITH_DATA:
            settings["data_dir"] = self._data_dir / name
        if service == "storage":
            settings |= _WATERMARKS
        settings |= self._options.settings.get(service, {})
        return Program(
            name=name,
            # -P: a folder called `services` where the command was given is not ours.
            command=[sys.executable, "-P", "-m", f"services.{service}"],
            drop=("BATON_",),
            env={f"BATON_{service}_{key}".upper(): str(value) for key, value in settings.items()},
            log_path=self.log_path(name),
            is_ready=lambda: _serves(self.address(name)),
        )


async def _serves(address: str) -> bool:
    async with connect(address) as channel:
        return await ask_health(channel) == SERVING
