"""What a local cluster consists of: programs, ports, folders.

lock          held while the cluster runs
tls/          an authority and what it has certified, if the cluster is secure; etcd's in tls/etcd
ports.json    the services' ports
logs/         one file per process
etcd/         unless another etcd is used; etcd-1/ and so on, if there are several
storage/      what the process of that name keeps
storage-1/    and so on, if there are several brokers; storage-0-a/ if they have replicas
offsets/      likewise
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from batonmq._common.health import SERVING, ask_health
from batonmq._connection.channels import connector
from batonmq._connection.security import Security
from batonmq_server.local.child_process import Program
from batonmq_server.local.ports import HOST, keep_ports
from batonmq_server.local.process_host import LOOPBACK, ProcessHost

SERVICES = ("storage", "offsets", "lockmgr", "nameserver")
_WITH_DATA = ("storage", "offsets")
ADMIN = "admin"
"""Whom the certificate of clients is about, and who may do everything where access is on."""
ETCD = "etcd"
_WATERMARKS = {
    "disk_warn_percent": 95,
    "disk_clean_percent": 96,
    "disk_clean_forcibly_percent": 97,
    "disk_full_percent": 98,
}
"""A person's disk may well be 90 % full of other things."""


class TlsSetupFailed(Exception):
    """The cluster can't be made secure, or can't be what it was not before."""


