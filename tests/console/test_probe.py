"""Goal: the probes of a console's pod pass whatever the settings of the console are.

Method: a console on a real socket; the program of the probe, as the kubelet runs it.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from batonmq_server.console.app import make_console
from batonmq_server.console.config import ConsoleSettings
from batonmq_server.local.certificates import CertificateAuthority, CertificateSubject
from tests.console.busy_cluster import served

EXTERNAL: dict[str, Any] = {"host": "0.0.0.0", "allowed_hosts": "console.example.com"}


async def probe(values: dict[str, Any], address: str) -> tuple[int, str]:
    """Run the probe with the settings of a console, and return its exit status and its errors."""
    values = {**values, "port": urlsplit(address).port}
    settings = [f"BATON_CONSOLE_{name.upper()}={value}" for name, value in values.items()]
    program = (sys.executable, "-m", "batonmq_server.console.probe")
    process = await asyncio.create_subprocess_exec("env", *settings, *program, stderr=PIPE)
    _, errors = await process.communicate()
    return process.returncode or 0, errors.decode()


def certificate(folder: Path) -> dict[str, Any]:
    subject = CertificateSubject(name="console", hosts=("console.example.com",))
    issued = CertificateAuthority(folder).issue(subject)
    return {"tls_cert_file": issued.cert_file, "tls_key_file": issued.key_file}


@pytest.mark.parametrize("external", [False, True], ids=["loopback", "external"])
async def test_probe_passes_while_the_console_serves(tmp_path: Path, external: bool) -> None:
    values: dict[str, Any] = {**EXTERNAL, **certificate(tmp_path)} if external else {}
    settings = ConsoleSettings(**values)
    async with served(make_console(settings), settings) as (address, _):
        assert await probe(values, address) == (0, "")
    status, errors = await probe(values, address)
    assert status == 1
    assert "does not answer" in errors


async def test_health_answers_under_every_host_name_and_the_pages_do_not() -> None:
    settings = ConsoleSettings(**EXTERNAL, insecure_network=True)
    async with (
        served(make_console(settings), settings) as (address, _),
        httpx.AsyncClient(base_url=address, trust_env=False) as browser,
    ):
        assert (await browser.get("/health")).text == "serving\n"
        assert (await browser.get("/")).status_code == 421
