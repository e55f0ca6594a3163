"""A store of claims in a table of SQLite or PostgreSQL: one row per claim."""

from __future__ import annotations

import asyncio
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from batonmq.errors import InvalidArgument

PURGE_EVERY = 1_000
"""Number of calls after which expired rows are deleted, at most twice as many."""

CLAIMS = sa.Table(
    "batonmq_claims",
    sa.MetaData(),
    sa.Column("namespace", sa.Text, primary_key=True),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
    sa.Column("expires_unix_ms", sa.BigInteger, nullable=False, index=True),
)

_NOW: dict[str, sa.ColumnElement[int]] = {
    "sqlite": sa.literal_column(
        "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)", sa.BigInteger
    ),
    "postgresql": sa.literal_column(
        "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT)", sa.BigInteger
    ),
}
"""Current time of the database, not of the client, in milliseconds since the Unix epoch."""


class SqlStore:
    """A `Store` in SQLite or PostgreSQL. Use it as an async context manager.

    The start of the block creates the table `batonmq_claims` if it does not exist. Calls run in
    threads, so the engine must be synchronous.

    Args:
        engine: `sqlite:///file` or `postgresql+psycopg://…`, or an engine of SQLAlchemy, which
            stays the caller's. SQLite needs a file: in memory, each thread has its own.
        namespace: A part of the primary key, such as the name of the group.

    Raises:
        InvalidArgument: The engine is asynchronous, in memory, or for another database.
    """

    def __init__(self, engine: str | sa.Engine, namespace: str) -> None:
        self._owned = isinstance(engine, str)
        made = sa.create_engine(engine) if isinstance(engine, str) else engine
        self._dialect = made.dialect.name
        problem = _problem(made)
        if problem:
            raise InvalidArgument(f"{made.url!r}: {problem}", facts={"field": "engine"})
        if self._dialect == "postgresql":
            made = made.execution_options(isolation_level="READ COMMITTED")
        self._engine, self._namespace = made, namespace
        self._writing: dict[tuple[str, str], asyncio.Future[str]] = {}
        self._until_purge = PURGE_EVERY

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._create)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._owned:
            await asyncio.to_thread(self._engine.dispose)

    async def put(self, key: str, owner: str, value: str, keep_ms: int) -> str:
        """See `Store.put`."""
        self._until_purge -= 1
        if self._until_purge <= 0:
            self._until_purge = PURGE_EVERY
            await self.purge()
        call = partial(copy_context().run, self._put, key, owner, value, keep_ms)
        writing = asyncio.get_running_loop().run_in_executor(None, call)
        self._writing[key, owner] = writing
        writing.add_done_callback(partial(self._written, (key, owner)))
        await asyncio.wait({writing})  # which does not cancel it
        return writing.result()

    async def remove(self, key: str, owner: str) -> None:
        """See `Store.remove`. A cancelled `put` still writes in its thread: this waits for it."""
        if (writing := self._writing.get((key, owner))) is not None:
            await asyncio.wait({writing})
        mine = sa.delete(CLAIMS).where(self._is(key), CLAIMS.c.value == owner)
        await asyncio.to_thread(self._run, mine)

    async def purge(self) -> int:
        """Delete expired rows of every namespace; `put` calls this regularly.

        Returns:
            The number of deleted rows, at most twice `PURGE_EVERY`.
        """
        return await asyncio.to_thread(self._run, purge_statement(self._dialect))

    def _written(self, claim: tuple[str, str], writing: asyncio.Future[str]) -> None:
        if self._writing.get(claim) is writing:
            del self._writing[claim]
        if not writing.cancelled():
            writing.exception()  # retrieved here, as the caller may be gone

    def _put(self, key: str, owner: str, value: str, keep_ms: int) -> str:
        row = {"namespace": self._namespace, "key": key, "value": value}
        write = put_statement(self._dialect, row, owner, keep_ms)
        with self._engine.begin() as connection:
            if connection.execute(write).rowcount == 1:
                return value
            # Same transaction: the previous statement has locked the row.
            stored = connection.execute(sa.select(CLAIMS.c.value).where(self._is(key)))
            return str(stored.scalar_one())

    def _run(self, statement: sa.Delete) -> int:
        with self._engine.begin() as connection:
            return connection.execute(statement).rowcount

    def _create(self) -> None:
        try:
            CLAIMS.metadata.create_all(self._engine)
        except sa.exc.DBAPIError:
            # If two processes create the table at the same time, one of them fails.
            if not sa.inspect(self._engine).has_table(CLAIMS.name):
                raise

    def _is(self, key: str) -> sa.ColumnElement[bool]:
        return sa.and_(CLAIMS.c.namespace == self._namespace, CLAIMS.c.key == key)


def put_statement(
    dialect: str, row: dict[str, Any], owner: str, keep_ms: int
) -> postgresql.Insert | sqlite.Insert:
    """Return a statement that writes `row`, unless the key has a live value other than `owner`."""
    now = _NOW[dialect]
    insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
    values: Any = insert(CLAIMS).values(row | {"expires_unix_ms": now + keep_ms})
    statement: postgresql.Insert | sqlite.Insert = values.on_conflict_do_update(
        index_elements=[CLAIMS.c.namespace, CLAIMS.c.key],
        # Not `excluded`: the time must be read after the wait for the row lock.
        set_={"value": row["value"], "expires_unix_ms": now + keep_ms},
        where=sa.or_(CLAIMS.c.expires_unix_ms <= now, CLAIMS.c.value == owner),
    )
    return statement


def purge_statement(dialect: str) -> sa.Delete:
    """Return a statement that deletes some expired rows; it skips locked rows."""
    over = (
        sa.select(CLAIMS.c.namespace, CLAIMS.c.key)
        .where(CLAIMS.c.expires_unix_ms <= _NOW[dialect])
        .limit(2 * PURGE_EVERY)
        .with_for_update(skip_locked=True)
    )
    return sa.delete(CLAIMS).where(sa.tuple_(CLAIMS.c.namespace, CLAIMS.c.key).in_(over))


def _problem(engine: sa.Engine) -> str:
    """Return why the engine can't be used; empty if it can."""
    if engine.dialect.is_async:
        return "an asynchronous driver; name a synchronous one, such as postgresql+psycopg"
    if engine.dialect.name not in _NOW:
        return "neither SQLite nor PostgreSQL"
    if engine.dialect.name == "sqlite" and engine.url.database in (None, "", ":memory:"):
        return "in memory; use MemoryStore, or a file"
    return ""
