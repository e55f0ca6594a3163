"""Goal: the shop in FastAPI bills each order once, with a real PostgreSQL.

Method: the example as a program, with a local cluster and a database server of their own.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.idempotence.conftest import postgresql_url
from tests.support.cluster import local_cluster

__all__ = ["postgresql_url"]
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "fastapi_shop.py"


@pytest.mark.long
async def test_web_shop_bills_each_order_once_with_postgresql(
    tmp_path: Path, postgresql_url: str
) -> None:
    async with local_cluster(tmp_path) as cluster:
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, EXAMPLE, cluster.nameserver, postgresql_url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output = (await program.communicate())[0].decode()
    assert program.returncode == 0, output
    assert output.splitlines()[-1] == "30 orders were placed twice and billed once"
