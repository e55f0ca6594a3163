"""What a local cluster consists of: programs, ports, folders.

lock          held while the cluster runs
ports.json    the services' ports
logs/         one file per process
etcd/         unless another etcd is used; etcd-1/ and so on, if there are several
storage/      what the process of that name keeps
storage-1/    and so on, if there are several brokers; storage-0-a/ if they have replicas
offsets/      likewise
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from batonmq.channels import connect
from batonmq.common.health import SERVING, ask_health
from batonmq.local.child import Program
from batonmq.local.place import LOOPBACK, Place
from batonmq.local.ports import keep_ports

_WITH_DATA = ("storage", "offsets")
_WATERMARKS = {
    "disk_warn_percent": 95,
    "disk_clean_percent": 96,
    "disk_clean_forcibly_percent": 97,
    "disk_full_percent": 98,
}
"""A person's disk may well be 90 % full of other things."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a service.

    Attributes:
        name: Of the process, its folder and its log.
        settings: What it does not share with others of its service.
    """

    name: str
    service: str
    node_id: str
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """How a local cluster differs from the default.

    Attributes:
        cluster: Name of the cluster, for clusters that share an etcd.
        etcd: host:port of an etcd to use; some of its own if empty.
        etcds: How many etcd members there are, if they are its own.
        brokers: How many brokers there are, at least 1: `broker-0` and so on.
        storage_replicas: Nodes of each broker, 1 to 5: with several, `storage-0-a` and so on.
        offsets: Nodes of each offsets set, 1 to 5.
        offsets_sets: How many offsets sets there are, 1 to 5, over which the groups are spread:
            `offsets`, and `offsets-b` and so on, whose nodes are `offsets-b-0` and so on.
        lockmgrs: How many lock managers there are, of which one leads.
        nameservers: How many nameservers there are.
        nameserver_port: Port the first nameserver gets if it is free and none was kept; 0 for any.
        log_level: Lowest level the services log.
        settings: Further settings by service, for all its processes, such as
            `{"storage": {"segment_bytes": 65536}}`.
        auto_restart: Start a process again that ended unasked.
        places: By name of a process, etcd included: where it runs; on loopback if it is not named.
        programs: Package of the services' programs, such as `services.storage`.
    """

    cluster: str = "baton"
    etcd: str = ""
    etcds: int = 1
    brokers: int = 1
    storage_replicas: int = 1
    offsets: int = 1
    offsets_sets: int = 1
    lockmgrs: int = 1
    nameservers: int = 1
    nameserver_port: int = 0
    log_level: str = "INFO"
    settings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    auto_restart: bool = True
    places: Mapping[str, Place] = field(default_factory=dict)
    programs: str = "services"

    @property
    def members(self) -> tuple[Member, ...]:
        """The processes of the services, in the order in which they are started."""
        return (
            *(one for letter in "abcde"[: self.offsets_sets] for one in self._offsets(letter)),
            *(one for number in range(self.brokers) for one in self._storage(number)),
            *(Member(_nth("lockmgr", i), "lockmgr", f"lockmgr-{i}") for i in range(self.lockmgrs)),
            *(
                Member(_nth("nameserver", i), "nameserver", f"nameserver-{i}")
                for i in range(self.nameservers)
            ),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the members."""
        return tuple(member.name for member in self.members)

    def names_of(self, service: str) -> tuple[str, ...]:
        """Names of the members of a service."""
        return tuple(member.name for member in self.members if member.service == service)

    def _storage(self, number: int) -> list[Member]:
        broker, name = f"broker-{number}", _nth("storage", number)
        if self.storage_replicas == 1:
            return [Member(name, "storage", broker)]
        nodes = [f"{broker}-{letter}" for letter in "abcde"[: self.storage_replicas]]
        replicated = {"broker": broker, "replicas": ",".join(nodes)}
        return [
            Member(f"storage-{number}-{node[-1]}", "storage", node, replicated) for node in nodes
        ]

    def _offsets(self, letter: str) -> list[Member]:
        name = "offsets" if letter == "a" else f"offsets-{letter}"
        nodes = [f"{name}-{number}" for number in range(self.offsets)]
        settings: dict[str, object] = {"replica_set": name}
        if self.offsets > 1:
            # A majority: what was answered for survives the loss of the rest.
            settings |= {"replicas": ",".join(nodes), "min_in_sync": self.offsets // 2 + 1}
        return [
            Member(_nth(name, number) if letter == "a" else node, "offsets", node, settings)
            for number, node in enumerate(nodes)
        ]


def highly_available(options: ClusterOptions) -> ClusterOptions:
    """The cluster with enough of everything to lose one of each."""
    return replace(
        options, etcds=3, brokers=2, storage_replicas=2, offsets=3, lockmgrs=2, nameservers=2
    )


def _nth(service: str, number: int) -> str:
    """The first is called as its service."""
    return f"{service}-{number}" if number else service


class Layout:
    """Addresses and programs of one data directory; the ports are chosen when it is made."""

    def __init__(self, data_dir: Path, options: ClusterOptions) -> None:
        self._data_dir, self._options = data_dir, options
        wanted = [port for name in options.names for port in (name, f"{name}-metrics")]
        preferred = {"nameserver": options.nameserver_port}
        self._ports = keep_ports(data_dir / "ports.json", wanted, preferred)

    def etcd_dir(self, number: int) -> Path:
        """Where an etcd of the cluster's own lives."""
        return self._data_dir / _nth("etcd", number)

    def address(self, name: str) -> str:
        """host:port of a process's gRPC server."""
        return f"{self._place(name).host}:{self._ports[name]}"

    def metrics_address(self, name: str) -> str:
        """host:port of a process's Prometheus endpoint."""
        return f"{self._place(name).host}:{self._ports[f'{name}-metrics']}"

    def log_path(self, name: str) -> Path:
        """Where its output goes."""
        return self._data_dir / "logs" / f"{name}.log"

    def program(self, member: Member, etcd: str) -> Program:
        """A process of a service.

        Args:
            etcd: host:port; several separated by commas.
        """
        name, service = member.name, member.service
        settings: dict[str, object] = {
            "cluster": self._options.cluster,
            "node_id": member.node_id,
            "host": self._place(name).host,
            "port": self._ports[name],
            "metrics_port": self._ports[f"{name}-metrics"],
            "etcd": etcd,
            "log_level": self._options.log_level,
        }
        if service in _WITH_DATA:
            settings["data_dir"] = self._data_dir / name
        if service == "storage":
            settings |= _WATERMARKS
        settings |= {**member.settings, **self._options.settings.get(service, {})}
        return Program(
            name=name,
            command=[
                *self._place(name).launcher,
                # -P: a folder called `services` where the command was given is not ours.
                *(sys.executable, "-P", "-m", f"{self._options.programs}.{service}"),
            ],
            drop=("BATON_",),
            env={f"BATON_{service}_{key}".upper(): str(value) for key, value in settings.items()},
            log_path=self.log_path(name),
            is_ready=lambda: _serves(self.address(name)),
        )

    def _place(self, name: str) -> Place:
        return self._options.places.get(name, LOOPBACK)


async def _serves(address: str) -> bool:
    async with connect(address) as channel:
        return await ask_health(channel) == SERVING
