"""Goal: the page on subscriptions shows real output: the rejected client, the differences, and the
change of a subscription.

Method: run its commands in their order; each must print the output on the page.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.terminal import commands, terminal
from tests.support.cluster import local_cluster
from tools.docs.pages import ROOT, Page

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

PAGE = Path("docs/how-to/subscriptions.md")


@pytest.mark.long
async def test_documentation_matches_the_behavior(tmp_path: Path) -> None:
    page_commands = list(commands(Page(PAGE, (ROOT / PAGE).read_text())))
    assert any("SUBSCRIPTION_CONFLICT" in shown for _, shown in page_commands)
    async with (
        local_cluster(tmp_path / "cluster") as cluster,
        terminal(tmp_path, cluster.nameserver) as opened,
    ):
        for command, shown in page_commands:
            await opened.run(command, shown)
