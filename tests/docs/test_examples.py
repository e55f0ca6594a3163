"""The programs of README and tutorial run unchanged and end by themselves.

Method: a real cluster with the tutorial's topic and messages; each program is a process of its own,
with nothing changed but the nameserver's address.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from tests.support.cluster import local_cluster
from tools.docs.pages import ROOT, Page

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

ADDRESS = "127.0.0.1:9876"


async def _run(program: Path, nameserver: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        program,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "BATON_NAMESERVER": nameserver},  # noqa: TID251  handed on as a whole
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode()


def page_at(path: str) -> Page:
    return Page(Path(path), (ROOT / path).read_text())


@pytest.mark.long
async def test_programs_of_readme_and_tutorial_run(tmp_path: Path) -> None:
    page = page_at("docs/tutorial/first-cluster.md")
    programs = [*page.blocks("python"), *page_at("README.md").blocks("python")]
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
