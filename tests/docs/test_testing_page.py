"""Goal: the tests that docs/how-to/testing-your-code.md shows pass unchanged, and can fail.

Method: each block becomes a test file in a folder of its own, and pytest runs in another process;
then the same with the last comparison of each block negated.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools.docs.pages import ROOT, Page

pytestmark = pytest.mark.timeout(120)

PATH = Path("docs/how-to/testing-your-code.md")
BLOCKS = Page(PATH, (ROOT / PATH).read_text()).blocks("python")


async def summary(folder: Path, blocks: Sequence[str]) -> tuple[str, str]:
    """Return the last line of pytest's output without the time, and the whole output."""
    for number, text in enumerate(blocks):
        (folder / f"test_{number}.py").write_text(text)
    inherited = os.environ  # noqa: TID251  all but the options of the session around this test
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-o",
            "asyncio_mode=auto",
            "-p",
            "no:cacheprovider",
        ),
        cwd=folder,
        env={name: value for name, value in inherited.items() if name != "PYTEST_ADDOPTS"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output = (await process.communicate())[0].decode()
    return output.splitlines()[-1].partition(" in ")[0], output


async def test_tests_of_the_page_pass(tmp_path: Path) -> None:
    last_line, output = await summary(tmp_path, BLOCKS)
    assert last_line == "7 passed", output


async def test_tests_of_the_page_fail_with_negated_claims(tmp_path: Path) -> None:
    negated = []
    for block in BLOCKS:
        before, last, after = block.rpartition(" == ")
        assert "assert" in before.splitlines()[-1]
        negated.append(f"{before}{last.replace('==', '!=')}{after}")
    last_line, output = await summary(tmp_path, negated)
    assert last_line == "7 failed", output
    assert output.count("AssertionError") >= 7
