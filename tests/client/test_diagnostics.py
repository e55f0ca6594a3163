"""Goal: a diagnostics bundle has everything that was readable, names the rest, and has no secret.

Method: an unreachable cluster, hand-made folders and values, a small HTTP server.
"""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest

from batonmq.admin.diagnostics import (
    LOG_BYTES,
    Diagnostics,
    _without_key,
    scrape,
    without_secrets,
)
from batonmq.admin.group_reports import QueueDiagnosis


async def test_unreachable_cluster_is_a_problem_and_the_bundle_has_the_rest(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "storage.log").write_text("serving\n")
    bundle = Diagnostics("127.0.0.1:1")
    bundle.add_folder(tmp_path)
    await bundle.collect()
    assert bundle.files.keys() == {"about.json", "local/logs/storage.log", "problems.txt"}
    assert "cluster: UNREACHABLE" in bundle.files["problems.txt"].decode()
    assert json.loads(bundle.files["about.json"])["packages"]["batonmq"]


async def test_collection_from_services_that_hang_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("batonmq.admin.diagnostics._WHOLE_TIMEOUT_S", 0.2)
    monkeypatch.setattr("batonmq.admin.diagnostics._TIMEOUT_S", 60)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        bundle = Diagnostics(f"127.0.0.1:{silent.getsockname()[1]}")
        async with asyncio.timeout(20):  # less than the timeout of one call
            await bundle.collect()
    assert bundle.files.keys() == {"about.json", "problems.txt"}
    assert (
        bundle.files["problems.txt"] == b"the collection timed out after 0.2 s: files are missing\n"
    )


def test_folder_without_logs_is_a_problem(tmp_path: Path) -> None:
    bundle = Diagnostics("127.0.0.1:1")
    bundle.add_folder(tmp_path)
    assert bundle.problems == [f"{tmp_path}: no logs and no recovery report"]


def test_bundle_has_the_end_of_a_log_without_its_secrets(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "a.log"
    log.write_text(
        "begin\n" + "x" * LOG_BYTES + "\npassword=hunter2 postgres://u:pw@host/db\nend\n"
    )
    bundle = Diagnostics("127.0.0.1:1")
    bundle.add_folder(tmp_path)
    text = bundle.files["local/logs/a.log"].decode()
    assert text.endswith("\nend\n")
    assert "begin" not in text
    assert "hunter2" not in text
    assert "pw" not in text.replace("password", "")
    assert "@host/db" in text


def test_secrets_are_removed_by_key_and_fencing_tokens_are_kept() -> None:
    value = {"token": 5, "etcd_password": "x", "deep": [{"api_key": "y", "a": 1}], "secret": ""}
    assert without_secrets(value) == {
        "token": 5, "etcd_password": "[removed]", "deep": [{"api_key": "[removed]", "a": 1}],
        "secret": "",
    }  # fmt: skip


def test_ordering_keys_are_removed_from_diagnoses() -> None:
    evidence = {"running_offset": "5", "running_ordering_key": "it's alice"}
    text = f"c1 has been handling offset 5 of ordering key {evidence['running_ordering_key']!r}"
    diagnosis = QueueDiagnosis(
        group="g", topic="t", broker="b", queue_id=0, reason="HEAD_OF_LINE", message=text,
        remedy="", evidence=evidence, lag=1, lag_ms=1, committed_offset=5, log_end_offset=6,
        client_id="c1", unmoved_ms=1,
    )  # fmt: skip
    shown = json.dumps(_without_key(diagnosis))
    assert "alice" not in shown
    assert "handling offset 5 of ordering key [removed]" in shown


async def _serve(answer: bytes, address: list[str]) -> asyncio.Server:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    address.append(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    return server


async def test_scrape_returns_the_body_of_the_page() -> None:
    address: list[str] = []
    page = b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nbaton_up 1\n"
    async with await _serve(page, address):
        assert await scrape(address[0]) == "baton_up 1\n"


async def test_scrape_of_a_missing_page_is_an_error() -> None:
    address: list[str] = []
    async with await _serve(b"HTTP/1.0 404 Not Found\r\n\r\n", address):
        with pytest.raises(OSError, match="404"):
            await scrape(address[0])
