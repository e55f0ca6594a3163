"""What a new leader takes over: locks from etcd, tokens from offsets (protocol section 12).

A lock that was found in etcd counts once the set that keeps its group knows this term, and has
told the token in force. Until then it is as if it were changing hands: nobody is renewed, nobody is
given the queue. So a set that does not answer holds up its own groups, and no others.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from batonmq._core.queues import GroupQueue
from batonmq.errors import BatonError, OldEpoch
from batonmq_server.lockmgr.core.lock_entry import LockRecord
from batonmq_server.lockmgr.handover import Term
from batonmq_server.lockmgr.lock_store import BACKOFF

log = logging.getLogger(__name__)


class Takeover:
    """The locks that are not confirmed yet."""

    def __init__(self, term: Term, found: Sequence[tuple[GroupQueue, LockRecord, int]]) -> None:
        self._term, self._waiting = term, {key for key, _, _ in found}
        for key, lock, revision in found:
            term.table.load(key, lock, revision, self._now_ms())

    async def begin(self) -> None:
        """Announce the term to every set, once; what is answered by then is confirmed."""
        await self._round(self._term.offsets.sets(), lambda _: None)

    async def run(self, settled: Callable[[GroupQueue], None]) -> None:
        """Go on until every lock is confirmed.

        Args:
            settled: Told of each.
        """
        tries = 0
        while self._waiting:
            await asyncio.sleep(BACKOFF.delay_ms(tries, self._term.random) / 1000)
            await self._round(frozenset(), settled)
            tries += 1

    async def _round(self, also: frozenset[str], settled: Callable[[GroupQueue], None]) -> None:
        by_set: dict[str, list[GroupQueue]] = defaultdict(list, {name: [] for name in sorted(also)})
        for key in sorted(self._waiting):
            by_set[self._term.offsets.set_of(key.group)].append(key)
        async with asyncio.TaskGroup() as tasks:
            for name, keys in by_set.items():
                tasks.create_task(self._ask(name, keys, settled))

    async def _ask(
        self, name: str, keys: Sequence[GroupQueue], settled: Callable[[GroupQueue], None]
    ) -> None:
        try:
            tokens = await self._term.offsets.announce(name)
            for key in keys:
                token = await self._token(name, key, tokens)
                if token is not None:
                    self._term.table.confirm(key, token, self._now_ms())
                    self._waiting.remove(key)
                    settled(key)
        except OldEpoch as error:
            log.error("offsets knows a newer leader set=%s error=%s", name, error)
        except BatonError as error:
            log.warning("taking over waits set=%s locks=%d error=%s", name, len(keys), error)

    async def _token(
        self, name: str, key: GroupQueue, tokens: Mapping[GroupQueue, int]
    ) -> int | None:
        """The token in force; None if that set, which knows this term, does not keep the group.

        What a set does not tell of has no token, or is on its way from one set to another.
        """
        if key in tokens:
            return tokens[key]
        seen = await self._term.offsets.observe(key)
        return seen.token if self._term.offsets.set_of(key.group) == name else None

    def _now_ms(self) -> int:
        return self._term.clock.monotonic_ms()
