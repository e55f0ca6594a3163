"""The takeover of a new leader: locks from etcd, tokens from offsets (protocol section 12).

A lock from etcd is confirmed once the replica set that keeps its group knows this term and has told
the token in force. Until then its entry is pending, like one that is being handed over: its lease
is not renewed, and the queue is not granted. So a replica set that does not answer delays its own
groups only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from batonmq._common.aio import in_steps
from batonmq._core.queues import GroupQueue
from batonmq.errors import BatonError, OldEpoch
from batonmq_server.lockmgr.core.lock_entry import LockRecord
from batonmq_server.lockmgr.lock_store import BACKOFF
from batonmq_server.lockmgr.term import Term

log = logging.getLogger(__name__)


class Takeover:
    """Confirms the locks that were loaded from etcd.

    Args:
        loaded: Locks with their modification revisions.
    """

    def __init__(self, term: Term, loaded: Sequence[tuple[GroupQueue, LockRecord, int]]) -> None:
        self._term, self._loaded = term, loaded
        self._unconfirmed: dict[GroupQueue, None] = {}  # in the order in which they were loaded

    async def begin(self) -> None:
        """Put the locks into the table, and announce the term to every replica set once.

        The locks of the sets that answer are confirmed. Nothing else uses the table yet.
        """
        async for key, lock, revision in in_steps(self._loaded):
            self._term.table.load(key, lock, revision, self._term.now_ms())
            self._unconfirmed[key] = None
        await self._announce(self._term.offsets.sets(), lambda _: None)

    async def run(self, on_confirmed: Callable[[GroupQueue], None]) -> None:
        """Repeat the announcement until every lock is confirmed.

        Args:
            on_confirmed: Called for each lock.
        """
        tries = 0
        while self._unconfirmed:
            await asyncio.sleep(BACKOFF.delay_ms(tries, self._term.random) / 1000)
            await self._announce(frozenset(), on_confirmed)
            tries += 1

    async def _announce(
        self, also: frozenset[str], on_confirmed: Callable[[GroupQueue], None]
    ) -> None:
        """Announce to the sets with unconfirmed locks, and to those of `also`."""
        by_set: dict[str, list[GroupQueue]] = defaultdict(list, {name: [] for name in sorted(also)})
        async for key in in_steps(list(self._unconfirmed)):
            by_set[self._term.offsets.set_of(key.group)].append(key)
        async with asyncio.TaskGroup() as tasks:
            for name, keys in by_set.items():
                tasks.create_task(self._confirm(name, keys, on_confirmed))

    async def _confirm(
        self, name: str, keys: Sequence[GroupQueue], on_confirmed: Callable[[GroupQueue], None]
    ) -> None:
        try:
            tokens = await self._term.offsets.announce(name)
            async for key in in_steps(keys):
                token = await self._token(name, key, tokens)
                if token is not None:
                    self._term.table.confirm(key, token, self._term.now_ms())
                    del self._unconfirmed[key]
                    on_confirmed(key)
        except OldEpoch as error:
            log.error("offsets knows a newer term set=%s error=%s", name, error)
        except BatonError as error:
            log.warning("takeover delayed set=%s locks=%d error=%s", name, len(keys), error)

    async def _token(
        self, name: str, key: GroupQueue, tokens: Mapping[GroupQueue, int]
    ) -> int | None:
        """Return the token in force; None if the set `name` does not keep the group any more.

        A queue that the set did not list has no token, or its group is being moved to another set.
        """
        if key in tokens:
            return tokens[key]
        observation = await self._term.offsets.observe(key)
        return observation.token if self._term.offsets.set_of(key.group) == name else None
