"""A store of claims in Redis: one key per claim, with an expiry."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from redis.asyncio import Redis

_PUT = """
local there = redis.call('GET', KEYS[1])
if there and there ~= ARGV[1] then return there end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return ARGV[2]
"""

_REMOVE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""


class RedisStore:
    """A `Store` in Redis 6.2 or later. Use it as an async context manager.

    Expiry uses the clock of the Redis server. Claims are as durable as the server: if a failover
    or a restart loses a key, or `maxmemory-policy` evicts it, the message may be handled again.

    Args:
        redis: `redis://…` or `rediss://…`, or a client of `redis.asyncio`, which stays the
            caller's.
        namespace: Prefix of the keys, such as the name of the group: `namespace:key`.
    """

    def __init__(self, redis: str | Redis, namespace: str) -> None:
        self._owned = isinstance(redis, str)
        self._redis = Redis.from_url(redis) if isinstance(redis, str) else redis
        self._namespace = namespace
        self._put = self._redis.register_script(_PUT)
        self._remove = self._redis.register_script(_REMOVE)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._owned:
            await self._redis.aclose()

    async def put(self, key: str, owner: str, value: str, keep_ms: int) -> str:
        """See `Store.put`."""
        stored = await self._put(keys=[self._key(key)], args=[owner, value, keep_ms])
        return stored.decode() if isinstance(stored, bytes) else str(stored)

    async def remove(self, key: str, owner: str) -> None:
        """See `Store.remove`."""
        await self._remove(keys=[self._key(key)], args=[owner])

    def _key(self, key: str) -> str:
        return f"{self._namespace}:{key}"
