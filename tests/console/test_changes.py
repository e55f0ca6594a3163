"""Goal: a change is made by a form of the session with a name and a reason, and by nothing else.

Method: the application on the in-memory broker, called without sockets; what a change has done is
read with the library.
"""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import pytest

from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq.admin.locks import Locks
from batonmq.admin.message_queries import MessageQueries
from batonmq.admin.resets import Resets
from batonmq.admin.topic_stats import TopicStats
from tests.console.scene import Scene, scene, words_of
from tests.console.test_pages import with_stuck_group
from tests.support.conditions import until

QUEUE = "topic=orders&broker=broker-0&queue="


def form_of(page: str) -> dict[str, str]:
    """Return the hidden fields of the form of a change."""
    return dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', page))


async def carry_out(shown: Scene, path: str, **fields: str) -> httpx.Response:
    """Load a plan, and send its form with a name and a reason."""
    form = form_of(await shown.page(path)) | {"by": "ann", "reason": "a test"} | fields
    return await shown.browser.post(path.partition("?")[0], data=form)


async def stuck_queue(shown: Scene) -> int:
    """Return the id of the queue with the message of `with_stuck_group`."""
    async with shown.broker.admin() as admin:
        stats, _ = await TopicStats(admin, "orders").look()
    return next(one.queue.queue_id for one in stats if one.count)


async def test_stuck_group_is_repaired_by_skipping_the_message_and_the_skip_is_undone() -> None:
    stopped = asyncio.Event()
    async with scene() as shown, asyncio.TaskGroup() as tasks:
        await with_stuck_group(shown, tasks, stopped)
        path = f"/change/skip?group=billing&{QUEUE}{await stuck_queue(shown)}"
        plan = await shown.page(path)
        assert "Nothing is changed yet" in plan
        assert "Counted as handled, although not acknowledged: 1 message." in plan
        async with shown.broker.admin() as admin:
            assert (await admin.group_progress("billing")).queues[0].group == "billing"
            assert await Resets(admin).history("billing") == ()
            done = await carry_out(shown, path)
            assert done.status_code == 200, done.text
            (recorded,) = await Resets(admin).history("billing")
            assert (recorded.by, recorded.reason) == ("ann", "a test")
            assert [(s.from_offset, s.to_offset) for s in recorded.steps] == [(0, 1)]
            undo = re.search(r'href="(/change/undo[^"]+)"', done.text)
            assert undo is not None
            again = await carry_out(shown, undo[1].replace("&amp;", "&"))
            assert again.status_code == 200
            newest, _ = await Resets(admin).history("billing")
            assert newest.undone_op_id == recorded.op_id
        stopped.set()


async def test_skip_is_refused_if_the_progress_has_moved_since_the_plan() -> None:
    stopped = asyncio.Event()
    async with scene() as shown, asyncio.TaskGroup() as tasks:
        await with_stuck_group(shown, tasks, stopped)
        path = f"/change/skip?group=billing&{QUEUE}{await stuck_queue(shown)}"
        form = form_of(await shown.page(path)) | {"by": "ann", "reason": "a test"}
        assert (await shown.browser.post("/change/skip", data=form)).status_code == 200
        refused = await shown.browser.post("/change/skip", data=form)
        assert refused.status_code == 400
        assert "the progress has moved since the plan" in refused.text
        async with shown.broker.admin() as admin:
            assert len(await Resets(admin).history("billing")) == 1
        stopped.set()


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"csrf": ""}, 403, "does not come from a page of your session"),
        ({"csrf": "0" * 64}, 403, "does not come from a page of your session"),
        ({"reason": " "}, 400, "Give a reason"),
        ({"by": ""}, 400, "Give your name"),
        ({"reason": "x" * 1_025}, 400, "at most 1,024"),
        ({"op_id": ""}, 400, "load the plan again"),
    ],
)
async def test_change_without_its_token_its_reason_or_its_name_is_refused(
    fields: dict[str, str], status: int, text: str
) -> None:
    stopped = asyncio.Event()
    async with scene() as shown, asyncio.TaskGroup() as tasks:
        await with_stuck_group(shown, tasks, stopped)
        refused = await carry_out(shown, "/change/pause?group=billing", **fields)
        assert refused.status_code == status
        assert text in words_of(refused.text)
        async with shown.broker.admin() as admin:
            assert (await admin.describe_group("billing")).pause is None
        stopped.set()


