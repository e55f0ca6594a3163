"""The processes, ports and folders of a local cluster.

lock          locked while the cluster is running
tls/          certificate authority and certificates, with TLS only; those of etcd in tls/etcd; and
              the key that seals the secrets of access keys
ports.json    ports of the services
logs/         one file per process
etcd/         data of etcd, unless another etcd is used; etcd-1/ and so on for further members
storage/      data of the process of that name
storage-1/    and so on for further brokers; storage-0-a/ and so on with replicas
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
from batonmq_server.local.private_files import write_private
from batonmq_server.local.process_host import LOOPBACK, ProcessHost

SERVICES = ("storage", "offsets", "lockmgr", "nameserver")
"""The services that every cluster has."""
_WITH_DATA = ("storage", "offsets")
ADMIN = "admin"
"""Subject of the clients' certificate, and administrator if access control is on."""
ETCD = "etcd"
_SEALING_KEY = "sealing.key"
_WATERMARKS = {
    "disk_warn_percent": 95,
    "disk_clean_percent": 96,
    "disk_clean_forcibly_percent": 97,
    "disk_full_percent": 98,
}
"""Higher than the defaults, because the disk of a workstation may be 90 % full of other data."""

_DRAIN_MS = 5_000
"""Shorter than the default: a process that does not stop within 15 s is killed."""


class TlsSetupFailed(Exception):
    """TLS can't be set up, or a cluster can't change between TLS and no TLS."""


class EtcdsChanged(Exception):
    """A data directory has another number of etcd members than the cluster is to have."""


