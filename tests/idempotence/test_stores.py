"""Goal: every store keeps the contract of `Store`: a key has one owner until its claim expires.

Method: the same tests on memory, a real Redis, a SQLite file and a real PostgreSQL; random runs are
compared with a dictionary. Instead of waiting, a test moves the expiry of all entries nearer, in
steps of minutes, so that the seconds of the run itself do not matter.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from redis.asyncio import Redis

from batonmq.errors import InvalidArgument
from batonmq.idempotence import MemoryStore, RedisStore, SqlStore
from batonmq.idempotence.sql_store import CLAIMS, PURGE_EVERY, purge_statement, put_statement
from batonmq.idempotence.store import DONE
from tests.idempotence.stores import SetClock, aging_store

MINUTE_MS = 60_000
Names = Callable[[], str]


async def test_claimed_key_is_refused_to_other_owners(url: str, namespaces: Names) -> None:
    async with aging_store(url, namespaces()) as aged:
        assert await aged.store.put("k", "ann", "ann", MINUTE_MS) == "ann"
        assert await aged.store.put("k", "bob", "bob", MINUTE_MS) == "ann"
        assert await aged.store.put("other", "bob", "bob", MINUTE_MS) == "bob"


async def test_repeated_claim_of_the_same_owner_is_granted(url: str, namespaces: Names) -> None:
    async with aging_store(url, namespaces()) as aged:
        for _ in range(2):
            assert await aged.store.put("k", "ann", "ann", MINUTE_MS) == "ann"


async def test_claim_expires_when_its_time_is_over_and_not_before(
    url: str, namespaces: Names
) -> None:
    async with aging_store(url, namespaces()) as aged:
        await aged.store.put("k", "ann", "ann", 10 * MINUTE_MS)
        await aged.pass_ms(9 * MINUTE_MS)
        assert await aged.store.put("k", "bob", "bob", MINUTE_MS) == "ann"
        await aged.pass_ms(MINUTE_MS)
        assert await aged.store.put("k", "bob", "bob", MINUTE_MS) == "bob"


async def test_late_owner_can_not_mark_a_key_done_that_another_owner_has_claimed(
    url: str, namespaces: Names
) -> None:
    async with aging_store(url, namespaces()) as aged:
        await aged.store.put("k", "ann", "ann", MINUTE_MS)
        await aged.pass_ms(MINUTE_MS)
        await aged.store.put("k", "bob", "bob", MINUTE_MS)
        assert await aged.store.put("k", "ann", DONE, MINUTE_MS) == "bob"
        await aged.store.remove("k", "ann")
        assert await aged.store.put("k", "cid", "cid", MINUTE_MS) == "bob"


async def test_late_owner_marks_a_key_done_that_no_other_owner_has_claimed(
    url: str, namespaces: Names
) -> None:
    async with aging_store(url, namespaces()) as aged:
        await aged.store.put("k", "ann", "ann", MINUTE_MS)
        await aged.pass_ms(MINUTE_MS)
        assert await aged.store.put("k", "ann", DONE, MINUTE_MS) == DONE
        assert await aged.store.put("k", "bob", "bob", MINUTE_MS) == DONE


async def test_done_key_expires_when_its_own_time_is_over_and_not_before(
    url: str, namespaces: Names
) -> None:
    async with aging_store(url, namespaces()) as aged:
        await aged.store.put("k", "ann", "ann", MINUTE_MS)
        await aged.store.put("k", "ann", DONE, 10 * MINUTE_MS)
        await aged.store.remove("k", "ann")
        await aged.pass_ms(9 * MINUTE_MS)
        assert await aged.store.put("k", "ann", "ann", MINUTE_MS) == DONE
        await aged.pass_ms(MINUTE_MS)
        assert await aged.store.put("k", "bob", "bob", MINUTE_MS) == "bob"


async def test_released_key_can_be_claimed(url: str, namespaces: Names) -> None:
    async with aging_store(url, namespaces()) as aged:
        await aged.store.put("k", "ann", "ann", MINUTE_MS)
        await aged.store.remove("k", "bob")
        assert await aged.store.put("k", "bob", "bob", MINUTE_MS) == "ann"
        await aged.store.remove("k", "ann")
        await aged.store.remove("k", "ann")
        assert await aged.store.put("k", "bob", "bob", MINUTE_MS) == "bob"


async def test_one_of_many_concurrent_claims_is_granted(url: str, namespaces: Names) -> None:
    async with aging_store(url, namespaces()) as aged, asyncio.TaskGroup() as tasks:
        owners = [f"owner-{number}" for number in range(20)]
        puts = [tasks.create_task(aged.store.put("k", owner, owner, MINUTE_MS)) for owner in owners]
        answers = [await put for put in puts]
        assert len(set(answers)) == 1
        assert answers[0] in owners


async def test_namespaces_are_independent(shared_url: str, namespaces: Names) -> None:
    async with (
        aging_store(shared_url, namespaces()) as here,
        aging_store(shared_url, namespaces()) as aged,
    ):
        assert await here.store.put("k", "ann", "ann", MINUTE_MS) == "ann"
        assert await aged.store.put("k", "bob", "bob", MINUTE_MS) == "bob"
        await aged.store.remove("k", "ann")
        assert await here.store.put("k", "bob", "bob", MINUTE_MS) == "ann"


async def test_key_may_be_any_text(url: str, namespaces: Names) -> None:
    odd = "a b/%_'\";--\n{x}:*" + "ä" * 200
    async with aging_store(url, namespaces()) as aged:
        assert await aged.store.put(odd, "ann", "ann", MINUTE_MS) == "ann"
        assert await aged.store.put(odd[:-1], "bob", "bob", MINUTE_MS) == "bob"
        assert await aged.store.put(odd, "bob", "bob", MINUTE_MS) == "ann"


# ---- against a model


class Machine(RuleBasedStateMachine):
    """Calls a store, and compares its answers with those of a dictionary."""

    keys = st.sampled_from(["x", "y"])
    owners = st.sampled_from(["ann", "bob", "cid"])
    minutes = st.integers(1, 5)

    def __init__(self, url: str, namespace: str) -> None:
        super().__init__()
        self.runner, self.stack = asyncio.Runner(), AsyncExitStack()
        self.aged = self.runner.run(self.stack.enter_async_context(aging_store(url, namespace)))
        self.model: dict[str, tuple[str, int]] = {}
        self.now = 0

    @rule(key=keys, owner=owners, minutes=minutes, done=st.booleans())
    def put(self, key: str, owner: str, minutes: int, done: bool) -> None:
        value = DONE if done else owner
        if self.model.get(key, (owner, 0))[0] == owner:
            self.model[key] = value, self.now + minutes
        put = self.aged.store.put(key, owner, value, minutes * MINUTE_MS)
        assert self.runner.run(put) == self.model[key][0]

    @rule(key=keys, owner=owners)
    def remove(self, key: str, owner: str) -> None:
        if self.model.get(key, ("", 0))[0] == owner:
            del self.model[key]
        self.runner.run(self.aged.store.remove(key, owner))

    @rule(minutes=minutes)
    def time_passes(self, minutes: int) -> None:
        self.now += minutes
        self.model = {key: entry for key, entry in self.model.items() if entry[1] > self.now}
        self.runner.run(self.aged.pass_ms(minutes * MINUTE_MS))

    def teardown(self) -> None:
        self.runner.run(self.stack.aclose())
        self.runner.close()


def test_every_store_behaves_like_the_model(url: str, namespaces: Names) -> None:
    class OfThisUrl(Machine):
        def __init__(self) -> None:
            super().__init__(url, namespaces())

    run_state_machine_as_test(
        OfThisUrl,
        settings=settings(
            max_examples=100 if url == "memory:" else 15,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


# ---- single kinds of stores


async def test_claim_in_memory_expires_exactly_to_the_millisecond() -> None:
    clock = SetClock()
    store = MemoryStore(clock)
    await store.put("k", "ann", "ann", 100)
    clock.now_ms += 99
    assert await store.put("k", "bob", "bob", 100) == "ann"
    clock.now_ms += 1
    assert await store.put("k", "bob", "bob", 100) == "bob"


async def test_memory_store_deletes_expired_keys() -> None:
    clock = SetClock()
    store = MemoryStore(clock)
    for number in range(100):
        await store.put(str(number), "ann", DONE, 100)
    clock.now_ms += 100
    await store.put("last", "ann", DONE, 100)
    assert len(store) == 1


async def test_keys_in_redis_have_an_expiry(redis_url: str, namespaces: Names) -> None:
    name = namespaces()
    async with aging_store(redis_url, name) as aged, RedisStore(redis_url, name) as store:
        await aged.store.put("k", "ann", "ann", 10 * MINUTE_MS)
        left_ms = await store._redis.pttl(f"{name}:k")
        assert 9 * MINUTE_MS < left_ms <= 10 * MINUTE_MS


async def test_redis_store_does_not_close_a_client_of_the_caller(
    redis_url: str, namespaces: Names
) -> None:
    async with Redis.from_url(redis_url, decode_responses=True) as redis:
        async with RedisStore(redis, namespaces()) as store:
            assert await store.put("k", "ann", "ann", MINUTE_MS) == "ann"
            assert await store.put("k", "bob", "bob", MINUTE_MS) == "ann"
        assert await redis.ping()


@pytest.mark.parametrize(
    ("kind", "now_s"),
    [("sqlite", "strftime('%s', 'now')"), ("postgresql", "extract(epoch FROM now())")],
)
async def test_expiry_in_sql_follows_the_clock_of_the_database(
    kind: str, now_s: str, request: pytest.FixtureRequest, namespaces: Names
) -> None:
    url, name = request.getfixturevalue(f"{kind}_url"), namespaces()
    async with SqlStore(url, name) as store:
        await store.put("k", "ann", "ann", 10 * MINUTE_MS)
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        now_ms = 1_000 * int(connection.scalar(sa.text(f"SELECT {now_s}")))
        expires = sa.select(CLAIMS.c.expires_unix_ms).where(CLAIMS.c.namespace == name)
        left_ms = connection.scalars(expires).one() - now_ms
    engine.dispose()
    assert 9 * MINUTE_MS < left_ms <= 11 * MINUTE_MS


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_expired_rows_are_deleted_by_later_claims(
    kind: str, request: pytest.FixtureRequest, namespaces: Names
) -> None:
    url, name = request.getfixturevalue(f"{kind}_url"), namespaces()
    async with aging_store(url, name) as aged:
        assert isinstance(aged.store, SqlStore)
        await aged.store.purge()
        for number in range(10):
            await aged.store.put(f"old-{number}", "ann", DONE, MINUTE_MS)
        await aged.pass_ms(MINUTE_MS)
        await aged.store.put("live", "ann", DONE, 10 * MINUTE_MS)
        aged.store._until_purge = 1
        await aged.store.put("next", "ann", DONE, 10 * MINUTE_MS)
        engine = sa.create_engine(url)
        with engine.begin() as connection:
            keys = connection.scalars(sa.select(CLAIMS.c.key).where(CLAIMS.c.namespace == name))
            assert sorted(keys) == ["live", "next"]
        engine.dispose()
        assert aged.store._until_purge == PURGE_EVERY


async def test_cancelled_claim_in_sql_does_not_outlive_its_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of a cancelled call goes on, and writes when the database answers."""
    begun, answers, put = asyncio.Event(), threading.Event(), SqlStore._put
    loop = asyncio.get_running_loop()

    def slow(store: SqlStore, key: str, owner: str, value: str, keep_ms: int) -> str:
        loop.call_soon_threadsafe(begun.set)
        answers.wait()
        return put(store, key, owner, value, keep_ms)

    async with SqlStore(f"sqlite:///{tmp_path}/claims", "group") as store:
        monkeypatch.setattr(SqlStore, "_put", slow)
        async with asyncio.TaskGroup() as tasks:
            claim = tasks.create_task(store.put("k", "ann", "ann", MINUTE_MS))
            await begun.wait()
            claim.cancel()
            await asyncio.wait({claim})
            removal = tasks.create_task(store.remove("k", "ann"))
            await asyncio.wait({removal}, timeout=0.1)  # it would end by now if it did not wait
            answers.set()
            await removal
        assert not store._writing
        assert await store.put("k", "bob", "bob", MINUTE_MS) == "bob"


async def test_stores_that_start_at_once_share_one_table(shared_url: str) -> None:
    async def enter() -> None:
        async with aging_store(shared_url, "together") as aged:
            await aged.store.remove("k", "ann")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(8):
            tasks.create_task(enter())


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
        ("postgresql+psycopg_async://h/d", "an asynchronous driver"),
    ],
)
def test_engine_that_can_not_keep_claims_is_refused(url: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        SqlStore(url, "group")


@pytest.mark.parametrize(("driver", "quote"), [("sqlite", '"'), ("postgresql+psycopg", "")])
def test_put_is_one_statement_in_both_dialects(driver: str, quote: str) -> None:
    dialect = sa.create_mock_engine(f"{driver}://", lambda *_: None).dialect
    row = {"namespace": "n", "key": "k", "value": "v"}
    text = str(put_statement(dialect.name, row, "v", 5).compile(dialect=dialect))
    assert f"ON CONFLICT (namespace, {quote}key{quote}) DO UPDATE SET" in text
    assert "WHERE batonmq_claims.expires_unix_ms <= " in text
    locks = "SKIP LOCKED" in str(purge_statement(dialect.name).compile(dialect=dialect))
    assert locks == (dialect.name == "postgresql")