async def test_change_from_another_site_or_by_a_link_is_refused() -> None:
    stopped = asyncio.Event()
    async with scene() as shown, asyncio.TaskGroup() as tasks:
        await with_stuck_group(shown, tasks, stopped)
        form = form_of(await shown.page("/change/pause?group=billing"))
        form |= {"by": "ann", "reason": "a test"}
        for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
            refused = await shown.browser.post("/change/pause", data=form, headers=headers)
            assert refused.status_code == 403
        await shown.browser.get("/change/pause", params=form)  # a link only shows the plan
        async with shown.broker.admin() as admin:
            assert (await admin.describe_group("billing")).pause is None
        stopped.set()


async def test_console_without_changes_offers_and_makes_none() -> None:
    stopped = asyncio.Event()
    async with scene(changes=False) as shown, asyncio.TaskGroup() as tasks:
        await with_stuck_group(shown, tasks, stopped)
        assert "/change/" not in await shown.page("/groups/billing")
        assert "/change/" not in await shown.page("/topics/orders")
        assert "read-only" in await shown.page("/change/pause?group=billing", 403)
        csrf = shown.web.console.viewers.csrf_token(shown.browser.cookies["baton_console"])
        form = {"csrf": csrf, "by": "ann", "reason": "a", "op_id": "1", "group": "billing"}
        assert (await shown.browser.post("/change/pause", data=form)).status_code == 403
        async with shown.broker.admin() as admin:
            assert (await admin.describe_group("billing")).pause is None
        stopped.set()


async def test_group_is_paused_and_resumed_with_name_and_reason() -> None:
    stopped = asyncio.Event()
    async with scene() as shown, asyncio.TaskGroup() as tasks:
        await with_stuck_group(shown, tasks, stopped)
        assert (await carry_out(shown, "/change/pause?group=billing")).status_code == 200
        group = words_of(await shown.page("/groups/billing"))
        assert "Paused by ann" in group
        assert "a test" in group
        assert "Resume the group" in group
        assert (await carry_out(shown, "/change/resume?group=billing")).status_code == 200
        async with shown.broker.admin() as admin:
            assert (await admin.describe_group("billing")).pause is None
        assert "There is nothing to change" in await shown.page("/change/resume?group=billing")
        stopped.set()


async def test_forced_release_takes_the_queue_from_its_owner() -> None:
    stopped = asyncio.Event()
    async with scene() as shown, asyncio.TaskGroup() as tasks:
        await with_stuck_group(shown, tasks, stopped)
        queue_id = await stuck_queue(shown)
        path = f"/change/release?group=billing&{QUEUE}{queue_id}"
        plan = words_of(await shown.page(path))
        assert "worker-1 has owned" in plan
        assert "can't be undone" in plan
        async with shown.broker.admin() as admin:
            locks = {one.queue_id: one for one in await admin.list_locks("billing", "orders")}
            done = await carry_out(shown, path)
            assert "Its owner was worker-1" in words_of(done.text)
            queue = next(
                q for t in await admin.list_topics() if t.name == "orders" for q in t.queues
                if q.queue_id == queue_id
            )  # fmt: skip
            assert (await Locks(admin).describe("billing", queue)).lock.token > locks[
                queue_id
            ].token
        stopped.set()


async def test_reset_is_planned_by_a_target_and_made_for_one_topic() -> None:
    stopped = asyncio.Event()
    async with scene() as shown, asyncio.TaskGroup() as tasks:
        await with_stuck_group(shown, tasks, stopped)
        assert "Choose where the group continues" in await shown.page("/change/reset?group=billing")
        wrong = await shown.page("/change/reset?group=billing&target=offset&value=x", 400)
        assert "must be a number" in wrong
        path = "/change/reset?group=billing&topic=orders&target=latest"
        assert (await carry_out(shown, path)).status_code == 200
        async with shown.broker.admin() as admin:
            progress = await admin.group_progress("billing")
            assert [q.lag for q in progress.queues if q.topic == "orders"] == [0, 0]
        assert "a test" in words_of(await shown.page("/groups/billing"))
        stopped.set()