@dataclass(frozen=True, slots=True)
class ServiceInstance:
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
        secure: Everybody shows a certificate to everybody, by an authority that the cluster makes;
            an etcd that is not its own is talked to without TLS.
        access: Nobody but the administrator, whom clients' certificate is about, may do what was
            not granted; only if the cluster is secure.
        log_level: Lowest level the services log.
        settings: Further settings by service, for all its processes, such as
            `{"storage": {"segment_bytes": 65536}}`.
        auto_restart: Start a process again that ended unasked.
        hosts: By name of a process, etcd included: where it runs; on loopback if it is not named.
        programs: Package of the services' programs, such as `batonmq_server.storage`.
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
    secure: bool = False
    access: bool = False
    log_level: str = "INFO"
    settings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    auto_restart: bool = True
    hosts: Mapping[str, ProcessHost] = field(default_factory=dict)
    programs: str = "batonmq_server"

    @property
    def instances(self) -> tuple[ServiceInstance, ...]:
        """The processes of the services, in the order in which they are started."""
        return (
            *(one for letter in "abcde"[: self.offsets_sets] for one in self._offsets(letter)),
            *(one for number in range(self.brokers) for one in self._storage(number)),
            *(
                ServiceInstance(_nth("lockmgr", i), "lockmgr", f"lockmgr-{i}")
                for i in range(self.lockmgrs)
            ),
            *(
                ServiceInstance(_nth("nameserver", i), "nameserver", f"nameserver-{i}")
                for i in range(self.nameservers)
            ),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the members."""
        return tuple(member.name for member in self.instances)

    def names_of(self, service: str) -> tuple[str, ...]:
        """Names of the members of a service."""
        return tuple(member.name for member in self.instances if member.service == service)

    def _storage(self, number: int) -> list[ServiceInstance]:
        broker, name = f"broker-{number}", _nth("storage", number)
        if self.storage_replicas == 1:
            return [ServiceInstance(name, "storage", broker)]
        nodes = [f"{broker}-{letter}" for letter in "abcde"[: self.storage_replicas]]
        replicated = {"broker": broker, "replicas": ",".join(nodes)}
        return [
            ServiceInstance(f"storage-{number}-{node[-1]}", "storage", node, replicated)
            for node in nodes
        ]

    def _offsets(self, letter: str) -> list[ServiceInstance]:
        name = "offsets" if letter == "a" else f"offsets-{letter}"
        nodes = [f"{name}-{number}" for number in range(self.offsets)]
        settings: dict[str, object] = {"replica_set": name}
        if self.offsets > 1:
            # A majority: what was answered for survives the loss of the rest.
            settings |= {"replicas": ",".join(nodes), "min_in_sync": self.offsets // 2 + 1}
        return [
            ServiceInstance(
                _nth(name, number) if letter == "a" else node, "offsets", node, settings
            )
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
    """Addresses and programs of one data directory; the ports are chosen when it is made.

    Raises:
        TlsSetupFailed: nothing here makes certificates; or several members of etcd know each other
            as what they were when the directory was begun.
    """

    def __init__(self, data_dir: Path, options: ClusterOptions) -> None:
        self._data_dir, self._options = data_dir, options
        wanted = [port for name in options.names for port in (name, f"{name}-metrics")]
        preferred = {"nameserver": options.nameserver_port}
        self._ports = keep_ports(data_dir / "ports.json", wanted, preferred)
        self._tls = data_dir / "tls"
        begun = self.etcd_dir(0).exists() and options.etcds > 1
        if begun and self._tls.exists() != options.secure:
            was = "without --secure" if options.secure else "with --secure"
            raise TlsSetupFailed(f"{data_dir} was begun {was}, which its etcds can't change")
        if options.access and not options.secure:
            raise TlsSetupFailed("access needs TLS: without it nothing proves who calls")
        if options.secure:
            hosts = {self._host(name).address for name in (*options.names, *options.hosts)}
            _certify(self._tls, sorted({"localhost", HOST, *hosts}))

    def security(self, name: str = ADMIN) -> Security | None:
        """What a client shows, or `etcd`, or a service; None if the cluster is not secure."""
        if not self._options.secure:
            return None
        folder = self._tls / ETCD if name == ETCD else self._tls
        return Security(
            ca_file=str(folder / "ca.pem"),
            cert_file=str(folder / f"{name}.pem"),
            key_file=str(folder / f"{name}.key"),
        )

    def etcd_dir(self, number: int) -> Path:
        """Where an etcd of the cluster's own lives."""
        return self._data_dir / _nth("etcd", number)

    def address(self, name: str) -> str:
        """host:port of a process's gRPC server."""
        return f"{self._host(name).address}:{self._ports[name]}"

    def metrics_address(self, name: str) -> str:
        """host:port of a process's Prometheus endpoint."""
        return f"{self._host(name).address}:{self._ports[f'{name}-metrics']}"

    def log_path(self, name: str) -> Path:
        """Where its output goes."""
        return self._data_dir / "logs" / f"{name}.log"

    def program(self, member: ServiceInstance, etcd: str) -> Program:
        """A process of a service.

        Args:
            etcd: host:port; several separated by commas.
        """
        name, service = member.name, member.service
        settings: dict[str, object] = {
            "cluster": self._options.cluster,
            "node_id": member.node_id,
            "host": self._host(name).address,
            "port": self._ports[name],
            "metrics_port": self._ports[f"{name}-metrics"],
            "etcd": etcd,
            "log_level": self._options.log_level,
        }
        settings |= self._security(service)
        if service in _WITH_DATA:
            settings["data_dir"] = self._data_dir / name
        if service == "storage":
            settings |= _WATERMARKS
        settings |= {**member.settings, **self._options.settings.get(service, {})}
        return Program(
            name=name,
            command=[
                *self._host(name).launcher,
                *(sys.executable, "-m", f"{self._options.programs}.{service}"),
            ],
            drop=("BATON_",),
            env={f"BATON_{service}_{key}".upper(): str(value) for key, value in settings.items()},
            log_path=self.log_path(name),
            is_ready=lambda: _serves(self.address(name), self.security()),
        )

    def _security(self, service: str) -> dict[str, object]:
        """Settings of a service that say how it uses TLS, or that it may do without."""
        own = self.security(service)
        if own is None:
            return {"insecure_network": True} if self._options.hosts else {}
        settings: dict[str, object] = {**_files("tls", own)}
        if not self._options.etcd:
            settings |= _files("etcd", self.security(ETCD))
        if self._options.access:
            settings |= {"access": True, "access_admins": ADMIN}
        return settings

    def _host(self, name: str) -> ProcessHost:
        return self._options.hosts.get(name, LOOPBACK)


def _files(user: str, security: Security | None) -> dict[str, str]:
    assert security is not None
    names = ("ca_file", "cert_file", "key_file")
    return {f"{user}_{name}": getattr(security, name) for name in names}


async def _serves(address: str, security: Security | None) -> bool:
    async with connector(security)(address) as channel:
        return await ask_health(channel) == SERVING


def _certify(folder: Path, hosts: Sequence[str]) -> None:
    """Certificates for everybody, anew at each start."""
    try:
        from batonmq_server.local.certificates import CertificateAuthority, CertificateSubject  # noqa: PLC0415  brought by [local]
    except ModuleNotFoundError as error:
        raise TlsSetupFailed(
            "nothing here makes certificates: install batonmq[local], or leave --secure out"
        ) from error
    authority = CertificateAuthority(folder)
    for service in SERVICES:
        authority.issue(CertificateSubject(name=service, uri=f"service:{service}", hosts=hosts))
    authority.issue(CertificateSubject(name=ADMIN))
    # Whoever this one certifies reads and writes everything, whatever was granted.
    CertificateAuthority(folder / ETCD).issue(CertificateSubject(name=ETCD, hosts=hosts))
