"""Goal: every program in examples/ does what it says, on a real cluster, and would notice if not.

Method: `make examples` runs them all. Then copies of them run in which one thing is broken that the
program is there to show; each of those must fail.
"""

from __future__ import annotations

import sys
from asyncio import create_subprocess_exec
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import pytest

from tools.docs.pages import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

EXAMPLES = ROOT / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("[!_]*.py"))
CLAIMED = "idempotent(bank.book, store, claim_ms=CLAIM_MS, done_ms=DONE_MS, key=by_key)"
BROKEN = {
    "cache.py": ('model="broadcasting", offsets_file=offsets_file, ', ""),
    "idempotent_payments.py": (CLAIMED, "bank.book"),
    "ledger.py": ("orderly=True", "send_back=False, queue_concurrency=20"),
    "orders.py": ("retries_max=RETRIES_MAX", "retries_max=1"),
    "reminders.py": ("await producer.cancel(receipt.schedule_id)", "pass"),
    "sql_filter.py": (" AND agent IS NULL", ""),
}


async def run(*files: Path) -> tuple[int | None, list[list[str]], str]:
    """What `make examples` runs: exit status, the words of its lines on each file, everything."""
    process = await create_subprocess_exec(
        sys.executable, EXAMPLES, *files, cwd=ROOT, stdout=PIPE, stderr=STDOUT
    )
    output = (await process.communicate())[0].decode()
    lines = [line.split() for line in output.splitlines()]
    return process.returncode, [line for line in lines if line[:1] in (["ok"], ["FAILED"])], output


async def test_every_example_does_what_it_says() -> None:
    status, lines, output = await run()
    assert status == 0, output
    assert [line[:2] for line in lines] == [["ok", name] for name in NAMES]


async def test_every_example_notices_what_it_is_there_to_show(tmp_path: Path) -> None:
    assert list(BROKEN) == NAMES
    for name, (part, instead) in BROKEN.items():
        text = (EXAMPLES / name).read_text()
        assert text.count(part) == 1, f"{name} has {part} no longer"
        broken = text.replace(part, instead).replace("asyncio.timeout(60)", "asyncio.timeout(4)")
        (tmp_path / name).write_text(broken)
    status, lines, output = await run(*(tmp_path / name for name in NAMES))
    assert status == 1
    assert [line[:2] for line in lines] == [["FAILED", name] for name in NAMES], output
