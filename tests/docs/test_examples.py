"""The programs of README and tutorial run unchanged, and all but one end by themselves.

Method: a real cluster with the tutorial's topic and messages; each program is a process of its own,
with nothing changed but the nameserver's address. The worker that hangs is one whose queue the
nameserver calls stuck.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from batonmq.errors import GroupNotFound
from tests.support.cluster import local_cluster
from tests.support.conditions import until
from tools.docs.pages import ROOT, Page

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

ADDRESS = "127.0.0.1:9876"


async def _started(program: Path, nameserver: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        program,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "BATON_NAMESERVER": nameserver},  # noqa: TID251  handed on as a whole
    )


async def _run(program: Path, nameserver: str) -> tuple[int | None, str]:
    process = await _started(program, nameserver)
    output, _ = await process.communicate()
    return process.returncode, output.decode()


async def _hangs(program: Path, admin: Admin, nameserver: str) -> None:
    """Run the worker that hangs until its queue is stuck, for the reason on the page."""
    process = await _started(program, nameserver)

    async def stuck() -> bool:
        try:
            queues = await admin.why_stuck("packing", "orders", "broker-0", 3)
        except GroupNotFound:
            return False
        return [(q.reason, q.evidence.get("running_offset")) for q in queues] == [
            ("HEAD_OF_LINE", "1")
        ]

    try:
        await until(stuck)
    finally:
        process.kill()
        await process.communicate()


def page_at(path: str) -> Page:
    return Page(Path(path), (ROOT / path).read_text())


@pytest.mark.long
async def test_programs_of_readme_and_tutorial_run(tmp_path: Path) -> None:
    page = page_at("docs/tutorial/first-cluster.md")
    programs = [*page.blocks("python"), *page_at("README.md").blocks("python")]
    (worker,) = (text for text in programs if '"packing"' in text)
    programs.remove(worker)
    assert len(programs) == 4
    outputs = []
    async with local_cluster(tmp_path / "cluster") as cluster:
        async with Admin(cluster.nameserver) as admin, Producer(cluster.nameserver) as producer:
            await admin.create_topic("orders", 4)
            for number in (1, 2, 3):
                await producer.send(
                    "orders", b"order %d" % number, tag="paid", ordering_key="alice"
                )
            await producer.send("orders", b"order 4", tag="open", ordering_key="bob")
            (tmp_path / "worker.py").write_text(worker)
            await _hangs(tmp_path / "worker.py", admin, cluster.nameserver)
        for number, text in enumerate(programs):
            assert ADDRESS in text
            program = tmp_path / f"example_{number}.py"
            program.write_text(text)
            status, output = await _run(program, cluster.nameserver)
            assert status == 0, output
            outputs.append(output)
    (shown,) = (
        block for block in page.blocks("") if block.startswith("orders/broker-0/3 3 FSYNCED")
    )
    assert outputs[0] == shown
    assert "b'order 5'" in outputs[1]
    assert "b'order 6'" in outputs[2]
    assert "b'order 2'" in outputs[3]
