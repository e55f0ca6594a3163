"""Goal: `baton up --observe` runs a Prometheus that scrapes services, with rules, until its end;
without a Prometheus it fails before anything starts.

Method: a real cluster and, where it is installed, a real Prometheus, queried over HTTP.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from batonmq_server.local.ports import keep_ports
from tests.support.conditions import until_now

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

BATON = (sys.executable, "-m", "batonmq.cli")
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="NOT TESTED: there is no prometheus (Debian: apt-get install prometheus)",
)


def ask(address: str, path: str) -> Any:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"{address}/api/v1/{path}", timeout=30) as response:
        return json.loads(response.read())["data"]


@pytest.mark.long
@needs_prometheus
def test_prometheus_scrapes_every_service_and_has_the_rules(tmp_path: Path) -> None:
    keep_ports(tmp_path / "data" / "ports.json", ["nameserver"])
    keep_ports(tmp_path / "data" / "prometheus" / "ports.json", ["prometheus"])
    command = [*BATON, "up", "--observe", "--data-dir", str(tmp_path / "data")]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
    try:
        text = ""

        def is_ready() -> bool:
            nonlocal text
            text = (tmp_path / "log").read_text()
            assert process.poll() is None, text
            return "Ctrl-C" in text

        until_now(is_ready, 60)
        match = re.search(r"Prometheus is at (http://[\d.:]+)", text)
        assert match is not None
        address = match[1]
        (page,) = re.findall(r"with alerts at (http://\S+)", text)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(page) as shown:
            assert b"<html" in shown.read().lower()

        def up() -> dict[str, str]:
            series = ask(address, "query?query=up")["result"]
            return {s["metric"]["node_type"]: s["value"][1] for s in series}

        services = ("storage", "offsets", "lockmgr", "nameserver")
        until_now(lambda: up() == dict.fromkeys(services, "1"), 50)
        groups = ask(address, "rules")["groups"]
        assert {group["name"] for group in groups} >= {"baton-groups", "baton-recorded"}
        (url,) = {
            rule["annotations"]["runbook_url"]
            for group in groups
            for rule in group["rules"]
            if rule["name"] == "BatonDown"
        }
        assert Path(url.removeprefix("file://")).is_file()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    with pytest.raises(OSError, match="refused"):
        ask(address, "rules")


def test_up_without_prometheus_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    command = [*BATON, "up", "--observe", "--data-dir", str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "prometheus is not on PATH" in done.stderr
    assert not (tmp_path / "data" / "logs").exists()
