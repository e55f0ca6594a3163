"""The console of a local cluster: a process beside the cluster, supervised."""

from __future__ import annotations

import asyncio
import secrets
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from batonmq_server.local.child_process import ChildProcess, NotReady, Program
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.ports import HOST, keep_ports
from batonmq_server.local.private_files import write_private
from batonmq_server.local.supervisor import RestartLimitExceeded, Supervisor

PORT = 9878
_NAME = "console"
_KEY_FILE = "console.key"


class LocalConsole:
    """The console process; it acts as the administrator for the person who has its key.

    If it keeps ending, that is reported, and the cluster runs on without it.

    Args:
        cluster: A running cluster.
        report: Called with each message for the user.
        port: Port to use if it is free and none was used before; 0 for any.
        chosen: Whether it has to be `port`, unless that is 0.
        prometheus: URL of a Prometheus with the alert rules; empty for none.

    Raises:
        PortInUse: another process uses the port that it has to have.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        report: Callable[[str], None],
        *,
        port: int = PORT,
        chosen: bool = False,
        prometheus: str = "",
    ) -> None:
        self._folder = cluster.data_dir / _NAME
        self._folder.mkdir(mode=0o700, exist_ok=True)
        wanted = {_NAME: port} if port else {}
        preferred, required = ({}, wanted) if chosen else (wanted, {})
        path = self._folder / "ports.json"
        ports = keep_ports(path, [_NAME], preferred, required=required)
        self.address = f"{HOST}:{ports[_NAME]}"
        """host:port of its pages."""
        self._key = ""
        self._report = report
        self._supervisor = Supervisor(report, auto_restart=True)
        self._tasks = asyncio.TaskGroup()
        settings: dict[str, object] = {
            "nameserver": cluster.nameserver,
            "port": ports[_NAME],
            "changes": "true",
            "prometheus": prometheus,
            "log_level": cluster.options.log_level,
        }
        if cluster.security is not None:
            settings |= {
                name: getattr(cluster.security, name)
                for name in ("ca_file", "cert_file", "key_file")
            }
            settings["sign_in_key_file"] = self._make_key()
        self._child = ChildProcess(
            Program(
                name=_NAME,
                command=[sys.executable, "-m", "batonmq_server.console"],
                drop=("BATON_",),
                env={f"BATON_CONSOLE_{key}".upper(): str(value) for key, value in settings.items()},
                log_path=cluster.data_dir / "logs" / "console.log",
                folder=self._folder,
                is_ready=lambda: asyncio.to_thread(self._is_ready),
            )
        )

    @property
    def url(self) -> str:
        """Address for the browser; with TLS it contains the key, so show it to the user only."""
        if not self._key:
            return f"http://{self.address}/"
        return f"http://{self.address}/sign-in#key={self._key}"

    @property
    def pid(self) -> int | None:
        """Process id; None while it is not running."""
        return self._child.pid

    async def __aenter__(self) -> Self:
        """Start it, and wait until it answers.

        Raises:
            NotReady: it ended or does not answer; see its log.
        """
        self._supervisor.add(self._child)
        try:
            await self._supervisor.ready(_NAME)
        except BaseException:
            self._child.kill_now()
            raise
        await self._tasks.__aenter__()
        self._watching = self._tasks.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watching.cancel()
        await self._tasks.__aexit__(None, None, None)
        await self._supervisor.stop_all(((_NAME,),))

    async def _watch(self) -> None:
        try:
            await self._supervisor.watch(_NAME)
        except (RestartLimitExceeded, NotReady) as error:
            self._report(f"the console is not started again: {error}")

    def _make_key(self) -> Path:
        """Write the key of the sign-in, which only this user can read; keep an existing one."""
        path = self._folder / _KEY_FILE
        if not path.exists():
            write_private(path, f"{secrets.token_urlsafe(32)}\n".encode())
        self._key = path.read_text().strip()
        return path

    def _is_ready(self) -> bool:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(f"http://{self.address}/health", timeout=1) as response:
                return bool(response.status == 200)
        except OSError:
            return False
