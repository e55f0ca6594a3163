"""Every kind of store, and a way to let its time pass."""

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
    """Shows what it is set to."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000

    def monotonic_ms(self) -> int:
        return self.now_ms


@dataclass(frozen=True, slots=True)
class Place:
    """A store.

    Attributes:
        pass_ms: Brings everything in the store so much nearer to its expiry.
    """

    store: Store
    pass_ms: Callable[[int], Coroutine[Any, Any, None]]


@asynccontextmanager
async def place(url: str, namespace: str) -> AsyncIterator[Place]:
    """A store by its URL; `memory:` is one too."""
    if url == "memory:":
        yield _in_memory()
    elif url.startswith(("sqlite", "postgresql")):
        async with SqlStore(url, namespace) as rows:
            yield Place(rows, lambda ms: _age_rows(url, namespace, ms))
    else:
        async with RedisStore(url, namespace) as keys:
            yield Place(keys, lambda ms: _age_keys(url, namespace, ms))


def _in_memory() -> Place:
    clock = SetClock()

    async def pass_ms(ms: int) -> None:
        clock.now_ms += ms

    return Place(MemoryStore(clock), pass_ms)


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
            # Redis deletes a key at once whose time to live is not positive.
            await redis.pexpire(key, left_ms - ms)
