"""Goal: each page shows what the cluster has, and refuses what a browser must not do.

Method: the application on the in-memory broker, called without sockets.
"""

from __future__ import annotations

import asyncio
import json

import pytest
from pydantic import ValidationError

from batonmq._consumer.message import ReceivedMessage
from batonmq_server.console.app import _own_path
from batonmq_server.console.config import ConsoleSettings
from batonmq_server.console.live import LiveHub, TooManyViewers
from batonmq_server.console.web import CSP, host_of
from tests.console.scene import Scene, scene, words_of
from tests.support.conditions import until


async def with_stuck_group(shown: Scene, tasks: asyncio.TaskGroup, stopped: asyncio.Event) -> None:
    """Send one message, which the only member of the group `billing` never ends."""
    await shown.broker.create_topic("orders", 2)
    started = asyncio.Event()

    async def hang(_: ReceivedMessage) -> None:
        started.set()
        await stopped.wait()

    async def member() -> None:
        async with (
            shown.broker.consumer("billing", {"orders": "*"}, client_id="worker-1") as consumer,
            asyncio.TaskGroup() as running,
        ):
            running.create_task(consumer.run(hang))
            await stopped.wait()
            consumer.stop()

    tasks.create_task(member())
    async with shown.broker.producer() as producer:
        await producer.send("orders", b"{}")
    await started.wait()


async def test_pages_show_the_nodes_the_topics_and_the_groups() -> None:
    stopped = asyncio.Event()
    async with scene() as shown, asyncio.TaskGroup() as tasks:
        await with_stuck_group(shown, tasks, stopped)
        cluster = words_of(await shown.page("/"))
        assert "healthy" in cluster
        for name in ("nameserver-0", "lockmgr-0", "offsets-0", "broker-0"):
            assert name in cluster
        assert "orders" in words_of(await shown.page("/topics"))
        topic = words_of(await shown.page("/topics/orders"))
        assert "Messages 1 " in topic
        assert "billing" in topic
        group = words_of(await shown.page("/groups/billing"))
        assert "worker-1" in group
        assert "Lag 1 messages" in group
        assert "billing" in words_of(await shown.page("/groups"))
        stopped.set()


async def test_empty_lists_and_unknown_names_are_said_in_words() -> None:
    async with scene() as shown:
        assert "There is no topic yet" in await shown.page("/topics")
        assert "No group matches" in await shown.page("/groups?q=nothing")
        unknown = await shown.page("/topics/nothing", 404)
        assert "TOPIC_NOT_FOUND" in unknown
        assert "What to do" in unknown
        assert "there is no page /nothing" in await shown.page("/nothing", 404)
        assert "page must be a number" in await shown.page("/topics?page=x", 400)


async def test_topics_are_searched_and_paged() -> None:
    async with scene() as shown:
        async with asyncio.TaskGroup() as tasks:
            for number in range(120):
                tasks.create_task(shown.broker.create_topic(f"topic-{number:03}", 1))
        first = await shown.page("/topics")
        assert "120 topics, page 1 of 3" in words_of(first)
        assert "topic-049" in first
        assert "topic-050" not in first
        assert "topic-119" in await shown.page("/topics?page=3")
        found = await shown.page("/topics?q=TOPIC-11")
        assert "10 topics of 120" in words_of(found)


async def test_names_in_a_page_are_escaped() -> None:
    async with scene() as shown:
        text = await shown.page("/topics?q=%3Cscript%3Ealert(1)%3C/script%3E")
        assert "<script>alert" not in text
        assert "&lt;script&gt;alert" in text


async def test_every_answer_has_the_headers_of_security() -> None:
    async with scene() as shown:
        for path in ("/", "/nothing", "/static/console.css"):
            headers = (await shown.browser.get(path)).headers
            assert headers["content-security-policy"] == CSP
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["x-frame-options"] == "DENY"
        assert "unsafe" not in CSP
        cookie = (await shown.browser.get("/", headers={"cookie": ""})).headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()


