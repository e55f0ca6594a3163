"""The pages of the console."""

from __future__ import annotations

from batonmq_server.console.pages import (
    access,
    alerts,
    cluster,
    dead_letters,
    groups,
    handovers,
    messages,
    topics,
)

PAGES = (
    *cluster.PAGES,
    *messages.PAGES,
    *topics.PAGES,
    *groups.PAGES,
    *handovers.PAGES,
    *dead_letters.PAGES,
    *alerts.PAGES,
    *access.PAGES,
)
