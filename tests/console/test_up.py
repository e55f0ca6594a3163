"""Goal: `baton up` starts a console that its user, and nobody else, can sign in to.

Method: `baton up --secure` with real processes, and a client that follows the printed link.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.cli.baton import BATON, up
from tests.console.scene import words_of
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.mark.long
async def test_link_of_baton_up_signs_its_user_in(tmp_path: Path) -> None:
    command = (*BATON, "--config", str(tmp_path / "contexts.toml"))
    options = ("--secure", "--console", "--console-port", "0")
    with up(tmp_path / "c", *options, command=command) as cluster:
        link = urlsplit(cluster.announced["console"])
        key = link.fragment.removeprefix("key=")
        assert (tmp_path / "c" / "console" / "console.key").stat().st_mode & 0o077 == 0
        base = f"http://{link.netloc}"
        async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=30) as browser:
            assert (await browser.get("/topics")).status_code == 303
            page = (await browser.get("/sign-in")).text
            csrf = re.search(r'name="csrf" value="([0-9a-f]+)"', page)
            assert csrf is not None
            form = {"csrf": csrf[1], "token": f"{key}x"}
            assert (await browser.post("/sign-in", data=form)).status_code == 401
            form["token"] = key
            assert (await browser.post("/sign-in", data=form)).status_code == 303

            async def is_healthy() -> bool:  # once every service has a leader
                return "healthy" in words_of((await browser.get("/")).text)

            await until(is_healthy)
        assert cluster.interrupt() == 0
