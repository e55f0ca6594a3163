"""Goal: the pages have no serious finding of accessibility, in light and dark, and fit a phone.

Method: the pages of a cluster in memory, which has ended when Debian's chromium and axe see them: a
browser takes seconds for each page, in which no cluster need run.
"""

from __future__ import annotations

from urllib.parse import unquote

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, Route

from batonmq_server.console.visit import FOLDER
from tests.console.scene import BASE, scene
from tests.support.browser import chromium, page_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
PATHS = (
    "/", "/topics", "/topics/orders", "/topics/orders/messages", "/groups", "/hand-overs",
    "/dead-letters", "/alerts", "/access", "/change/produce?topic=orders", "/change/grant",
)  # fmt: skip
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"], "resultTypes": ["violations"]}


async def pages() -> dict[str, str]:
    """Return the text of each page by its path."""
    async with scene() as shown:
        await shown.broker.create_topic("orders", 2)
        async with shown.broker.producer() as producer:
            await producer.send("orders", b'{"id": 1}', tag="paid", keys=["order-1"])
        return {path: (await shown.browser.get(path)).text for path in PATHS}


async def serve(page: Page, texts: dict[str, str]) -> None:
    """Answer the calls of a browser with these pages, and with the files that they load."""

    async def answer(route: Route) -> None:
        path = unquote(route.request.url.removeprefix(BASE))
        if path.startswith("/static/"):
            await route.fulfill(path=FOLDER / path.lstrip("/"))
        elif "live=1" in path:
            await route.fulfill(body="retry: 600000\n\n", content_type="text/event-stream")
        else:
            await route.fulfill(body=texts[path], content_type="text/html")

    await page.route("**/*", answer)


async def serious_findings(page: Page) -> list[str]:
    """Return the serious findings of axe on the page, each with the first element."""
    result = await Axe().run(page, options=RULES)
    return [
        f"{page.url}: {one['id']}: {one['nodes'][0]['html']}"
        for one in result.response["violations"]
        if one["impact"] in ("serious", "critical")
    ]


@pytest.mark.long
async def test_pages_have_no_serious_finding_and_fit_a_narrow_screen() -> None:
    texts, findings = await pages(), list[str]()
    async with chromium() as browser, page_of(browser) as page:
        await serve(page, texts)
        for number, path in enumerate(PATHS):
            await page.emulate_media(color_scheme="dark" if number % 2 else "light")
            await page.goto(BASE + path, wait_until="domcontentloaded")
            findings += await serious_findings(page)
            await page.set_viewport_size({"width": 390, "height": 800})
            wider = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
            assert not await page.evaluate(wider), path
            await page.set_viewport_size({"width": 1280, "height": 800})
    assert findings == []
