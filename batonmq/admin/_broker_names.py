"""The brokers that a report about all brokers asks."""

from __future__ import annotations

from batonmq.admin.admin import Admin


async def broker_names(admin: Admin) -> list[str]:
    """Return the names of all brokers, ascending.

    These are the registered ones and those with queues: a broker that starts again is not
    registered for a moment, and a report without it would seem complete.

    Raises:
        Unreachable: No nameserver responds.
    """
    names = set(await admin.directory.brokers())
    for topic in await admin.list_topics():
        names |= topic.queue_counts.keys()
    return sorted(names)
