"""Unmodified official clients against a real cluster with a gateway."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from batonmq import Admin, Consumer, ConsumerSettings, Producer
from batonmq._common.clock import Clock
from batonmq.errors import GroupNotFound
from batonmq_server.local.cluster import LocalCluster
from tests.gateway.official_clients import (
    COMPILE_S,
    FEATURES,
    LACKS,
    LANGUAGES,
    MORE,
    SOURCES,
    OfficialClient,
    official_client,
)
from tests.runtime.etcd_proxies import StickingProxy
from tests.support.cluster import local_cluster
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300 + COMPILE_S)]
TOPIC = "orders"
SETTINGS = {"invisible_ms_min": 500, "group_idle_ms": 3_000, "delivery_attempts_max": 3}
STORAGE = {"transaction_check_first_ms": 0, "transaction_check_interval_ms": 1_000}


def lacks(language: str, function: str) -> bool:
    return function in LACKS.get(language, frozenset())


class Scene:
    """A cluster with a gateway, and the official clients."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster, self.nameserver = cluster, cluster.nameserver
        self.clients: Mapping[str, OfficialClient] = {
            language: official_client(language) for language in (*LANGUAGES, *MORE)
        }

    async def run(self, language: str, op: str, **task: Any) -> list[dict[str, Any]]:
        """Run a task of an official client; return what it sent or received."""
        common: dict[str, Any] = {
            "op": op,
            "endpoints": self.cluster.addresses["gateway"],
            "topic": TOPIC,
        }
        common |= {"seconds": 30, "invisible_s": 10}
        result = await self.clients[language].run(common | task)
        found: list[dict[str, Any]] = next(iter(result.values()))
        return found


@asynccontextmanager
async def scene(folder: Path, queues: int = 4, **settings: object) -> AsyncIterator[Scene]:
    for language in (*LANGUAGES, *MORE):
        official_client(language)  # before the cluster starts: it may take a minute
    async with local_cluster(
        folder, gateways=1, gateway=SETTINGS | settings, storage=STORAGE
    ) as cluster:
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic(TOPIC, queues)
        yield Scene(cluster)


def bodies(messages: list[dict[str, Any]]) -> list[str]:
    return sorted(one["body"] for one in messages)


def consumer_that_fails(language: str) -> dict[str, Any]:
    """Return the task of a consumer whose failed messages come again.

    Without a push consumer it is a simple one, which does not acknowledge what fails: it comes
    again when its invisible time is over.
    """
    if lacks(language, "push"):
        return {"op": "simple", "invisible_s": 3}
    return {"op": "push"}


