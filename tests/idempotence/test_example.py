"""Goal: the example books each payment once, on a real cluster, with every store.

Method: the unchanged example runs as a process, once with each store, on one cluster.
"""

from __future__ import annotations

import re
import sys
from asyncio import create_subprocess_exec
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import pytest

from tests.support.cluster import local_cluster
from tools.docs.pages import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

EXAMPLE = ROOT / "examples" / "idempotent_payments.py"


@pytest.mark.long
async def test_example_books_each_payment_once(
    redis_url: str, sqlite_url: str, tmp_path: Path
) -> None:
    async with local_cluster(tmp_path / "cluster") as cluster:
        for url in (redis_url, sqlite_url):
            process = await create_subprocess_exec(
                sys.executable, EXAMPLE, cluster.nameserver, url, stdout=PIPE, stderr=STDOUT
            )
            output = (await process.communicate())[0].decode()
            assert process.returncode == 0, output
            assert len(re.findall(r"^payment-\w+-\d\d booked 1 time", output, re.M)) == 20
            assert "the bank failed 5 times" in output
            waited = re.search(r"(\d+) deliveries were postponed", output)
            assert waited is not None
            assert int(waited[1]) > 0, (
                "no delivery was postponed by the claim of the killed process"
            )
