"""Makes the pictures of the console in docs/images again: `python -m tests.console.pictures`.

A browser opens pages of a console on a cluster in memory, in which members join and leave for
about a minute. The pictures have 64 colours, so that they are small.
"""

from __future__ import annotations

import asyncio
import io

from PIL import Image
from playwright.async_api import Page, expect

from tests.console.busy_cluster import busy_cluster
from tests.support.browser import TIMEOUT_MS, chromium, page_of
from tools.docs.pages import ROOT

FOLDER = ROOT / "docs" / "images"
PICTURES = {
    "cluster": "/",
    "group": "/groups/warehouse",
    "hand-overs": "/hand-overs/billing?range=5m",
    "plan": "",
}
SIZE = {"width": 1180, "height": 720}
JOINS = 8
COLOURS = 64


async def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    async with busy_cluster() as cluster, chromium() as browser:
        await cluster.fill()
        async with page_of(browser, viewport=SIZE) as page:
            await page.goto(cluster.url + PICTURES["hand-overs"])
            for number in range(JOINS):
                name = f"billing-{3 + number % 2}"
                await cluster.member("billing", "orders", name, life_s=6)
            for name, path in PICTURES.items():
                if path:
                    await page.goto(cluster.url + path)
                    await expect(page.locator("#updated")).to_contain_text("Updated")
                else:
                    await page.goto(f"{cluster.url}/groups/warehouse")
                    skip = page.get_by_role("link", name="Skip the message").first
                    await skip.click(timeout=TIMEOUT_MS)
                await take(page, name)


async def take(page: Page, name: str) -> None:
    """Write a picture of what the window shows."""
    picture = Image.open(io.BytesIO(await page.screenshot())).convert("RGB")
    picture.quantize(COLOURS).save(FOLDER / f"console-{name}.png", optimize=True)


if __name__ == "__main__":
    asyncio.run(main())
