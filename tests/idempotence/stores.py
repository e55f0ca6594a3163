"""Stores of every kind whose entries a test can age."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from redis.asyncio import Redis

from batonmq._common.clock import Clock
from batonmq.idempotence import MemoryStore, RedisStore, SqlStore, Store
from batonmq.idempotence.sql_store import CLAIMS


class SetClock(Clock):
    """A clock that shows the time that the test sets."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000

    def monotonic_ms(self) -> int:
        return self.now_ms


@dataclass(frozen=True, slots=True)
class AgingStore:
    """A store whose entries can be aged.

    Attributes:
        pass_ms: Moves the expiry of every entry that many milliseconds nearer.
    """

    store: Store
    pass_ms: Callable[[int], Coroutine[Any, Any, None]]


@asynccontextmanager
async def aging_store(url: str, namespace: str) -> AsyncIterator[AgingStore]:
    """Open the store of a URL; `memory:` is a store in memory."""
    if url == "memory:":
        yield _in_memory()
    elif url.startswith(("sqlite", "postgresql")):
        async with SqlStore(url, namespace) as rows:
            yield AgingStore(rows, lambda ms: _age_rows(url, namespace, ms))
    else:
        async with RedisStore(url, namespace) as keys:
            yield AgingStore(keys, lambda ms: _age_keys(url, namespace, ms))


def _in_memory() -> AgingStore:
    clock = SetClock()

    async def pass_ms(ms: int) -> None:
        clock.now_ms += ms

    return AgingStore(MemoryStore(clock), pass_ms)


async def _age_rows(url: str, namespace: str, ms: int) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        older = {CLAIMS.c.expires_unix_ms: CLAIMS.c.expires_unix_ms - ms}
        connection.execute(sa.update(CLAIMS).where(CLAIMS.c.namespace == namespace).values(older))
    engine.dispose()


async def _age_keys(url: str, namespace: str, ms: int) -> None:
    async with Redis.from_url(url) as redis:
        async for key in redis.scan_iter(f"{namespace}:*"):
            left_ms = await redis.pttl(key)
            # Redis deletes a key whose new time to live is not positive.
            await redis.pexpire(key, left_ms - ms)
