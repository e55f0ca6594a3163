"""Handlers that skip messages which were handled before, by marks in a database.

from batonmq.idempotence import RedisStore, idempotent

async with RedisStore("redis://127.0.0.1", "billing") as store:
    await consumer.run(idempotent(book, store, claim_ms=60_000, done_ms=7 * 86_400_000))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batonmq.idempotence.idempotent_handler import by_key, by_origin, idempotent
    from batonmq.idempotence.memory_store import MemoryStore
    from batonmq.idempotence.redis_store import RedisStore
    from batonmq.idempotence.sql_store import SqlStore
    from batonmq.idempotence.store import Store

__all__ = [
    "MemoryStore",
    "RedisStore",
    "SqlStore",
    "Store",
    "by_key",
    "by_origin",
    "idempotent",
]

_HOMES = {
    "MemoryStore": "batonmq.idempotence.memory_store",
    "RedisStore": "batonmq.idempotence.redis_store",
    "SqlStore": "batonmq.idempotence.sql_store",
    "Store": "batonmq.idempotence.store",
    "by_key": "batonmq.idempotence.idempotent_handler",
    "by_origin": "batonmq.idempotence.idempotent_handler",
    "idempotent": "batonmq.idempotence.idempotent_handler",
}

_EXTRAS = {"redis": "redis", "sqlalchemy": "sql"}


def __getattr__(name: str) -> object:
    """Load a public name when it is first used: a store's packages are optional.

    Raises:
        ImportError: the store's package is not installed; it names the extra that brings it.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'batonmq.idempotence' has no attribute {name!r}")
    try:
        home = importlib.import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        remedy = f"pip install 'batonmq[{_EXTRAS[package]}]'"
        raise ImportError(f"{name} needs the package {package}: {remedy}") from error
    return getattr(home, name)
