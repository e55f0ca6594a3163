"""Goal: a person sees in a browser what docs/how-to/console.md claims of each page.

Method: Debian's chromium with Playwright, a console on a busy cluster in memory; for the alerts a
real cluster and Debian's prometheus with the rules of deploy/prometheus, without their waiting
times.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from anyio import Path as AsyncPath
from playwright.async_api import Locator, Page, expect

from batonmq import Admin
from batonmq.admin.access import AccessControl, Role, RoleGrant
from batonmq.errors import SubscriptionConflict
from batonmq_server.console.app import make_console
from batonmq_server.console.config import ConsoleSettings
from batonmq_server.local import prometheus as local_prometheus
from batonmq_server.local.prometheus import Prometheus, scrape_targets
from tests.console.busy_cluster import BusyCluster, busy_cluster, served
from tests.deploy.live_prometheus import needs_prometheus
from tests.support.browser import chromium, page_of
from tests.support.cluster import local_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def fact(page: Page, label: str) -> Locator:
    """Return the value of a fact."""
    return page.locator(".fact", has=page.locator("dt", has_text=re.compile(f"^{label}$"))).locator(
        "dd"
    )


@pytest.mark.long
async def test_each_page_shows_what_it_claims() -> None:
    async with busy_cluster() as cluster, chromium() as browser:
        await cluster.fill()
        async with cluster.broker.admin() as admin:
            control = AccessControl(admin)
            await control.grant("alice", RoleGrant(Role.CONSUME, "topic:orders"))
            token = await control.create_token("alice")
        async with page_of(browser) as page:
            await cluster_page(page, cluster)
            await topics_page(page, cluster)
            await messages_are_searched(page, cluster)
            await message_page(page, cluster)
            await group_page(page, cluster)
            await hand_overs_page(page, cluster)
            await dead_letters_page(page, cluster)
            await alerts_of_the_cluster(page, cluster)
            await page.goto(f"{cluster.url}/access")
            row = page.locator("tr", has_text="alice")
            await expect(row).to_contain_text("topic:orders")
            await expect(row).to_contain_text(token.token_id)
            await expect(page.locator("main")).not_to_contain_text(token.token.reveal())


async def cluster_page(page: Page, cluster: BusyCluster) -> None:
    await page.goto(cluster.url)
    for service in ("storage", "offsets", "lockmgr", "nameserver"):
        row = page.locator("tbody tr", has_text=service).first
        await expect(row).to_be_visible()
    for broker in ("broker-0", "broker-1"):
        await expect(page.get_by_role("img", name=f"storage {broker}")).to_be_visible()
        disk = page.get_by_role("region", name="Disks and logs").locator("tr", has_text=broker)
        await expect(disk.locator("meter")).to_be_visible()
    heads = page.get_by_role("region", name="Processes").locator("th")
    for head in ("Role", "Epoch", "In sync", "Contract"):
        await expect(heads.filter(has_text=re.compile(f"^{head}$"))).to_have_count(1)


async def topics_page(page: Page, cluster: BusyCluster) -> None:
    await page.goto(f"{cluster.url}/topics")
    row = page.locator("tbody tr", has_text="orders")
    await expect(row.locator("td").nth(2)).to_have_text("4")
    await expect(row.locator("td").nth(5)).to_have_text("60")
    await expect(page.locator("main")).not_to_contain_text("%DLQ%settlement")
    await page.get_by_role("link", name="Show all").click()
    await expect(page.locator("main")).to_contain_text("%DLQ%settlement")
    await page.get_by_role("link", name="orders", exact=True).click()
    await expect(fact(page, "Messages")).to_have_text("60")
    await expect(page.get_by_role("region", name="Queues").locator("tbody tr")).to_have_count(4)
    for group in ("billing", "warehouse"):
        await expect(page.get_by_role("link", name=group, exact=True)).to_be_visible()


async def messages_are_searched(page: Page, cluster: BusyCluster) -> None:
    found = page.get_by_role("region", name="Messages").locator("tbody tr")
    await page.goto(f"{cluster.url}/topics/orders/messages")

    async def search(**fields: str) -> None:
        for label, value in fields.items():
            await page.locator(f"#{label}").fill(value)
        await page.get_by_role("button", name="Search").click()
        await page.wait_for_load_state()

    await search(key="order-7")
    await expect(found).to_have_count(1)
    await expect(found).to_contain_text('"id": 7')
    message_id = await found.locator("a.id").inner_text()
    await page.locator("#id").fill(message_id)
    await page.get_by_role("button", name="Show").click()
    await expect(page.locator("h1")).to_contain_text(message_id)
    await page.goto(f"{cluster.url}/topics/orders/messages")
    await search(filter="open")
    await expect(found).to_have_count(20)
    await search(filter="sql: total > 57")
    await expect(found).to_have_count(2)
    await search(filter="")
    queue = await page.locator("#queue option").nth(1).inner_text()
    await page.locator("#queue").select_option(queue)
    await search(offset="3")
    await expect(found.first.locator("td").nth(3)).to_have_text("3")
    await page.locator("#queue").select_option(queue)
    await search(**{"offset": "", "from": "2099-01-01T00:00:00Z"})
    await expect(page.locator("main")).to_contain_text("No message found")


async def message_page(page: Page, cluster: BusyCluster) -> None:
    await page.goto(f"{cluster.url}/topics/orders/messages?key=order-1")
    await page.get_by_role("region", name="Messages").locator("tbody a.id").click()
    await expect(page.locator("pre.json")).to_contain_text('"customer": "c-1"')
    await expect(fact(page, "Keys")).to_have_text("order-1")
    await expect(page.get_by_role("row", name="total 1")).to_be_visible()
    steps = page.locator("h3", has_text="billing").locator("xpath=following-sibling::ol[1]/li")
    await expect(steps.first).to_contain_text("stored")
    await expect(steps.last).to_contain_text(re.compile("acknowledged|delivered|handled"))
    await page.goto(f"{cluster.url}/topics/audit-log/messages")
    await page.get_by_role("region", name="Messages").locator("tbody a.id").click()
    await expect(page.locator("pre.hex")).to_contain_text("00 01 02 03")


async def group_page(page: Page, cluster: BusyCluster) -> None:
    await page.goto(f"{cluster.url}/groups/warehouse")
    await expect(page.locator("article.stuck").first).to_contain_text("HEAD_OF_LINE")
    await expect(page.locator("article.stuck").first).to_contain_text("What to do:")
    members = page.get_by_role("region", name="Members")
    await expect(members).to_contain_text("warehouse-1")
    queues = page.get_by_role("region", name="Queues").locator("tbody tr")
    own = queues.filter(has=page.get_by_role("cell", name="orders", exact=True))
    await expect(own).to_have_count(4)
    await expect(own.filter(has_text="warehouse-1")).to_have_count(4)
    await expect(page.get_by_role("row", name="orders paid")).to_be_visible()
    # A member with another filter is refused, and shown beside the group.
    with pytest.raises(SubscriptionConflict):
        async with cluster.broker.consumer(
            "warehouse", {"orders": "open"}, client_id="warehouse-2"
        ):
            pass
    conflict = page.get_by_role("row", name=re.compile("orders .*paid.*open"))
    await expect(conflict).to_be_visible()


async def hand_overs_page(page: Page, cluster: BusyCluster) -> None:
    await page.goto(f"{cluster.url}/hand-overs")
    await page.get_by_role("link", name="billing", exact=True).click()
    lines = page.get_by_role("img", name=re.compile("orders.broker-"))
    await expect(lines).to_have_count(4)
    await cluster.member("billing", "orders", "billing-3", life_s=3)
    await expect(page.locator("ul.legend")).to_contain_text("billing-3")
    events = page.get_by_role("region", name="Events").locator("tbody tr")
    await expect(events.filter(has_text="hand-over").first).to_be_visible()
    tokens = page.get_by_role("region", name="Tokens").locator("tbody tr")
    await expect(tokens.filter(has_text="billing-3").first).to_be_visible()


async def dead_letters_page(page: Page, cluster: BusyCluster) -> None:
    await page.goto(f"{cluster.url}/dead-letters")
    await page.get_by_role("link", name="settlement", exact=True).click()
    letters = page.locator("details.letter")
    await expect(letters.first).to_contain_text("no account for key pay-")
    await page.locator("#key").fill("pay-2")
    await page.get_by_role("button", name="Search").click()
    await expect(letters).to_have_count(1)
    await letters.locator("summary").click()
    await expect(letters.locator("pre")).to_have_text("payment 2")
    async with page.expect_download() as waiting:
        await page.get_by_role("link", name="Export as JSON lines").click()
    exported = AsyncPath(await (await waiting.value).path())
    (line,) = (await exported.read_text()).splitlines()
    assert json.loads(line)["keys"] == ["pay-2"]


async def alerts_of_the_cluster(page: Page, cluster: BusyCluster) -> None:
    await page.goto(f"{cluster.url}/alerts")
    row = page.locator("tbody tr", has_text="group warehouse")
    await expect(row).to_contain_text("HEAD_OF_LINE")
    await row.get_by_role("link").click()
    await expect(page).to_have_url(f"{cluster.url}/groups/warehouse")


def rules_without_waiting_times(folder: Path) -> Path:
    """Copy the configuration of Prometheus; its alerts fire at once, and it looks often."""
    copy = folder / "deploy" / "prometheus"
    copy.mkdir(parents=True)
    for path in local_prometheus.CONFIG.iterdir():
        text = re.sub(r"^\s+for: \w+\n", "", path.read_text(), flags=re.MULTILINE)
        text = re.sub(r"(?<=_interval: )\w+", "1s", text)
        (copy / path.name).write_text(text)
    return copy


@pytest.mark.long
@needs_prometheus
async def test_alerts_that_fire_in_prometheus_are_shown_until_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = rules_without_waiting_times(tmp_path)
    monkeypatch.setattr(local_prometheus, "CONFIG", rules)
    async with (
        local_cluster(tmp_path / "c", auto_restart=False) as cluster,
        Prometheus(tmp_path / "p", scrape_targets(cluster), port=0) as prometheus,
        chromium() as browser,
    ):
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic("orders", 1)
        values: dict[str, object] = {
            "nameserver": cluster.nameserver,
            "prometheus": f"http://{prometheus.address}",
            "refresh_ms": 500,
        }
        settings = ConsoleSettings.model_validate(values)
        web = make_console(settings)
        async with web.running(), served(web, settings) as (url, _), page_of(browser) as page:
            await page.goto(f"{url}/alerts")
            await expect(page.locator("main")).to_contain_text(prometheus.address)
            down = page.locator("tbody tr", has_text="BatonDown").filter(has_text="lockmgr")
            await expect(down).to_have_count(0)
            await cluster.kill("lockmgr")
            await expect(down).to_contain_text("node_type=lockmgr")
            await expect(down).to_contain_text("BatonDown.md")
            await cluster.start("lockmgr")
            await expect(down).to_have_count(0)
