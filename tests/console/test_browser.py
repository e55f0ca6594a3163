"""Goal: a person can repair a stuck group by clicks, and use the console with the keyboard.

Method: Debian's chromium with Playwright, a console on a cluster in memory.
"""

from __future__ import annotations

import re

import pytest
from playwright.async_api import Page, expect
from uvicorn.protocols.http.h11_impl import H11Protocol

from batonmq.admin.resets import Resets
from tests.console.busy_cluster import busy_cluster
from tests.support.browser import chromium, page_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


async def opened(page: Page, url: str | re.Pattern[str]) -> None:
    """Wait until a page is there with its program, which reads the keys."""
    await expect(page).to_have_url(url)
    await page.wait_for_load_state()


@pytest.mark.long
async def test_stuck_group_is_repaired_by_clicks_and_the_page_follows() -> None:
    async with busy_cluster() as cluster, chromium() as browser:
        await cluster.fill()
        async with page_of(browser) as page, cluster.broker.admin() as admin:
            await page.goto(f"{cluster.url}/groups")
            verdict = page.locator("tr", has_text="warehouse")
            await expect(verdict).to_contain_text("HEAD_OF_LINE")
            await verdict.get_by_role("link").click()
            stuck = page.locator("article.stuck").first
            await expect(stuck).to_contain_text("warehouse-1 has been handling offset")
            queue = await stuck.locator("h3 .id").inner_text()
            await stuck.get_by_role("link", name="Skip the message").click()
            await expect(page.locator("main")).to_contain_text("Nothing is changed yet")
            await page.get_by_role("button", name="Skip the message").click()
            assert await Resets(admin).history("warehouse") == ()  # the browser wants the fields
            await page.get_by_label("Your name").fill("ann")
            await page.get_by_label("Reason").fill("the order is a duplicate")
            await page.get_by_role("button", name="Skip the message").click()
            await expect(page.locator("h1")).to_contain_text("done")
            (recorded,) = await Resets(admin).history("warehouse")
            assert (recorded.by, recorded.reason) == ("ann", "the order is a duplicate")
            step = recorded.steps[0]
            assert f"{step.topic}/{step.broker}/{step.queue_id}" == queue
            assert step.to_offset == step.from_offset + 1

            await page.get_by_role("link", name="Undo").click()
            await page.get_by_label("Reason").fill("it was none")
            await page.get_by_role("button", name="Undo it").click()
            await expect(page.locator("h1")).to_contain_text("done")
            await page.get_by_role("link", name="Back").click()
            await expect(page.locator("main")).to_contain_text("the order is a duplicate")

            # What another person does appears without a reload.
            await admin.pause_group("warehouse", "bob", "lunch")
            await expect(page.locator("main")).to_contain_text("Paused by bob")
            await page.get_by_role("link", name="Resume the group").first.click()
            await page.get_by_label("Reason").fill("lunch is over")
            await page.get_by_role("button", name="Resume the group").click()
            await expect(page.locator("h1")).to_contain_text("resumed")
            assert (await admin.describe_group("warehouse")).pause is None


@pytest.mark.long
async def test_keyboard_opens_pages_and_rows_and_finds_topics() -> None:
    async with busy_cluster() as cluster, chromium() as browser:
        for number in range(60):
            await cluster.broker.create_topic(f"topic-{number:02}", 1)
        async with page_of(browser) as page:
            await page.goto(cluster.url)
            await page.keyboard.press("?")
            await expect(page.get_by_role("dialog")).to_be_visible()
            await page.keyboard.press("Escape")
            await page.keyboard.press("g")
            await page.keyboard.press("t")
            await opened(page, f"{cluster.url}/topics")
            await page.keyboard.press("n")
            await expect(page.locator(".pager")).to_contain_text("page 2 of 2")
            await expect(page.locator("tbody tr")).to_have_count(10)
            await page.keyboard.press("/")
            await page.keyboard.type("pic-4")
            await page.keyboard.press("Enter")
            await opened(page, re.compile("pic-4"))
            await expect(page.locator("tbody tr")).to_have_count(10)
            await page.keyboard.press("j")
            await page.keyboard.press("j")
            await page.keyboard.press("Enter")
            await expect(page.locator("h1")).to_contain_text("topic-41")


async def test_page_says_that_the_console_does_not_answer_and_keeps_its_last_state() -> None:
    async with busy_cluster() as cluster, chromium() as browser:
        await cluster.broker.create_topic("orders", 2)
        async with page_of(browser, may_be_offline=True) as page:
            await page.goto(f"{cluster.url}/topics")
            await expect(page.locator("html")).to_have_attribute("data-live", "on")
            await expect(page.locator("#offline")).to_be_hidden()
            cluster.server.should_exit = cluster.server.force_exit = True
            for connection in cluster.server.server_state.connections.copy():
                if isinstance(connection, H11Protocol):
                    connection.transport.abort()
            await expect(page.locator("#offline")).to_contain_text("does not answer")
            await expect(page.locator("tbody tr")).to_contain_text("orders")
