"""Goal: the tests that docs/how-to/testing-your-code.md shows pass as they stand, and can fail.

Method: each block becomes a test file for a pytest of its own, in a folder of its own; then once
more with what it claims turned round.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools.docs.pages import ROOT, Page

pytestmark = pytest.mark.timeout(120)

PATH = Path("docs/how-to/testing-your-code.md")
BLOCKS = Page(PATH, (ROOT / PATH).read_text()).blocks("python")


async def summary(folder: Path, blocks: Sequence[str]) -> tuple[str, str]:
    """The last line of pytest, up to the time, and everything it says."""
    for number, text in enumerate(blocks):
        (folder / f"test_{number}.py").write_text(text)
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
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output = (await process.communicate())[0].decode()
    return output.splitlines()[-1].partition(" in ")[0], output


async def test_what_the_page_shows_passes(tmp_path: Path) -> None:
    found, output = await summary(tmp_path, BLOCKS)
    assert found == "5 passed", output


async def test_what_the_page_shows_fails_where_it_claims_something_else(tmp_path: Path) -> None:
    turned = []
    for block in BLOCKS:
        before, last, after = block.rpartition(" == ")
        assert "assert" in before.splitlines()[-1]
        turned.append(f"{before}{last.replace('==', '!=')}{after}")
    found, output = await summary(tmp_path, turned)
    assert found == "5 failed", output
    assert output.count("AssertionError") >= 5
