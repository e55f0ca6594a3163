"""Goal: every program in examples/ succeeds on a real cluster, and fails if its claim is broken.

Method: the runner of `make examples` runs them all, and those that read topics from the first
message once more on the same cluster. Then it runs copies of them; in each copy one line that the
claim depends on is broken, and the copy must fail.
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
AGAIN = ["cache.py", "latest_prices.py", "order_lines.py", "typed_orders.py"]
CLAIMED = "idempotent(bank.book, store, claim_ms=CLAIM_MS, done_ms=DONE_MS, key=by_key)"
BROKEN = {
    "cache.py": ('model="broadcasting", offsets_file=offsets_file, ', ""),
    "celery_tasks.py": (r'write(f"{order}\n")', r'write(f"{order}\n" * 2)'),
    "fastapi_shop.py": ("await asyncio.to_thread(shop.book, order)", "pass"),
    "idempotent_payments.py": (CLAIMED, "bank.book"),
    "latest_prices.py": (", compaction=Compaction(dirty_percent=10)", ""),
    "ledger.py": ('order="queue"', "send_back=False, queue_concurrency=20"),
    "mails.py": ('order="key", ', 'order="queue", '),
    "order_lines.py": ("    order = int(message.body)", "    order = int(message.body) // 2"),
    "orders.py": ("retries_max=RETRIES_MAX", "retries_max=1"),
    "price_requests.py": ('else b"%d" % price', 'else b"0"'),
    "reminders.py": ("await producer.cancel(receipt.schedule_id)", "pass"),
    "sql_filter.py": (" AND agent IS NULL", ""),
    "traced_orders.py": ("Producer(nameserver, telemetry=telemetry)", "Producer(nameserver)"),
    "transactional_orders.py": ("TransactionState.COMMIT if known else ", ""),
    "typed_orders.py": ('b"no order"', 'orders.encode({"number": 1, "state": "x"})'),
}


async def run(*files: Path) -> tuple[int | None, list[list[str]], str]:
    """Run `make examples`; return the status, the words of each result line, and the output."""
    process = await create_subprocess_exec(
        sys.executable, EXAMPLES, *files, cwd=ROOT, stdout=PIPE, stderr=STDOUT
    )
    output = (await process.communicate())[0].decode()
    lines = [line.split() for line in output.splitlines()]
    return process.returncode, [line for line in lines if line[:1] in (["ok"], ["FAILED"])], output


@pytest.mark.long
async def test_every_example_succeeds() -> None:
    names = NAMES + AGAIN
    status, lines, output = await run(*(EXAMPLES / name for name in names))
    assert status == 0, output
    assert [line[:2] for line in lines] == [["ok", name] for name in names]


@pytest.mark.long
async def test_every_example_fails_if_its_claim_is_broken(tmp_path: Path) -> None:
    assert list(BROKEN) == NAMES
    for name, (part, replacement) in BROKEN.items():
        text = (EXAMPLES / name).read_text()
        assert text.count(part) == 1, f"{name} has {part} no longer"
        broken = text.replace(part, replacement).replace(
            "asyncio.timeout(60)", "asyncio.timeout(4)"
        )
        (tmp_path / name).write_text(broken)
    status, lines, output = await run(*(tmp_path / name for name in NAMES))
    assert status == 1
    assert [line[:2] for line in lines] == [["FAILED", name] for name in NAMES], output
