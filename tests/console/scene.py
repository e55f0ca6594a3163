"""A console on the in-memory broker, and a browser without a screen that calls it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from html import unescape
from typing import Any

import httpx

from batonmq_server.console.app import WebConsole, make_console
from batonmq_server.console.config import ConsoleSettings
from batonmq_server.testing import MemoryBroker

BASE = "http://127.0.0.1"


@dataclass(slots=True)
class Scene:
    """A broker, its console, and a client with cookies."""

    broker: MemoryBroker
    web: WebConsole
    browser: httpx.AsyncClient

    async def page(self, path: str, status: int = 200) -> str:
        """Return the text of a page."""
        response = await self.browser.get(path)
        assert response.status_code == status, response.text
        return response.text


@asynccontextmanager
async def scene(**settings: Any) -> AsyncIterator[Scene]:
    """Start a broker and a console with these settings, without sign-in."""
    async with MemoryBroker() as broker:
        values = {"nameserver": broker.nameserver, "changes": True, **settings}
        web = make_console(ConsoleSettings(**values), broker.environment)
        transport = httpx.ASGITransport(web.application())
        async with web.running(), httpx.AsyncClient(transport=transport, base_url=BASE) as browser:
            yield Scene(broker, web, browser)


def words_of(page: str) -> str:
    """Return the text of a page without tags, with single spaces."""
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", page)).split())
