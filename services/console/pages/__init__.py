"""The pages of the console."""

from __future__ import annotations

from batonmq_server.console.pages import cluster, groups, topics

PAGES = (*cluster.PAGES, *topics.PAGES, *groups.PAGES)
