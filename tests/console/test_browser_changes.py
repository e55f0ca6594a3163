"""Goal: each change of the console is made by clicks, after a plan, with a name and a reason.

Method: Debian's chromium with Playwright, a console on a busy cluster in memory; what a change has
done is read with the library. The repair of a stuck group is in `test_browser`.
"""

from __future__ import annotations

import pytest
from playwright.async_api import Page, expect

from batonmq._core.queues import QueueRef
from batonmq.admin.access import AccessControl, Role, RoleGrant
from batonmq.admin.admin import Admin
from batonmq.admin.locks import Locks
from batonmq.admin.resets import Resets
from tests.console.busy_cluster import BusyCluster, busy_cluster
from tests.support.browser import chromium, page_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


async def confirm(page: Page, button: str) -> None:
    """Give a name and a reason on the page of a plan, and confirm."""
    await page.get_by_label("Your name").fill("ann")
    await page.get_by_label("Reason").fill("a test")
    await page.get_by_role("button", name=button).click()
    await expect(page.locator("h1 .badge")).to_have_text("done")


@pytest.mark.long
async def test_each_change_is_made_by_clicks() -> None:
    async with busy_cluster() as cluster, chromium() as browser:
        await cluster.fill()
        async with page_of(browser) as page, cluster.broker.admin() as admin:
            await progress_is_reset_and_the_reset_undone(page, cluster, admin)
            await queue_is_released(page, cluster, admin)
            await group_is_paused(page, cluster, admin)
            await message_is_sent(page, cluster)
            await dead_letter_is_redriven(page, cluster)
            await access_is_changed(page, cluster, AccessControl(admin))


async def progress_is_reset_and_the_reset_undone(
    page: Page, cluster: BusyCluster, admin: Admin
) -> None:
    await page.goto(f"{cluster.url}/groups/billing")
    await page.get_by_role("link", name="Reset the progress").click()
    await page.get_by_label("Topic (empty: all topics of the group)").fill("orders")
    await page.get_by_label("Move to").select_option("earliest")
    await page.get_by_role("button", name="Show the plan").click()
    await expect(page.locator("main")).to_contain_text("Nothing is changed yet")
    assert await Resets(admin).history("billing") == ()
    await confirm(page, "Reset")
    (done,) = await Resets(admin).history("billing")
    assert (done.by, done.reason) == ("ann", "a test")
    await page.get_by_role("link", name="Undo").click()
    await confirm(page, "Undo it")
    newest, _ = await Resets(admin).history("billing")
    assert newest.undone_op_id == done.op_id


async def queue_is_released(page: Page, cluster: BusyCluster, admin: Admin) -> None:
    await page.goto(f"{cluster.url}/groups/warehouse")
    stuck = page.locator("article.stuck").first
    topic, broker, queue_id = (await stuck.locator("h3 .id").inner_text()).split("/")
    queue = QueueRef(topic, broker, int(queue_id))
    before = await Locks(admin).describe("warehouse", queue)
    await stuck.get_by_role("link", name="Force release").click()
    await expect(page.locator("main")).to_contain_text("Nothing is changed yet")
    await confirm(page, "Force the release")
    after = await Locks(admin).describe("warehouse", queue)
    assert after.lock.token > before.lock.token


async def group_is_paused(page: Page, cluster: BusyCluster, admin: Admin) -> None:
    await page.goto(f"{cluster.url}/groups/billing")
    await page.get_by_role("link", name="Pause…").click()
    await confirm(page, "Pause the group")
    pause = (await admin.describe_group("billing")).pause
    assert pause is not None
    assert (pause.by, pause.reason) == ("ann", "a test")
    await page.get_by_role("link", name="Back").click()
    await page.get_by_role("link", name="Resume…").click()
    await confirm(page, "Resume the group")
    assert (await admin.describe_group("billing")).pause is None


async def message_is_sent(page: Page, cluster: BusyCluster) -> None:
    await page.goto(f"{cluster.url}/topics/audit-log")
    await page.get_by_role("link", name="Send a message").click()
    await page.get_by_label("Body").first.fill('{"looked": true}')
    await page.get_by_label("Keys, separated by spaces").fill("from-the-console")
    await confirm(page, "Send")
    await page.goto(f"{cluster.url}/topics/audit-log/messages?key=from-the-console")
    found = page.get_by_role("region", name="Messages").locator("tbody tr")
    await expect(found).to_have_count(1)
    await expect(found).to_contain_text('{"looked": true}')


async def dead_letter_is_redriven(page: Page, cluster: BusyCluster) -> None:
    await page.goto(f"{cluster.url}/dead-letters/settlement?key=pay-1")
    await page.get_by_role("link", name="Redrive to the group").click()
    await expect(page.locator("main")).to_contain_text("Nothing is changed yet")
    await confirm(page, "Redrive")
    results = page.get_by_role("region", name="Results").locator("tbody tr")
    await expect(results).to_have_count(1)
    await page.goto(f"{cluster.url}/dead-letters/settlement?key=pay-1")
    await expect(page.locator("details.letter").first).to_contain_text("pay-1")
    await expect(page.locator("details.letter .badge.good").first).to_have_text("redriven")


async def access_is_changed(page: Page, cluster: BusyCluster, control: AccessControl) -> None:
    token = await control.create_token("alice")
    await page.goto(f"{cluster.url}/access")
    await page.get_by_role("link", name="Grant a role").click()
    await page.get_by_label("Identity").fill("alice")
    await page.get_by_label("Role").select_option("consume")
    await page.get_by_label("Resource").fill("topic:orders")
    await page.get_by_role("button", name="Show the plan").click()
    await confirm(page, "Grant")
    granted = [grant for one in await control.list("alice") for grant in one.grants]
    assert granted == [RoleGrant(Role.CONSUME, "topic:orders")]

    await page.goto(f"{cluster.url}/access")
    await page.get_by_role("link", name="Revoke consume on topic:orders from alice").click()
    await confirm(page, "Revoke")
    assert [grant for one in await control.list("alice") for grant in one.grants] == []

    await page.goto(f"{cluster.url}/access")
    await page.get_by_role("link", name=f"Revoke token {token.token_id}").click()
    await confirm(page, "Revoke")
    assert all(not one.tokens for one in await control.list("alice"))

    await page.goto(f"{cluster.url}/access")
    await page.get_by_role("link", name="Block a caller").click()
    await page.get_by_label("Identity, or client certificate").fill("identity:mallory")
    await page.get_by_role("button", name="Show the plan").click()
    await confirm(page, "Block")
    (blocked,) = await control.blocks()
    assert (blocked.subject, blocked.reason) == ("identity:mallory", "a test")
    await page.goto(f"{cluster.url}/access")
    await page.get_by_role("link", name="End the block of identity:mallory").click()
    await confirm(page, "End")
    assert await control.blocks() == ()