async def test_pages_contain_neither_inline_code_nor_foreign_addresses() -> None:
    async with scene() as shown:
        await shown.broker.create_topic("orders", 1)
        for path in (
            "/", "/topics", "/topics/orders", "/topics/orders/messages", "/groups", "/hand-overs",
            "/dead-letters", "/alerts", "/access", "/change/produce?topic=orders",
        ):  # fmt: skip
            text = await shown.page(path)
            assert " style=" not in text
            assert " onclick=" not in text
            assert "<style" not in text
            assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
            assert "https://" not in text


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", ""])
async def test_foreign_host_name_is_refused(host: str) -> None:
    async with scene() as shown:
        response = await shown.browser.get("/", headers={"host": host})
        assert response.status_code == 421
        assert "BATON_CONSOLE_ALLOWED_HOSTS" in response.text


@pytest.mark.parametrize(
    ("header", "host"),
    [("Localhost:80", "localhost"), ("[::1]:9878", "[::1]"), ("a.b", "a.b"), ("", "")],
)
def test_host_is_read_without_its_port(header: str, host: str) -> None:
    assert host_of(header) == host


@pytest.mark.parametrize(
    ("goal", "path"),
    [
        ("/groups?q=a", "/groups?q=a"),
        ("//evil.example", "/"),
        ("/\\evil.example", "/"),
        ("https://evil.example/", "/"),
        ("", "/"),
    ],
)
def test_sign_in_leads_to_a_page_of_the_console_only(goal: str, path: str) -> None:
    assert _own_path(goal) == path


@pytest.mark.parametrize(
    "wrong",
    [
        {"host": "0.0.0.0"},
        {"tls_cert_file": "a"},
        {"cert_file": "a"},
        {"cert_file": "a", "key_file": "b"},
        {"sign_in_key_file": "a"},
        {"sign_in_key_file": "a", "ca_file": "b"},
        {"nameserver": "nowhere"},
        {"prometheus": "file:///etc"},
    ],
)
def test_settings_that_do_not_fit_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        ConsoleSettings(**wrong)  # type: ignore[arg-type]


async def test_open_page_is_rendered_once_for_all_of_its_viewers() -> None:
    hub, count = LiveHub(0.01, 100), 0
    changed = asyncio.Event()

    async def render() -> str:
        nonlocal count
        count += 1
        return "later" if changed.is_set() else "first"

    async def watch(seen: list[str]) -> None:
        async for event in hub.events(("who", "/"), render):
            if event.startswith("event: live"):
                seen += [json.loads(event.partition("data: ")[2])]

    texts: list[list[str]] = [[] for _ in range(50)]
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(hub.run())
        await asyncio.sleep(0)
        watching = [tasks.create_task(watch(seen)) for seen in texts]
        await until(lambda: all(seen == ["first"] for seen in texts))
        assert (hub.page_count, hub.viewer_count) == (1, 50)
        before = count
        await until(lambda: count >= before + 3)
        assert all(seen == ["first"] for seen in texts)
        changed.set()
        await until(lambda: all(seen == ["first", "later"] for seen in texts))
        for task in watching:
            task.cancel()
        await until(lambda: hub.page_count == 0)
        running.cancel()
    assert hub.rendered_count == count


async def test_page_beyond_the_limit_is_not_updated() -> None:
    hub = LiveHub(0.01, 1)

    async def render() -> str:
        return ""

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(hub.run())
        await asyncio.sleep(0)
        first = hub.events(("who", "/"), render)
        await anext(first)
        with pytest.raises(TooManyViewers):
            await anext(hub.events(("who", "/"), render))
        await first.aclose()  # type: ignore[attr-defined]
        await anext(hub.events(("who", "/"), render))
        running.cancel()


async def test_error_of_one_page_leaves_the_others_updated() -> None:
    hub = LiveHub(0.01, 10)

    async def broken() -> str:
        raise ZeroDivisionError

    async def good() -> str:
        return "good"

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(hub.run())
        await asyncio.sleep(0)
        bad, fine = hub.events(("who", "/a"), broken), hub.events(("who", "/b"), good)
        assert [await anext(bad), await anext(fine)] == ["retry: 3000\n\n"] * 2
        assert (await anext(bad)).startswith("event: problem")
        assert (await anext(fine)).startswith("event: live")
        running.cancel()