async def test_message_is_sent_found_and_traced() -> None:
    async with scene() as shown:
        await shown.broker.create_topic("orders", 2)
        sent = await carry_out(
            shown, "/change/produce?topic=orders", body='{"id": 7}', tag="paid",
            keys="order-7", properties="total=99\nregion=eu",
        )  # fmt: skip
        assert sent.status_code == 200, sent.text
        found = re.search(r"as (broker-0-\w+-\w+)", sent.text)
        assert found is not None
        async with shown.broker.admin() as admin:
            message = await MessageQueries(admin).message(found[1])
        assert (message.body, message.tag, message.keys) == (b'{"id": 7}', "paid", ("order-7",))
        assert message.properties["total"] == "99"
        for query in (
            "", "?key=order-7", "?filter=paid", "?filter=sql: total > 50",
            f"?queue=broker-0/{message.queue.queue_id}&offset=0", "?from=2020-01-01T00:00:00Z",
        ):  # fmt: skip
            assert found[1] in await shown.page(f"/topics/orders/messages{query}"), query
        for query in ("?key=order-8", "?filter=open", "?filter=sql: total > 100"):
            assert found[1] not in await shown.page(f"/topics/orders/messages{query}"), query
        page = await shown.page(f"/messages/{found[1]}")
        assert "&#34;id&#34;: 7" in page
        assert "No group reads this message" in page
        assert found[1] in await shown.page(f"/messages?id={found[1]}")
        assert "not a message id" in await shown.page("/messages/nonsense", 400)
        bad = await carry_out(shown, "/change/produce?topic=orders", body="0g", form="hex")
        assert bad.status_code == 400


async def test_form_that_is_sent_several_times_stores_its_message_once() -> None:
    async with scene() as shown:
        await shown.broker.create_topic("orders", 4)
        form = form_of(await shown.page("/change/produce?topic=orders"))
        form |= {"by": "ann", "reason": "a test", "body": "once", "keys": "k"}
        async with asyncio.TaskGroup() as tasks:  # a double click
            posts = [
                tasks.create_task(shown.browser.post("/change/produce", data=form))
                for _ in range(2)
            ]
        pages = [post.result().text for post in posts]
        pages.append((await shown.browser.post("/change/produce", data=form)).text)
        assert sum("was not sent again" in page for page in pages) == 2
        places = {found[1] for page in pages if (found := re.search(r"as (broker-0-\w+-0)", page))}
        assert len(places) == 1
        assert [one.body for one in await shown.broker.messages("orders")] == [b"once"]
        # The form with another content, as after a look back, is another message.
        other = await shown.browser.post("/change/produce", data=form | {"body": "other"})
        assert "is stored at" in other.text
        fresh = await carry_out(shown, "/change/produce?topic=orders", body="once", keys="k")
        assert "is stored at" in fresh.text
        bodies = sorted(one.body for one in await shown.broker.messages("orders"))
        assert bodies == [b"once", b"once", b"other"]


async def test_dead_letters_are_shown_exported_and_redriven_with_a_result_for_each() -> None:
    async with scene() as shown:
        await shown.broker.create_topic("orders", 1)
        fails, handled = True, list[bytes]()

        async def handle(message: ReceivedMessage) -> None:
            if fails:
                raise ValueError("no such account")
            handled.append(message.body)

        settings = ConsumerSettings(consume_from="first", send_back=True, retries_max=0)
        async with (
            shown.broker.consumer("billing", {"orders": "*"}, settings) as consumer,
            shown.broker.producer() as producer,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(consumer.run(handle))
            for number in range(3):
                await producer.send("orders", b"%d" % number, keys=[f"k{number}"])

            async def is_dead() -> bool:
                return "billing" in await shown.page("/dead-letters")

            await until(is_dead)

            async def all_dead() -> bool:
                page = words_of(await shown.page("/dead-letters/billing"))
                return page.count("1 attempt") == 3

            await until(all_dead)
            page = words_of(await shown.page("/dead-letters/billing"))
            assert "no such account" in page
            one = words_of(await shown.page("/dead-letters/billing?key=k1"))
            assert one.count("1 attempt") == 1
            exported = await shown.browser.get("/dead-letters/billing/export")
            assert "attachment" in exported.headers["content-disposition"]
            lines = [json.loads(line) for line in exported.text.splitlines()]
            assert sorted(line["body"] for line in lines) == ["0", "1", "2"]
            fails = False
            path = "/change/redrive?group=billing&key=k1"
            assert "1 dead letter would be sent again" in words_of(await shown.page(path))
            done = words_of((await carry_out(shown, path)).text)
            assert "1 redriven" in done
            assert "stored at %RETRY%billing" in done
            await until(lambda: handled == [b"1"])
            assert "redriven" in await shown.page("/dead-letters/billing?key=k1")
            consumer.stop()
