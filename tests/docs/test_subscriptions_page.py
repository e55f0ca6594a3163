"""Goal: the page on subscriptions shows what happens: who is refused, with which diff, and how the
subscription of a group is changed.

Method: its commands are run in their order, and each must print what the page shows.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.terminal import commands, terminal
from tests.support.cluster import local_cluster
from tools.docs.pages import ROOT, Page

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

PAGE = Path("docs/how-to/subscriptions.md")


async def test_documentation_matches_the_behavior(tmp_path: Path) -> None:
    played = list(commands(Page(PAGE, (ROOT / PAGE).read_text())))
    assert any("SUBSCRIPTION_CONFLICT" in shown for _, shown in played)
    async with (
        local_cluster(tmp_path / "cluster") as cluster,
        terminal(tmp_path, cluster.nameserver) as opened,
    ):
        for command, shown in played:
            await opened.run(command, shown)
