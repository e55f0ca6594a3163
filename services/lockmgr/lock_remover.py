"""Removes the locks of queues whose progress was deleted, and frees those of owners that are gone
(protocol section 5)."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from batonmq._common.aio import in_steps
from batonmq._core.queues import GroupQueue
from batonmq.errors import BatonError, NotLeader
from batonmq_server.lockmgr.core.decision import is_abandoned, is_removable, is_unused
from batonmq_server.lockmgr.core.lock_entry import ChangeStep, LockEntry, Observation
from batonmq_server.lockmgr.entry_changes import EntryChanges
from batonmq_server.lockmgr.group_membership import GroupMembership
from batonmq_server.lockmgr.ownerless_write import write_ownerless
from batonmq_server.lockmgr.queue_notifier import QueueNotifier
from batonmq_server.lockmgr.queue_observer import QueueObserver
from batonmq_server.lockmgr.queue_releaser import QueueReleaser
from batonmq_server.lockmgr.term import Term

log = logging.getLogger(__name__)

INTERVAL_S = 600.0
_QUEUES_MAX = 1_024
"""Queues that are observed together."""


class LockRemover:
    """Removes and frees locks of one term. A removal is a change of the entry, as a release is."""

    def __init__(
        self,
        term: Term,
        members: GroupMembership,
        observer: QueueObserver,
        notifier: QueueNotifier,
        changes: EntryChanges,
        releaser: QueueReleaser,
    ) -> None:
        self._term, self._table, self._members = term, term.table, members
        self._observer, self._notifier, self._changes = observer, notifier, changes
        self._releaser = releaser

    async def run(self) -> None:
        """Observe the unused queues at offsets every 10 minutes, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            now_ms, policy = self._term.now_ms(), self._term.policy
            keys = [
                entry.key
                async for entry in in_steps(self._table.stored())
                if is_unused(entry, now_ms, policy)
            ]
            try:
                for first in range(0, len(keys), _QUEUES_MAX):
                    await self._observe(keys[first : first + _QUEUES_MAX])
            except NotLeader:
                return  # the term is ending, and cancels this task in its next step

    async def _observe(self, keys: list[GroupQueue]) -> None:
        observations = await self._observer.observe_all(keys)
        failed = 0
        for key, observation in zip(keys, observations, strict=True):
            if isinstance(observation, BatonError):
                failed += 1
            else:
                self._remove_or_free(key, observation)
        if failed:
            log.info("unused locks not looked at queues=%d", failed)

    def _remove_or_free(self, key: GroupQueue, observation: Observation) -> None:
        entry, now_ms, policy = self._table.get(key), self._term.now_ms(), self._term.policy
        if entry is None:
            return
        if is_removable(entry, observation, now_ms, policy):
            self._table.begin_change(key, ChangeStep.RELEASE)
            self._changes.start(key, partial(self._remove, entry))
        elif is_abandoned(entry, now_ms, policy) and self._members.assigns_to_none(key):
            self._releaser.clear(key, observation)

    async def _remove(self, entry: LockEntry) -> None:
        """Remove a marked entry from etcd."""
        if await write_ownerless(self._term, entry, None):
            self._notifier.change_ended(entry.key)
            log.info("lock removed, its progress was deleted key=%s", entry.key)
