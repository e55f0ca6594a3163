"""A Prometheus that scrapes a local cluster, if the machine has one."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from batonmq_server.local.child_process import ChildProcess, Program
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.ports import HOST, keep_ports

CONFIG = Path(__file__).parents[2] / "deploy" / "prometheus"
"""Scrape configuration and rules; they exist in a checkout, not in an installed package."""
PORT = 9090
READY_S = 30.0
STOP_GRACE_S = 10.0
_ALERT_PAGES = ("/alerts", "/classic/alerts")
"""The page of the alerts: usually, and in a Debian package, which has the classic pages only."""
_BARE = "scrape_configs:\n- job_name: baton\n  file_sd_configs:\n  - files: [targets.json]\n"
_RUNBOOK = re.compile(r"(?<=runbook_url: )(?=docs/)")


class PrometheusNotFound(Exception):
    """No Prometheus program was found."""


def find_prometheus() -> Path:
    """Return the path of `prometheus` on PATH.

    Raises:
        PrometheusNotFound: there is none.
    """
    path = shutil.which("prometheus")
    if path is None:
        raise PrometheusNotFound("prometheus is not on PATH; on Debian: apt-get install prometheus")
    return Path(path)


def scrape_targets(cluster: LocalCluster) -> list[Mapping[str, Any]]:
    """Return the scrape targets of a cluster, with the labels that the rules need."""
    addresses = {endpoint.name: endpoint.metrics_address for endpoint in cluster.endpoints()}
    return [
        {
            "targets": [addresses[member.name]],
            "labels": {
                "cluster": cluster.options.cluster,
                "node_type": member.service,
                "node_id": member.node_id,
            },
        }
        for member in cluster.options.instances
    ]


class Prometheus:
    """A Prometheus process; started again on the same `data_dir`, it has the same address and data.

    Args:
        data_dir: Folder of its configuration, rules, targets, series and log.
        targets: What it scrapes; see `scrape_targets`.
        port: Port to use if it is free and none was used before; 0 for any.
    """

    def __init__(
        self, data_dir: Path, targets: Sequence[Mapping[str, Any]], *, port: int = PORT
    ) -> None:
        self._data_dir, self._targets = data_dir.absolute(), targets
        preferred = {"prometheus": port} if port else {}
        ports = keep_ports(self._data_dir / "ports.json", ["prometheus"], preferred)
        self.address = f"{HOST}:{ports['prometheus']}"
        """host:port of its web pages and API."""
        self._child = ChildProcess(
            Program(
                name="prometheus",
                command=[
                    str(find_prometheus()),
                    f"--config.file={self._data_dir / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._data_dir / 'series'}",
                    f"--web.listen-address={self.address}",
                    "--log.level=warn",
                ],
                log_path=self._data_dir / "prometheus.log",
                is_ready=lambda: asyncio.to_thread(self._is_ready),
            )
        )

    @property
    def pid(self) -> int | None:
        """Process id; None while it is not running."""
        return self._child.pid

    async def __aenter__(self) -> Self:
        """Start it, and wait until it answers.

        Raises:
            NotReady: it ended or does not answer; see its log.
        """
        self._configure()
        self._child.spawn()
        try:
            await self._child.ready(READY_S)
        except BaseException:
            self._child.kill_now()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._child.stop(STOP_GRACE_S)

    def _configure(self) -> None:
        """Write the configuration and the list of targets into the data directory."""
        (self._data_dir / "prometheus.yml").write_text(_BARE)
        top = CONFIG.parents[1].as_uri()
        for path in (*CONFIG.glob("*.yml"), *CONFIG.glob("*.yaml")):
            copy = self._data_dir / path.name
            copy.write_text(_RUNBOOK.sub(f"{top}/", path.read_text()))
        (self._data_dir / "targets.json").write_text(json.dumps(self._targets, indent=2) + "\n")

    async def alerts_page(self) -> str:
        """Return the URL of the page that shows the alerts; that of the first page without one."""
        for path in _ALERT_PAGES:
            if await asyncio.to_thread(self._serves, path):
                return f"http://{self.address}{path}"
        return f"http://{self.address}/"

    def _is_ready(self) -> bool:
        return self._serves("/-/ready")

    def _serves(self, path: str) -> bool:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(f"http://{self.address}{path}", timeout=1) as response:
                return bool(response.status == 200)
        except OSError:
            return False
