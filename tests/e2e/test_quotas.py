"""Goal: a tenant beyond its quota waits, loses nothing and gets its rate; producer and consumer.

Method: a real cluster with TLS and access control; quotas set by the administrator.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from batonmq import (
    Admin,
    Consumer,
    ConsumerSettings,
    Message,
    Producer,
    ProducerSettings,
    ReceivedMessage,
)
from batonmq.admin.access import AccessControl, Role, RoleGrant
from batonmq.admin.quotas import QuotaLimits, Quotas
from tests.e2e.test_access import as_token, guarded, security_of, sent
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

TOPIC, GROUP = "orders", "billing"
RATE, BODY, COUNT = 40_000, bytes(10_000), 24
LEAST_S = COUNT * len(BODY) / RATE - 2.5
"""A second's worth is in the bucket, and the last answer, of up to as much, is a debt."""


@pytest.mark.long
async def test_producer_and_consumer_wait_for_their_quota_and_fail_nothing(
    tmp_path: Path,
) -> None:
    async with (
        guarded(tmp_path) as cluster,
        Admin(cluster.nameserver, security=security_of(cluster)) as admin,
    ):
        control, loop = AccessControl(admin), asyncio.get_running_loop()
        await admin.create_topic(TOPIC, 1)
        tenant = await as_token(cluster, control, "tenant")
        for grant in (
            RoleGrant(Role.ADMIN, f"topic:{TOPIC}"),
            RoleGrant(Role.CONSUME, f"group:{GROUP}"),
        ):
            await control.grant("tenant", grant)
        limits = QuotaLimits(produce_bytes_per_s=RATE, consume_bytes_per_s=RATE)
        await Quotas(admin).set("tenant", limits)
        writes = ProducerSettings(security=tenant, batch_messages_max=1)
        async with Producer(cluster.nameserver, writes) as producer:
            await until(lambda: sent(producer, b"probe"))
            begin = loop.time()
            waiting = [await producer.submit(TOPIC, Message(BODY)) for _ in range(COUNT)]
            offsets = [(await receipt).offset for receipt in waiting]
            assert len(set(offsets)) == COUNT
            assert loop.time() - begin >= LEAST_S
        sizes: list[int] = []

        async def handle(message: ReceivedMessage) -> None:
            sizes.append(len(message.body))

        reads = ConsumerSettings(security=tenant, consume_from="first")
        begin = loop.time()
        async with (
            Consumer(cluster.nameserver, GROUP, {TOPIC: "*"}, reads) as consumer,
            asyncio.TaskGroup() as tasks,
        ):
            running = tasks.create_task(consumer.run(handle))
            await until(lambda: sizes.count(len(BODY)) >= COUNT, timeout_s=90)
            running.cancel()
        assert loop.time() - begin >= LEAST_S
        assert sizes.count(len(BODY)) == COUNT
        log = (tmp_path / "logs" / "storage.log").read_text()
        for quota in ("produce_bytes_per_s", "consume_bytes_per_s"):
            assert f"calls throttled identity=tenant quota={quota} count=1" in log
