"""Goal: a member with a fixed client id joins again soon after its process was killed.

Method: a process that is killed while it is a member of a real cluster; and two live members in
virtual time, of which the second one waits until its start timeout.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import PIPE

import pytest

from batonmq import Consumer, ConsumerSettings
from batonmq.errors import ClientIdInUse
from batonmq_server.testing import MemoryBroker, run_virtual
from tests.client.group import scene
from tests.support.conditions import WAIT_S

MEMBER = """
import asyncio, sys
from batonmq import Consumer

async def main():
    nameserver, group, topic = sys.argv[1:]
    async with Consumer(nameserver, group, {topic: "*"}, client_id="worker-1") as consumer:
        while not consumer.assignment:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1)  # a heartbeat just before the kill outlives the session: section 10
        print("joined", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""
RESTART_S_MAX = 20
"""The session of the dead process ends within 5 s; the rest is for a busy machine. Without the end
of the session the member's lease decides, after 30 s."""


async def test_restart_after_kill_9_waits_for_the_end_of_the_old_session(nameserver: str) -> None:
    async with scene(nameserver, queue_count=1) as at:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", MEMBER, nameserver, at.group, at.topic, stdout=PIPE
        )
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), WAIT_S) == b"joined\n"
        process.kill()
        await process.wait()
        begin_s = asyncio.get_running_loop().time()
        async with Consumer(nameserver, at.group, {at.topic: "*"}, client_id="worker-1"):
            assert asyncio.get_running_loop().time() - begin_s < RESTART_S_MAX


@pytest.mark.parametrize("timeout_ms", [0, 7_000])
def test_client_id_of_a_live_member_is_refused_when_the_start_times_out(
    timeout_ms: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with MemoryBroker() as broker:
            await broker.create_topic("orders")
            async with broker.consumer("billing", {"orders": "*"}, client_id="worker-1"):
                begin_s = asyncio.get_running_loop().time()
                settings = ConsumerSettings(consume_from="first", start_timeout_ms=timeout_ms)
                with pytest.raises(ClientIdInUse, match="worker-1"):
                    async with broker.consumer(
                        "billing", {"orders": "*"}, settings, client_id="worker-1"
                    ):
                        pass
                waited_ms = (asyncio.get_running_loop().time() - begin_s) * 1000
                assert timeout_ms <= waited_ms <= timeout_ms + 3_000

    with caplog.at_level(logging.WARNING):
        run_virtual(check())
    warnings = [r for r in caplog.records if "client id is in use" in r.getMessage()]
    assert len(warnings) == (1 if timeout_ms else 0)
