"""A Prometheus that looks at a local cluster, if the machine has one."""

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
"""Scrape config and rules; there in a checkout, not in an installed package."""
PORT = 9090
READY_S = 30.0
STOP_GRACE_S = 10.0
_BARE = "scrape_configs:\n- job_name: baton\n  file_sd_configs:\n  - files: [targets.json]\n"
_RUNBOOK = re.compile(r"(?<=runbook_url: )(?=docs/)")


class PrometheusNotFound(Exception):
    """There is no Prometheus to start."""


def find_prometheus() -> Path:
    """The `prometheus` on PATH.

    Raises:
        PrometheusNotFound: There is none.
    """
    found = shutil.which("prometheus")
    if found is None:
        raise PrometheusNotFound(
            "there is no prometheus on PATH; Debian: apt-get install prometheus"
        )
    return Path(found)


def scrape_targets(cluster: LocalCluster) -> list[Mapping[str, Any]]:
    """The services of a cluster, for Prometheus, with the labels that rules ask for."""
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
    """One that outlasts nobody; started again on `data_dir`, it has the same address and series.

    Args:
        data_dir: Its own: configuration, rules, targets, series and log.
        told: What it is to look at; see `scrape_targets`.
        port: What it gets if that is free and none was kept; 0 for any.
    """

    def __init__(
        self, data_dir: Path, told: Sequence[Mapping[str, Any]], *, port: int = PORT
    ) -> None:
        self._data_dir, self._told = data_dir.absolute(), told
        preferred = {"prometheus": port} if port else {}
        ports = keep_ports(self._data_dir / "ports.json", ["prometheus"], preferred)
        self.address = f"{HOST}:{ports['prometheus']}"
        """host:port of its pages and its API."""
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
        """Process id; None while it does not run."""
        return self._child.pid

    async def __aenter__(self) -> Self:
        """Return once it answers.

        Raises:
            NotReady: It ended or does not answer; see its log.
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
        """Put a copy of the configuration beside the list of targets."""
        (self._data_dir / "prometheus.yml").write_text(_BARE)
        top = CONFIG.parents[1].as_uri()
        for path in (*CONFIG.glob("*.yml"), *CONFIG.glob("*.yaml")):
            copy = self._data_dir / path.name
            copy.write_text(_RUNBOOK.sub(f"{top}/", path.read_text()))
        (self._data_dir / "targets.json").write_text(json.dumps(self._told, indent=2) + "\n")

    def _is_ready(self) -> bool:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(f"http://{self.address}/-/ready", timeout=1) as response:
                return bool(response.status == 200)
        except OSError:
            return False
