"""Goal: a secure cluster shows nothing without a sign-in, and to each person what its grants allow.

Method: a real cluster with TLS and access control; a console with the certificate of the
administrator; a client with cookies in place of a browser, then Debian's chromium.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import expect

from batonmq.admin.access import AccessControl, Role, RoleGrant
from batonmq.admin.admin import Admin
from batonmq_server.console.app import COOKIE, make_console
from batonmq_server.console.config import ConsoleSettings
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from tests.console.busy_cluster import served
from tests.console.scene import words_of
from tests.support.browser import chromium, page_of
from tests.support.cluster import SEGMENT_BYTES, fork_server
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
KEY = "k" * 43


def browser_of(application: object) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(application)  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


async def csrf(browser: httpx.AsyncClient) -> str:
    """Return the token in the form of the sign-in page."""
    found = re.search(r'name="csrf" value="([0-9a-f]+)"', (await browser.get("/sign-in")).text)
    assert found is not None
    return found[1]


async def sign_in(browser: httpx.AsyncClient, token: str, goal: str = "/") -> httpx.Response:
    form = {"csrf": await csrf(browser), "token": token, "next": goal}
    return await browser.post("/sign-in", data=form)


@pytest.mark.long
async def test_each_person_sees_what_its_grants_allow_and_nobody_else_sees_anything(
    tmp_path: Path,
) -> None:
    options = ClusterOptions(
        secure=True, access=True, settings={"storage": {"segment_bytes": SEGMENT_BYTES}}
    )
    key_file = tmp_path / "key"
    key_file.write_text(f"{KEY}\n")
    async with LocalCluster(tmp_path / "c", options, start=fork_server().start) as cluster:
        security = cluster.security
        assert security is not None
        values: dict[str, Any] = {
            "nameserver": cluster.nameserver,
            "ca_file": security.ca_file,
            "cert_file": security.cert_file,
            "key_file": security.key_file,
            "sign_in_key_file": str(key_file),
        }
        settings = ConsoleSettings(**values)
        async with Admin(cluster.nameserver, security=security) as admin:
            control = AccessControl(admin)
            for topic in ("orders", "secrets"):
                await admin.create_topic(topic, 1)
            await control.grant("alice", RoleGrant(Role.CONSUME, "topic:orders"))
            alice = (await control.create_token("alice")).token.reveal()
            web = make_console(settings)
            application = web.application()
            async with web.running(), browser_of(application) as browser:
                await nobody_sees_anything(browser)
                await alice_sees_her_topic(browser, alice)
                await key_is_the_administrator(browser)
                async with served(web, settings) as (url, _):
                    await person_signs_in_and_out(url, alice)
                await revoked_token_ends_the_session(browser, control, alice)


async def nobody_sees_anything(browser: httpx.AsyncClient) -> None:
    for path in ("/", "/topics", "/groups/billing?q=a"):
        refused = await browser.get(path)
        assert refused.status_code == 303
        assert refused.headers["location"].startswith("/sign-in?next=")
    assert (await browser.get("/topics?live=1")).status_code == 401
    wrong = await sign_in(browser, "no-such-token")
    assert wrong.status_code == 401
    assert "Refused" in wrong.text
    assert "no-such-token" not in wrong.text
    # Without the token of the form, from another site, and with a session id that it chose.
    assert (await browser.post("/sign-in", data={"token": KEY})).status_code == 403
    form = {"csrf": await csrf(browser), "token": KEY}
    foreign = {"origin": "https://evil.example"}
    assert (await browser.post("/sign-in", data=form, headers=foreign)).status_code == 403
    cross = {"sec-fetch-site": "cross-site"}
    assert (await browser.post("/sign-in", data=form, headers=cross)).status_code == 403
    assert (await browser.get("/topics")).status_code == 303


async def alice_sees_her_topic(browser: httpx.AsyncClient, token: str) -> None:
    before = browser.cookies.get(COOKIE)
    done = await sign_in(browser, token, "/topics")
    assert (done.status_code, done.headers["location"]) == (303, "/topics")
    assert browser.cookies.get(COOKIE) != before
    topics = words_of((await browser.get("/topics")).text)
    assert "alice" in topics
    assert "orders" in topics
    assert "secrets" not in topics
    denied = await browser.get("/topics/secrets")
    assert denied.status_code == 403
    assert "PERMISSION_DENIED" in denied.text
    cluster = words_of((await browser.get("/")).text)
    assert "Some values are hidden" in cluster
    assert token not in (await browser.get("/")).text
    assert (await browser.post("/sign-out")).status_code == 403
    assert (await browser.post("/sign-out", data={"csrf": await csrf(browser)})).status_code == 303
    assert (await browser.get("/topics")).status_code == 303


async def key_is_the_administrator(browser: httpx.AsyncClient) -> None:
    assert (await sign_in(browser, KEY)).status_code == 303
    topics = words_of((await browser.get("/topics")).text)
    assert "admin" in topics
    assert "secrets" in topics
    cluster = words_of((await browser.get("/")).text)
    assert "Some values are hidden" not in cluster
    assert "broker-0" in cluster
    assert "read only" in cluster


async def person_signs_in_and_out(url: str, token: str) -> None:
    async with chromium() as browser, page_of(browser) as page:
        await page.goto(f"{url}/topics")
        await page.get_by_label("Token").fill("no-such-token")
        await page.get_by_role("button", name="Sign in").click()
        await expect(page.get_by_role("alert")).to_contain_text("Refused")
        await page.get_by_label("Token").fill(token)
        await page.get_by_role("button", name="Sign in").click()
        await expect(page).to_have_url(f"{url}/topics")
        await expect(page.locator("tbody tr")).to_contain_text("orders")
        await page.get_by_role("button", name="Sign out").click()
        await expect(page.get_by_label("Token")).to_be_visible()
        # The link of `baton up`: the key is in the fragment, and not in the address afterwards.
        await page.goto(f"{url}/sign-in?next=/topics#key={KEY}")
        await expect(page).to_have_url(f"{url}/topics")
        await expect(page.locator("table")).to_contain_text("secrets")


async def revoked_token_ends_the_session(
    browser: httpx.AsyncClient, control: AccessControl, token: str
) -> None:
    assert (await sign_in(browser, token)).status_code == 303
    (entry,) = await control.list("alice")
    assert await control.revoke_token(entry.tokens[0].token_id)

    async def is_signed_out() -> bool:  # once the services have received the change
        return (await browser.get("/topics/orders")).status_code == 303

    await until(is_signed_out)
    assert (await browser.get("/topics")).status_code == 303