@dataclass(frozen=True, slots=True)
class ServiceInstance:
    """One process of a service.

    Attributes:
        name: Name of the process, its folder and its log.
        service: Name of the service.
        node_id: Node id of the process.
        settings: Settings that differ from those of other processes of the service.
    """

    name: str
    service: str
    node_id: str
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Options of a local cluster.

    Attributes:
        cluster: Name of the cluster; clusters that share an etcd need different names.
        etcd: host:port of a running etcd; empty to start one.
        etcds: Number of etcd members to start.
        etcd_fsync: Whether these members have data on the disk before they answer. Without, data
            survives `kill -9` but no power cut.
        brokers: Number of brokers, at least 1: `broker-0` and so on.
        storage_replicas: Nodes of each broker, 1 to 5; if several, `storage-0-a` and so on.
        offsets: Nodes of each offsets set, 1 to 5.
        offsets_sets: Number of offsets sets, 1 to 5, over which the groups are spread: `offsets`,
            and `offsets-b` and so on, with nodes `offsets-b-0` and so on.
        lockmgrs: Number of lock managers, one of which is the leader.
        nameservers: Number of nameservers.
        gateways: Number of gateways for clients of RocketMQ 5.
        gateway_port: Port of the first gateway for clients of RocketMQ 5; 0 for the one that the
            data directory had before.
        nameserver_port: Port of the first nameserver; 0 for the one that the data directory had
            before, if it is free, or else any.
        secure: Whether all connections use mutual TLS, with certificates of an authority that the
            cluster creates. Connections to a running etcd do not use TLS.
        access: Whether permissions are checked; needs `secure`. The subject of the clients'
            certificate is the administrator.
        log_level: Lowest level that the services log.
        settings: Further settings by service, for all its processes, such as
            `{"storage": {"segment_bytes": 65536}}`.
        auto_restart: Whether a process that ends unexpectedly is started again.
        hosts: Hosts of processes, etcd included, that are not on loopback, by the name of the
            process.
        programs: Package of the services' programs, such as `batonmq_server.storage`.
        folder: Working directory of the services; None for the data directory.
    """

    cluster: str = "baton"
    etcd: str = ""
    etcds: int = 1
    etcd_fsync: bool = True
    brokers: int = 1
    storage_replicas: int = 1
    offsets: int = 1
    offsets_sets: int = 1
    lockmgrs: int = 1
    nameservers: int = 1
    nameserver_port: int = 0
    gateways: int = 0
    gateway_port: int = 0
    secure: bool = False
    access: bool = False
    log_level: str = "INFO"
    settings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    auto_restart: bool = True
    hosts: Mapping[str, ProcessHost] = field(default_factory=dict)
    programs: str = "batonmq_server"
    folder: Path | None = None

    @property
    def instances(self) -> tuple[ServiceInstance, ...]:
        """Processes of the services, in the order of their start."""
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
            *(
                ServiceInstance(_nth("gateway", i), "gateway", f"gateway-{i}")
                for i in range(self.gateways)
            ),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the services' processes."""
        return tuple(member.name for member in self.instances)

    def names_of(self, service: str) -> tuple[str, ...]:
        """Return the names of the processes of a service."""
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
            # A majority: acknowledged changes survive the loss of the other nodes.
            settings |= {"replicas": ",".join(nodes), "min_in_sync": self.offsets // 2 + 1}
        return [
            ServiceInstance(
                _nth(name, number) if letter == "a" else node, "offsets", node, settings
            )
            for number, node in enumerate(nodes)
        ]


PORTS_FILE = "ports.json"


def highly_available(options: ClusterOptions) -> ClusterOptions:
    """Return options with enough instances to lose one of each service and of etcd."""
    brokers = max(2, options.brokers)
    return replace(
        options, etcds=3, brokers=brokers, storage_replicas=2, offsets=3, lockmgrs=2, nameservers=2
    )


def stored_brokers(data_dir: Path) -> int:
    """Return how many brokers a data directory has: one more than the highest number of one."""
    numbers = (
        name.partition("-")[2].partition("-")[0] or "0"
        for name in (one.name for one in data_dir.glob("storage*") if one.is_dir())
    )
    return max((int(number) + 1 for number in numbers if number.isdecimal()), default=0)


def _clients(gateway: str) -> str:
    """Return the name of the port of a gateway for clients without certificates."""
    return f"{gateway}-clients"


def _nth(service: str, number: int) -> str:
    """Return the name of a process; the first one has the name of its service."""
    return f"{service}-{number}" if number else service


class Layout:
    """Addresses and programs of a data directory; ports are chosen when the object is created.

    Raises:
        PortInUse: another process uses the port of the nameserver.
        TlsSetupFailed: a cluster with several etcd members was created with TLS and is now used
            without, or the reverse; or access control is on without TLS.
        EtcdsChanged: the data directory has another number of etcd members.
    """

    def __init__(self, data_dir: Path, options: ClusterOptions) -> None:
        self._data_dir, self._options = data_dir, options
        self._check_etcds()
        wanted = [port for name in options.names for port in (name, f"{name}-metrics")]
        wanted += [_clients(name) for name in options.names_of("gateway") if options.secure]
        gateway = _clients("gateway") if options.secure else "gateway"
        required = {"nameserver": options.nameserver_port, gateway: options.gateway_port}
        self._ports = keep_ports(
            data_dir / PORTS_FILE,
            wanted,
            required={name: port for name, port in required.items() if port},
        )
        self._tls = data_dir / "tls"
        exists = self.etcd_dir(0).exists() and options.etcds > 1
        if exists and self._tls.exists() != options.secure:
            was = "without --secure" if options.secure else "with --secure"
            raise TlsSetupFailed(
                f"{data_dir} was created {was}, which a cluster of several etcds can't change"
            )
        if options.access and not options.secure:
            raise TlsSetupFailed(
                "access control needs TLS: without it the identity of callers is unknown"
            )
        if options.secure:
            hosts = {self._host(name).address for name in (*options.names, *options.hosts)}
            _certify(self._tls, sorted({"localhost", HOST, *hosts}))
            _make_sealing_key(self._tls / _SEALING_KEY)

    def _check_etcds(self) -> None:
        """Return if the members of etcd are those of before: further ones would not join them.

        Raises:
            EtcdsChanged: there are more or fewer.
        """
        wanted, stored = self._options.etcds, 0
        while (self.etcd_dir(stored) / "data").exists():
            stored += 1
        if stored and stored != wanted and not self._options.etcd:
            raise EtcdsChanged(
                f"{self._data_dir} has the data of {stored} etcd members, and the cluster is to "
                f"have {wanted}"
            )

    def security(self, name: str = ADMIN) -> Security | None:
        """Return the TLS files of a client, of `etcd`, or of a service; None without TLS."""
        if not self._options.secure:
            return None
        folder = self._tls / ETCD if name == ETCD else self._tls
        return Security(
            ca_file=str(folder / "ca.pem"),
            cert_file=str(folder / f"{name}.pem"),
            key_file=str(folder / f"{name}.key"),
        )

    def etcd_dir(self, number: int) -> Path:
        """Return the data directory of an etcd member."""
        return self._data_dir / _nth("etcd", number)

    def address(self, name: str) -> str:
        """Return host:port of the gRPC server of a process."""
        return f"{self._host(name).address}:{self._ports[name]}"

    def remote_address(self, name: str) -> str:
        """Return host:port of a gateway for clients of RocketMQ 5, which have no certificate."""
        port = self._ports[_clients(name) if self._options.secure else name]
        return f"{self._host(name).address}:{port}"

    def metrics_address(self, name: str) -> str:
        """Return host:port of the Prometheus endpoint of a process."""
        return f"{self._host(name).address}:{self._ports[f'{name}-metrics']}"

    def log_path(self, name: str) -> Path:
        """Return the log file of a process."""
        return self._data_dir / "logs" / f"{name}.log"

    def program(self, member: ServiceInstance, etcd: str) -> Program:
        """Return the program of a process.

        Args:
            etcd: host:port of etcd; several separated by commas.
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
        if service == "gateway":
            settings["drain_timeout_ms"] = _DRAIN_MS
            if self._options.secure:
                settings["tls_port"] = self._ports[_clients(name)]
        if service in ("nameserver", "gateway") and self._options.access:
            settings["sealing_key_file"] = self._tls / _SEALING_KEY
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
            folder=self._options.folder or self._data_dir,
            is_ready=lambda: _serves(self.address(name), self.security()),
        )

    def _security(self, service: str) -> dict[str, object]:
        """Return the TLS settings of a service, or the one that allows a network without TLS."""
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


def _make_sealing_key(path: Path) -> None:
    """Make the key that seals the secrets of access keys, if there is none yet."""
    from batonmq_server.runtime.access.sealing import new_sealing_key  # noqa: PLC0415  slow to import, and often unused

    if not path.exists():
        write_private(path, f"{new_sealing_key()}\n".encode())


def _certify(folder: Path, hosts: Sequence[str]) -> None:
    """Issue new certificates for all services and for the administrator."""
    from batonmq_server.local.certificates import CertificateAuthority, CertificateSubject  # noqa: PLC0415  slow to import, and often unused

    authority = CertificateAuthority(folder)
    for service in (*SERVICES, "gateway"):
        authority.issue(CertificateSubject(name=service, uri=f"service:{service}", hosts=hosts))
    authority.issue(CertificateSubject(name=ADMIN))
    # A separate authority: its certificates give access to all data in etcd, whatever was granted.
    CertificateAuthority(folder / ETCD).issue(CertificateSubject(name=ETCD, hosts=hosts))
