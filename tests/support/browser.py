"""The browser of tests: Debian's chromium; no browser is downloaded."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
TIMEOUT_MS = 45_000
"""Generous: a busy machine may delay a page by many seconds."""


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Start the browser without a window; skip the test if there is none."""
    if CHROMIUM is None:
        pytest.skip("NO CHROMIUM ON PATH: the console was not opened in a browser")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    expect.set_options(timeout=TIMEOUT_MS)
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(
            executable_path=CHROMIUM, args=arguments, timeout=TIMEOUT_MS
        )
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def page_of(
    browser: Browser, *, may_be_offline: bool = False, **options: Any
) -> AsyncIterator[Page]:
    """Open a page with cookies of its own; it fails if the page has an error of its own.

    Args:
        may_be_offline: Whether calls without an answer are no errors.
        options: Of the context, such as `color_scheme`.
    """
    expected = ("status of 4", *(("net::ERR_",) if may_be_offline else ()))
    errors: list[str] = []
    context = await browser.new_context(**options)
    context.set_default_timeout(TIMEOUT_MS)
    page = await context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console",
        lambda said: (
            errors.append(said.text)
            if said.type == "error" and not any(one in said.text for one in expected)
            else None
        ),
    )
    try:
        yield page
    finally:
        await context.close()
    assert errors == []
