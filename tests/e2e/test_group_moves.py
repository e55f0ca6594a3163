"""Goal: a group keeps every promise when it is moved between two offsets sets under load and their
processes are killed; an unavailable set stalls its own groups only.

Method: a real cluster with two sets; one producer and two consumers that run throughout. The group
is moved back and forth by the operator's command, and a process of the old set, of the new set or
of the lock manager is killed when each move begins. In the end every message with a receipt was
handled exactly once, in order, and no queue has changed its owner.
"""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from batonmq.admin.admin import Admin
from batonmq.admin.placement import locate_group, move_group
from tests.cli.baton import BATON, CommandResult
from tests.e2e.numbered_traffic import QUEUES, TOPIC, NumberedTraffic
from tests.support.cluster import local_cluster
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

GROUP = "counters"
STEP = 500
SETS = {"offsets": "offsets-b", "offsets-b": "offsets"}
PROCESS = {"offsets": "offsets", "offsets-b": "offsets-b-0"}


async def goes_on(traffic: NumberedTraffic) -> None:
    """Wait until `STEP` more messages are sent and handled."""
    sent, handled = len(traffic.receipts), len(traffic.handled)
    await until(
        lambda: len(traffic.receipts) >= sent + STEP and len(traffic.handled) >= handled + STEP,
        timeout_s=60,
    )


async def arrived(admin: Admin, offsets_set: str) -> None:
    async def look() -> bool:
        place = await locate_group(admin, GROUP)
        return place.offsets_set == offsets_set and not place.from_set

    await until(look, timeout_s=60)


async def shared_out(admin: Admin) -> bool:
    """Return whether both members own their assigned queues: no hand-over is in progress."""
    dealt = (await admin.describe_group(GROUP)).assignments
    wanted = {(one.topic, one.broker, one.queue_id): one.client_id for one in dealt}
    locks = await admin.list_locks(GROUP)
    held = {(one.topic, one.broker, one.queue_id): one.client_id for one in locks}
    return held == wanted and set(held.values()) == {"first", "second"}


async def tokens(admin: Admin) -> dict[tuple[str, int], int]:
    """Return the fencing token of each queue from offsets."""
    return {
        (found.queue.queue.broker, found.queue.queue.queue_id): found.token
        for found in await admin.progress(GROUP)
    }


async def test_group_is_moved_under_load_while_services_are_killed(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, offsets_sets=2) as cluster:
        traffic, stop = NumberedTraffic(cluster.nameserver), asyncio.Event()
        async with Admin(cluster.nameserver) as admin, asyncio.TaskGroup() as tasks:
            await admin.create_topic(TOPIC, QUEUES)
            sending = tasks.create_task(traffic.send(0))
            tasks.create_task(traffic.consume("first", stop))
            tasks.create_task(traffic.consume("second", stop))
            await goes_on(traffic)
            await until(lambda: shared_out(admin), timeout_s=60)
            before = await tokens(admin)
            for victim in ("nobody", "old", "new", "lockmgr"):
                old = (await locate_group(admin, GROUP)).offsets_set
                new, committed = SETS[old], await _committed(admin)
                await move_group(admin, GROUP, new)
                if victim != "nobody":
                    dying = {"old": PROCESS[old], "new": PROCESS[new]}.get(victim, victim)
                    await cluster.kill(dying)
                await arrived(admin, new)
                await goes_on(traffic)
                assert all(
                    offset >= committed[queue]
                    for queue, offset in (await _committed(admin)).items()
                ), "a committed offset has fallen"
            assert await tokens(admin) == before, "a queue has changed hands"
            traffic.stop_sending.set()
            await sending
            await until(lambda: len(traffic.handled) >= len(traffic.receipts), timeout_s=60)
            stop.set()
    traffic.check()


async def _committed(admin: Admin) -> dict[tuple[str, int], int]:
    return {
        (found.queue.queue.broker, found.queue.queue.queue_id): found.committed_offset
        for found in await admin.progress(GROUP)
    }


async def test_command_moves_groups(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, offsets_sets=2) as cluster:

        async def command(*words: str) -> CommandResult:
            process = await asyncio.create_subprocess_exec(
                *BATON,
                *("--nameserver", cluster.nameserver, "--format", "json"),
                *words,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            out, err = await process.communicate()
            return CommandResult(process.returncode or 0, out.decode(), err.decode())

        groups = [f"group-{number}" for number in range(8)]
        async with Admin(cluster.nameserver) as admin:
            for group in groups:
                await admin.update_group(group, policy="staged")
            began = {group: (await locate_group(admin, group)).offsets_set for group in groups}
            assert set(began.values()) == set(SETS), "a hash that gives one set all"
            mover = groups[0]
            to_set = SETS[began[mover]]
            (shown,) = (await command("group", "move", mover, "--to", to_set, "--dry-run")).json
            assert (shown["from_set"], shown["to_set"]) == (began[mover], to_set)
            assert shown["state"] == "would move"
            assert (await locate_group(admin, mover)).move == 0
            (done,) = (await command("group", "move", mover, "--to", to_set)).json
            assert (done["state"], done["move"]) == ("moved", 1)
            (done,) = (await command("group", "move", mover, "--to", to_set)).json
            assert done["state"] == "stays"
            refused = await command("group", "move", mover, "--to", "nowhere")
            assert refused.code != 0
            assert "SET_NOT_FOUND" in refused.err
            spread = (await command("cluster", "spread-groups")).json
            assert [one["group"] for one in spread] == [mover], "back where the hash has it"
            assert (await locate_group(admin, mover)).offsets_set == began[mover]
            shown = (await command("group", "describe", mover)).json["place"]
            assert shown == {"offsets_set": began[mover], "move": 2, "from_set": ""}
            far = next(group for group in groups if began[group] != began[mover])
            clone = await command("group", "clone", far, mover, "--execute", "--reason", "a test")
            assert clone.code != 0
            assert "GROUPS_APART" in clone.err
            assert f"--to {began[far]}" in clone.err

        async def all_answer() -> bool:
            return (await command("cluster", "status")).code == 0

        await until(all_answer, timeout_s=60)
        replication = (await command("cluster", "replication")).json
        assert {one["replica_set"] for one in replication if one["service"] == "offsets"} == {*SETS}
