"""Goal: every store keeps the contract of `Store`: one holder of a key, until its time is over.

Method: the same tests on memory, a real Redis, a SQLite file and a real PostgreSQL; random runs
against a dictionary. Time is made to pass in the store: what is there is brought nearer to its
expiry. Steps are minutes, so that the seconds a run takes do not matter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

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
from tests.idempotence.stores import SetClock, place

MINUTE_MS = 60_000
Names = Callable[[], str]


async def test_a_free_key_is_taken_and_kept_from_others(url: str, namespaces: Names) -> None:
    async with place(url, namespaces()) as there:
        assert await there.store.put("k", "ann", "ann", MINUTE_MS) == "ann"
        assert await there.store.put("k", "bob", "bob", MINUTE_MS) == "ann"
        assert await there.store.put("other", "bob", "bob", MINUTE_MS) == "bob"


async def test_a_repeated_claim_of_the_same_owner_is_granted(url: str, namespaces: Names) -> None:
    async with place(url, namespaces()) as there:
        for _ in range(2):
            assert await there.store.put("k", "ann", "ann", MINUTE_MS) == "ann"


async def test_a_claim_expires_not_before_its_time(url: str, namespaces: Names) -> None:
    async with place(url, namespaces()) as there:
        await there.store.put("k", "ann", "ann", 10 * MINUTE_MS)
        await there.pass_ms(9 * MINUTE_MS)
        assert await there.store.put("k", "bob", "bob", MINUTE_MS) == "ann"
        await there.pass_ms(MINUTE_MS)
        assert await there.store.put("k", "bob", "bob", MINUTE_MS) == "bob"


async def test_done_by_a_late_owner_is_refused_while_another_has_a_claim(
    url: str, namespaces: Names
) -> None:
    async with place(url, namespaces()) as there:
        await there.store.put("k", "ann", "ann", MINUTE_MS)
        await there.pass_ms(MINUTE_MS)
        await there.store.put("k", "bob", "bob", MINUTE_MS)
        assert await there.store.put("k", "ann", DONE, MINUTE_MS) == "bob"
        await there.store.remove("k", "ann")
        assert await there.store.put("k", "cid", "cid", MINUTE_MS) == "bob"


async def test_done_by_a_late_owner_counts_if_nobody_else_came(url: str, namespaces: Names) -> None:
    async with place(url, namespaces()) as there:
        await there.store.put("k", "ann", "ann", MINUTE_MS)
        await there.pass_ms(MINUTE_MS)
        assert await there.store.put("k", "ann", DONE, MINUTE_MS) == DONE
        assert await there.store.put("k", "bob", "bob", MINUTE_MS) == DONE


async def test_done_stays_done_until_its_own_time_is_over(url: str, namespaces: Names) -> None:
    async with place(url, namespaces()) as there:
        await there.store.put("k", "ann", "ann", MINUTE_MS)
        await there.store.put("k", "ann", DONE, 10 * MINUTE_MS)
        await there.store.remove("k", "ann")
        await there.pass_ms(9 * MINUTE_MS)
        assert await there.store.put("k", "ann", "ann", MINUTE_MS) == DONE
        await there.pass_ms(MINUTE_MS)
        assert await there.store.put("k", "bob", "bob", MINUTE_MS) == "bob"


async def test_a_released_key_is_free(url: str, namespaces: Names) -> None:
    async with place(url, namespaces()) as there:
        await there.store.put("k", "ann", "ann", MINUTE_MS)
        await there.store.remove("k", "bob")
        assert await there.store.put("k", "bob", "bob", MINUTE_MS) == "ann"
        await there.store.remove("k", "ann")
        await there.store.remove("k", "ann")
        assert await there.store.put("k", "bob", "bob", MINUTE_MS) == "bob"


async def test_of_many_at_once_one_gets_the_key(url: str, namespaces: Names) -> None:
    async with place(url, namespaces()) as there, asyncio.TaskGroup() as tasks:
        owners = [f"owner-{number}" for number in range(20)]
        puts = [
            tasks.create_task(there.store.put("k", owner, owner, MINUTE_MS)) for owner in owners
        ]
        answers = [await put for put in puts]
        assert len(set(answers)) == 1
        assert answers[0] in owners


async def test_namespaces_do_not_meet(shared_url: str, namespaces: Names) -> None:
    async with place(shared_url, namespaces()) as here, place(shared_url, namespaces()) as there:
        assert await here.store.put("k", "ann", "ann", MINUTE_MS) == "ann"
        assert await there.store.put("k", "bob", "bob", MINUTE_MS) == "bob"
        await there.store.remove("k", "ann")
        assert await here.store.put("k", "bob", "bob", MINUTE_MS) == "ann"


async def test_a_key_may_be_any_text(url: str, namespaces: Names) -> None:
    odd = "a b/%_'\";--\n{x}:*" + "ä" * 200
    async with place(url, namespaces()) as there:
        assert await there.store.put(odd, "ann", "ann", MINUTE_MS) == "ann"
        assert await there.store.put(odd[:-1], "bob", "bob", MINUTE_MS) == "bob"
        assert await there.store.put(odd, "bob", "bob", MINUTE_MS) == "ann"


# ---- against a model


class Machine(RuleBasedStateMachine):
    """A store and a dictionary are asked the same."""

    keys = st.sampled_from(["x", "y"])
    owners = st.sampled_from(["ann", "bob", "cid"])
    minutes = st.integers(1, 5)

    def __init__(self, url: str, namespace: str) -> None:
        super().__init__()
        self.runner, self.stack = asyncio.Runner(), AsyncExitStack()
        self.there = self.runner.run(self.stack.enter_async_context(place(url, namespace)))
        self.model: dict[str, tuple[str, int]] = {}
        self.now = 0

    @rule(key=keys, owner=owners, minutes=minutes, done=st.booleans())
    def put(self, key: str, owner: str, minutes: int, done: bool) -> None:
        value = DONE if done else owner
        if self.model.get(key, (owner, 0))[0] == owner:
            self.model[key] = value, self.now + minutes
        put = self.there.store.put(key, owner, value, minutes * MINUTE_MS)
        assert self.runner.run(put) == self.model[key][0]

    @rule(key=keys, owner=owners)
    def remove(self, key: str, owner: str) -> None:
        if self.model.get(key, ("", 0))[0] == owner:
            del self.model[key]
        self.runner.run(self.there.store.remove(key, owner))

    @rule(minutes=minutes)
    def time_passes(self, minutes: int) -> None:
        self.now += minutes
        self.model = {key: there for key, there in self.model.items() if there[1] > self.now}
        self.runner.run(self.there.pass_ms(minutes * MINUTE_MS))

    def teardown(self) -> None:
        self.runner.run(self.stack.aclose())
        self.runner.close()


def test_every_store_does_as_the_model_does(url: str, namespaces: Names) -> None:
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


# ---- each by itself


async def test_memory_lets_a_claim_expire_to_the_millisecond() -> None:
    clock = SetClock()
    store = MemoryStore(clock)
    await store.put("k", "ann", "ann", 100)
    clock.now_ms += 99
    assert await store.put("k", "bob", "bob", 100) == "ann"
    clock.now_ms += 1
    assert await store.put("k", "bob", "bob", 100) == "bob"


async def test_memory_forgets_what_has_expired() -> None:
    clock = SetClock()
    store = MemoryStore(clock)
    for number in range(100):
        await store.put(str(number), "ann", DONE, 100)
    clock.now_ms += 100
    await store.put("last", "ann", DONE, 100)
    assert len(store) == 1


async def test_redis_itself_lets_keys_expire(redis_url: str, namespaces: Names) -> None:
    name = namespaces()
    async with place(redis_url, name) as there, RedisStore(redis_url, name) as store:
        await there.store.put("k", "ann", "ann", 10 * MINUTE_MS)
        left_ms = await store._redis.pttl(f"{name}:k")
        assert 9 * MINUTE_MS < left_ms <= 10 * MINUTE_MS


async def test_redis_store_leaves_a_client_of_the_user_open(
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
async def test_expiry_in_sql_is_by_the_clock_of_the_database(
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
async def test_rows_that_have_expired_are_deleted_on_the_way(
    kind: str, request: pytest.FixtureRequest, namespaces: Names
) -> None:
    url, name = request.getfixturevalue(f"{kind}_url"), namespaces()
    async with place(url, name) as there:
        assert isinstance(there.store, SqlStore)
        await there.store.purge()
        for number in range(10):
            await there.store.put(f"old-{number}", "ann", DONE, MINUTE_MS)
        await there.pass_ms(MINUTE_MS)
        await there.store.put("live", "ann", DONE, 10 * MINUTE_MS)
        there.store._until_purge = 1
        await there.store.put("next", "ann", DONE, 10 * MINUTE_MS)
        engine = sa.create_engine(url)
        with engine.begin() as connection:
            keys = connection.scalars(sa.select(CLAIMS.c.key).where(CLAIMS.c.namespace == name))
            assert sorted(keys) == ["live", "next"]
        engine.dispose()
        assert there.store._until_purge == PURGE_EVERY


async def test_stores_that_start_together_make_one_table(shared_url: str) -> None:
    async def enter() -> None:
        async with place(shared_url, "together") as there:
            await there.store.remove("k", "ann")

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
def test_engines_that_can_not_keep_claims_are_refused(url: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        SqlStore(url, "group")


@pytest.mark.parametrize(("driver", "quote"), [("sqlite", '"'), ("postgresql+psycopg", "")])
def test_a_put_is_one_statement_in_both_dialects(driver: str, quote: str) -> None:
    dialect = sa.create_mock_engine(f"{driver}://", lambda *_: None).dialect
    row = {"namespace": "n", "key": "k", "value": "v"}
    text = str(put_statement(dialect.name, row, "v", 5).compile(dialect=dialect))
    assert f"ON CONFLICT (namespace, {quote}key{quote}) DO UPDATE SET" in text
    assert "WHERE batonmq_claims.expires_unix_ms <= " in text
    locks = "SKIP LOCKED" in str(purge_statement(dialect.name).compile(dialect=dialect))
    assert locks == (dialect.name == "postgresql")
