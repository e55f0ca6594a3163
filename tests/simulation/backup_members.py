"""The members of the groups in a run of backups, at the first and at the second cluster."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq_server.testing import MemoryBroker
from tests.simulation.backup_ledger import ORDERS, BackupRun, attempts
from tests.simulation.member_processes import MemberProcesses

MEMBERS = 2


def members_of(run: BackupRun, broker: MemoryBroker, group: str, *, again: bool) -> MemberProcesses:
    """Return the members of a group, at the first cluster or `again` at the second one."""
    settings = ConsumerSettings(
        consume_from="first",
        queue_concurrency=4,
        pull_messages_max=20,
        commit_interval_ms=1_000,
        keep_alive_ms=2_000,
        drain_timeout_ms=2_000,
        retries_max=1,
    )
    handled = run.handled_again if again else run.handled
    handled[group] = set()
    if again:
        run.again[group] = Counter()

    async def work(consumer: Consumer, draws: Random) -> None:
        async def handle(message: ReceivedMessage) -> None:
            number = int(message.body)
            if again:
                run.again[group][message.queue, message.offset] += 1
            await asyncio.sleep(draws.choice((0, 0, 0.01, 0.2, 1)) * draws.random())
            if number % 10 == 3 and not attempts(message):
                run.counts["sent back"] += 1
                raise RuntimeError(f"{number} fails once")
            if number % 40 == 5:
                raise RuntimeError(f"{number} fails always")
            handled[group].add(number)

        await consumer.run(handle)

    return MemberProcesses(
        broker,
        seed=f"{run.seed}/{again}",
        group=group,
        topic=ORDERS,
        settings=settings,
        usual_count=MEMBERS,
        run=work,
    )
