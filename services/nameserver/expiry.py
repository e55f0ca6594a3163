"""Takes members whose lease has ended out of their groups.

Every replica does it; the first wins, the others find nothing left to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from random import Random

from batonmq.common.backoff import Backoff
from batonmq.common.errors import NoQuorum, Overloaded
from services.nameserver.catalog import Catalog
from services.nameserver.store import Store
from services.nameserver.telemetry import Telemetry

log = logging.getLogger(__name__)

_BACKOFF = Backoff(first_ms=100, delay_ms_max=2_000)


class Expiry:
    """Watches live keys vanish.

    Args:
        sweep_ms: All groups are compared with the live keys at the start and at least so often,
            for what happened while this replica was away.
    """

    def __init__(
        self, catalog: Catalog, store: Store, telemetry: Telemetry, random: Random, *, sweep_ms: int
    ) -> None:
        self._catalog, self._store, self._telemetry = catalog, store, telemetry
        self._random, self._sweep_ms = random, sweep_ms
        self._suspects: set[str] = set()
        self._noticed = asyncio.Event()
        catalog.live.on_change.append(self._live_changed)

    async def run(self) -> None:
        """Expire for ever; to be run as one task."""
        await self._catalog.ready()
        while True:
            self._noticed.clear()
            self._suspects |= self._sweep()
            await self._expire_suspects()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._sweep_ms / 1000):
                    await self._noticed.wait()

    def _live_changed(self, keys: frozenset[str]) -> None:
        gone = {key.partition("/")[0] for key in keys if key not in self._catalog.live.values}
        if gone:
            self._suspects |= gone
            self._noticed.set()

    def _sweep(self) -> set[str]:
        live = self._catalog.live.values
        return {
            name
            for name, group in self._catalog.groups.items()
            if any(f"{name}/{member.client_id}" not in live for member in group.members)
        }

    async def _expire_suspects(self) -> None:
        failures = 0
        while self._suspects:
            group = self._suspects.pop()
            try:
                await self._expire(group)
                failures = 0
            except (NoQuorum, Overloaded) as error:
                log.warning("members not expired yet group=%s error=%s", group, error)
                self._suspects.add(group)
                await asyncio.sleep(_BACKOFF.delay_ms(failures, self._random) / 1000)
                failures += 1

    async def _expire(self, group: str) -> None:
        change = await self._store.expire(group)
        self._telemetry.group_changed(change)
        if change.group is not None and change.expired:
            log.warning(
                "members expired group=%s generation=%d members=%s",
                group,
                change.group.generation,
                ",".join(f"{m.client_id}@{m.host}" for m in change.expired),
            )