@pytest.mark.long
async def test_every_producer_is_understood_by_every_consumer(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        sent: dict[str, str] = {}
        for language in (*LANGUAGES, *MORE):
            messages = [
                {
                    "body": f"{language}-{n} ä",
                    "tag": "paid",
                    "keys": ["k1", "k2"],
                    "properties": {"region": "eu", "naïve": "ü"},
                }
                for n in range(5)
            ]
            receipts = await at.run(language, "send", messages=messages)
            sent |= {one["id"]: two["body"] for one, two in zip(receipts, messages, strict=True)}
        async with Producer(at.nameserver) as producer:
            for n in range(5):
                receipt = await producer.send(
                    TOPIC,
                    f"native-{n} ä".encode(),
                    tag="paid",
                    keys=["k1", "k2"],
                    properties={"region": "eu", "naïve": "ü"},
                )
                sent[receipt.message_id] = f"native-{n} ä"
        count = len(sent)
        async with asyncio.TaskGroup() as tasks:
            results = {
                (language, op): tasks.create_task(
                    at.run(language, op, group=f"{language}-{op}", count=count, seconds=120)
                )
                for language in (*LANGUAGES, *MORE)
                for op in ("simple", "push")
                if op == "simple" or not lacks(language, "push")
            }
        for name, result in results.items():
            got = result.result()
            assert {one["id"]: one["body"] for one in got} == sent, name
            assert len(got) == count, name
            for one in got:
                assert (one["tag"], one["keys"], one["attempt"]) == ("paid", ["k1", "k2"], 1)
                assert one["properties"] == {"region": "eu", "naïve": "ü"}, name
        received = []
        settings = ConsumerSettings(consume_from="first")
        async with Consumer(at.nameserver, "natives", {TOPIC: "*"}, settings) as consumer:
            async for message in consumer:
                received.append(message.body.decode())
                assert message.properties["region"] == "eu"
                if len(received) == count:
                    break
        assert sorted(received) == sorted(sent.values())


@pytest.mark.long
@pytest.mark.parametrize("language", FEATURES)
async def test_message_that_fails_is_delivered_again_and_at_last_a_dead_letter(
    tmp_path: Path, language: str
) -> None:
    async with scene(tmp_path) as at:
        messages = [{"body": f"m{n}"} for n in range(4)]
        await at.run(language, "send", messages=messages)
        task = consumer_that_fails(language) | {"count": 7, "seconds": 20}
        got = await at.run(language, group="workers", fail={"m1": 1, "m2": 9}, **task)
        attempts = sorted((one["body"], one["attempt"]) for one in got)
        once, again = [("m0", 1), ("m3", 1)], [("m1", 1), ("m1", 2)]
        assert attempts == sorted([*once, *again, ("m2", 1), ("m2", 2), ("m2", 3)])
        async with Admin(at.nameserver) as admin:
            letters = [one async for one in dead_letters(admin, at.nameserver)]
        assert letters == ["m2"]


async def dead_letters(admin: Admin, nameserver: str) -> AsyncIterator[str]:
    """Yield the bodies of the dead letters of the group, once there is one."""
    settings = ConsumerSettings(consume_from="first", send_back=False)

    async def exists() -> bool:
        return "%DLQ%workers" in {topic.name for topic in await admin.list_topics()}

    await until(exists)
    async with Consumer(nameserver, "undertaker", {"%DLQ%workers": "*"}, settings) as consumer:
        async for message in consumer:
            yield message.body.decode()
            return


@pytest.mark.long
@pytest.mark.parametrize("language", FEATURES)
async def test_simple_consumer_gives_back_and_gets_again_what_it_did_not_acknowledge(
    tmp_path: Path, language: str
) -> None:
    async with scene(tmp_path) as at:
        await at.run(language, "send", messages=[{"body": "a"}, {"body": "b"}])
        if not lacks(language, "give back"):
            got = await at.run(language, "simple", group="back", count=4, give_back=True)
            assert sorted((one["body"], one["attempt"]) for one in got) == [
                ("a", 1), ("a", 2), ("b", 1), ("b", 2),
            ]  # fmt: skip
        got = await at.run(language, "simple", group="lazy", count=2, ack=False, invisible_s=1)
        seen = Counter(bodies(got))  # a slow client may get one twice before the other one
        assert set(seen) <= {"a", "b"}
        got = await at.run(language, "simple", group="lazy", count=2)
        attempts = sorted((one["body"], one["attempt"]) for one in got)
        assert attempts == [("a", seen["a"] + 1), ("b", seen["b"] + 1)]


@pytest.mark.long
@pytest.mark.parametrize("language", FEATURES)
async def test_message_group_is_delivered_in_order_though_its_first_message_fails(
    tmp_path: Path, language: str
) -> None:
    async with scene(tmp_path, fifo_groups="fifo", delivery_attempts_max=17) as at:
        messages = [
            {"body": f"{group}{n}", "message_group": group} for n in range(6) for group in "ab"
        ]
        await at.run(language, "send", messages=messages)
        for name in ("fifo", "standard"):
            task = consumer_that_fails(language) | {"count": 13, "seconds": 25}
            got = await at.run(language, group=name, fail={"a0": 1}, **task)
            by_group = {g: [one["body"] for one in got if one["message_group"] == g] for g in "ab"}
            assert by_group["b"] == [f"b{n}" for n in range(6)], name
            assert by_group["a"] == ["a0", "a0", *(f"a{n}" for n in range(1, 6))], name


@pytest.mark.long
@pytest.mark.parametrize("language", [one for one in FEATURES if not lacks(one, "push")])
async def test_messages_that_were_on_their_way_in_broken_connections_come_again(
    tmp_path: Path, language: str
) -> None:
    """Some clients repeat a receive call that failed with its attempt id, others with a new one."""
    settings = {"delivery_attempts_max": 17, "group_idle_ms": 60_000, "renew_ms": 4_000}
    async with (
        scene(tmp_path, queues=2, **settings) as at,
        StickingProxy(at.cluster.addresses["gateway"]) as proxy,
        Admin(at.nameserver) as admin,
        Producer(at.nameserver) as producer,
        asyncio.TaskGroup() as tasks,
    ):

        async def committed() -> int:
            try:
                rows = (await admin.group_progress("cut")).queues
            except GroupNotFound:
                return 0
            return sum(row.committed_offset or 0 for row in rows if row.topic == TOPIC)

        task = {"endpoints": proxy.address, "group": "cut", "count": 1_000, "seconds": 50}
        receiving = tasks.create_task(at.run(language, "push", **task))
        sent = [f"{number} ".ljust(20_000, "x") for number in range(8 * 30)]
        for number, body in enumerate(sent, 1):
            await producer.send(TOPIC, body.encode())
            if number % 30 == 0:
                proxy.free()  # break all connections, while messages are on their way
                await until(partial(_exceeds, committed, number - 30))
        got = bodies(await receiving)
        assert set(got) == set(sent)


async def _exceeds(count: Callable[[], Awaitable[int]], bound: int) -> bool:
    return await count() > bound


@pytest.mark.long
@pytest.mark.parametrize("language", FEATURES)
async def test_delay_recall_and_filters(tmp_path: Path, language: str) -> None:
    async with scene(tmp_path) as at:
        now_s = Clock().unix_ms() // 1_000
        delay_s = 40 if language == "java" else 12  # the consumers have started by then
        messages: list[dict[str, Any]] = [
            {
                "body": "later",
                "deliver_at_s": now_s + delay_s,
                "tag": "a",
                "properties": {"price": "9"},
            },
            {"body": "now", "tag": "b", "properties": {"price": "2"}},
        ]
        if not lacks(language, "recall"):
            recalled = {"body": "never", "deliver_at_s": now_s + delay_s + 1, "tag": "a"}
            messages.append(recalled | {"recall": True, "properties": {"price": "9"}})
        sent = await at.run(language, "send", messages=messages)
        assert [one["recalled"] == one["id"] for one in sent[2:]] == [True] * len(sent[2:])
        async with asyncio.TaskGroup() as tasks:
            task: dict[str, Any] = {"op": "simple", "seconds": delay_s + 4}
            every = tasks.create_task(at.run(language, group="all", count=3, **task))
            tagged = tasks.create_task(
                at.run(language, group="tagged", filter="a||c", count=1, **task)
            )
            priced = tasks.create_task(
                at.run(language, group="priced", sql="price > 5", count=1, **task)
            )
        assert bodies(every.result()) == ["later", "now"]
        (later,) = (one for one in every.result() if one["body"] == "later")
        assert later["at_s"] >= now_s + delay_s, "not before its time"
        assert bodies(tagged.result()) == ["later"]
        assert bodies(priced.result()) == ["later"]


@pytest.mark.long
@pytest.mark.parametrize("language", FEATURES)
async def test_namespaces_do_not_see_each_other(tmp_path: Path, language: str) -> None:
    if lacks(language, "namespaces"):
        pytest.skip(f"NO NAMESPACES in the official client of {language}")
    async with scene(tmp_path) as at:
        async with Admin(at.nameserver) as admin:
            await admin.create_topic(f"blue%{TOPIC}", 1)
        await at.run(language, "send", messages=[{"body": "plain"}])
        await at.run(language, "send", messages=[{"body": "blue"}], namespace="blue")
        for namespace, body in (("", "plain"), ("blue", "blue")):
            got = await at.run(
                language, "simple", group="team", count=2, seconds=4, namespace=namespace
            )
            assert bodies(got) == [body]


def crate_source() -> str:
    """Return the source of the crate that the lock of the Rust client names."""
    command = ["cargo", "metadata", "--format-version=1", "--locked"]
    found = subprocess.run(command, cwd=SOURCES / "rust", capture_output=True, check=True)
    (manifest,) = (
        package["manifest_path"]
        for package in json.loads(found.stdout)["packages"]
        if package["name"] == "rocketmq"
    )
    return "\n".join(path.read_text() for path in Path(manifest).parent.rglob("src/*.rs"))


if "rust" in MORE:

    def test_rust_crate_has_no_function_that_its_tests_leave_out() -> None:
        signs = {
            "push": r"pub struct PushConsumer\b",
            "give back": r"pub (async )?fn change_invisible",
            "recall": r"pub (async )?fn recall",
            "namespaces": r"pub fn set_namespace",
            "tls": r"^\s*\.tls_config\(",
        }
        assert signs.keys() == LACKS["rust"]
        official_client("rust")
        source = crate_source()
        assert "pub struct SimpleConsumer" in source
        has = [name for name, sign in signs.items() if re.search(sign, source, re.MULTILINE)]
        assert has == [], "it has them now: test them"


@pytest.mark.long
@pytest.mark.parametrize("language", FEATURES)
async def test_transactions_and_the_check_of_one_that_its_producer_left(
    tmp_path: Path, language: str
) -> None:
    async with scene(tmp_path) as at:
        ends = {"paid": "commit", "refused": "rollback", "left": "leave", "lost": "leave"}
        messages = [{"body": body, "end": end} for body, end in ends.items()]
        await at.run(language, "transactions", messages=messages)  # and dies
        checked = await at.run(
            language, "transactions", messages=[], checks=2, answers={"left": True, "lost": False}
        )
        assert sorted({one["body"] for one in checked}) == ["left", "lost"]
        got = await at.run(language, "simple", group="audit", count=3, seconds=8)
        assert bodies(got) == ["left", "paid"]
