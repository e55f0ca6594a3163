"""What an operator reads of a cluster, in a form that two clusters can be compared by."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import astuple
from functools import partial
from typing import TypeVar

from batonmq._core.names import is_system_topic
from batonmq._core.queues import QueueRef
from batonmq.admin.access import AccessControl
from batonmq.admin.admin import Admin
from batonmq.admin.quotas import Quotas
from batonmq.admin.reports import Topic, queue_from_pb
from batonmq.errors import BatonError, GroupNotFound, Retry, Unreachable
from tests.simulation.backup_ledger import Extents, Progress, Settings

T = TypeVar("T")


async def repeated(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call until it is answered, or fails for good."""
    while True:
        try:
            return await call()
        except BatonError as error:
            if error.retry is Retry.NEVER:
                raise
            await asyncio.sleep(0.2)


async def user_topics(admin: Admin) -> list[Topic]:
    """Return the topics that do not belong to the cluster itself."""
    topics = await repeated(admin.list_topics)
    return [one for one in topics if not is_system_topic(one.name)]


def settings_of_topics(topics: list[Topic]) -> Settings:
    """Return what a restored topic must have like the first one."""
    return {
        one.name: (
            one.permission,
            one.message_type,
            one.retention_ms,
            one.retention_bytes,
            one.inherited,
            None if one.compaction is None else astuple(one.compaction),
        )
        for one in topics
    }


async def settings_of_groups(admin: Admin) -> Settings:
    """Return what a restored group must have like the first one."""
    return {
        one.name: (
            one.policy,
            one.ownership,
            one.strategy,
            (one.pause.by, one.pause.reason) if one.pause else None,
        )
        for one in await repeated(admin.list_groups)
    }


async def progress_of(admin: Admin, groups: list[str]) -> Progress:
    """Return the offsets that count as handled."""
    progress: dict[str, dict[QueueRef, frozenset[int]]] = {}
    for group in groups:
        try:
            found = await repeated(partial(admin.progress, group))
        except GroupNotFound:
            continue
        progress[group] = {
            queue_from_pb(one.queue.queue): frozenset(
                offset
                for first, end in (
                    (0, one.committed_offset),
                    *((part.first_offset, part.next_offset) for part in one.acked),
                )
                for offset in range(first, end)
            )
            for one in found
        }
    return progress


async def extents_of(admin: Admin, topics: list[Topic]) -> Extents:
    """Return first and next offset of all queues; without those of a topic that is deleted."""
    queues = [queue for topic in topics for queue in topic.queues]

    async def read() -> Extents:
        extents, problems = await admin.extents(queues)
        if problems:
            raise Unreachable("; ".join(problems))
        return extents

    return await repeated(read)


async def access_of(admin: Admin) -> object:
    """Return grants, blocks and quotas."""
    control = AccessControl(admin)
    identities = await repeated(control.list)
    return (
        sorted((one.identity, sorted(map(str, one.grants))) for one in identities if one.grants),
        sorted((one.subject, one.reason) for one in await repeated(control.blocks)),
        sorted((one.identity, astuple(one.limits)) for one in await repeated(Quotas(admin).list)),
    )
