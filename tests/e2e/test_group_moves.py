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


async def until_moved(admin: Admin, offsets_set: str) -> None:
    """Wait until the move of the group to the offsets set is complete."""

    async def is_moved() -> bool:
        location = await locate_group(admin, GROUP)
        return location.offsets_set == offsets_set and not location.from_set

    await until(is_moved, timeout_s=60)


async def are_all_queues_owned(admin: Admin) -> bool:
    """Return whether both members own their assigned queues: no hand-over is in progress."""
    assignments = (await admin.describe_group(GROUP)).assignments
    assigned = {(one.topic, one.broker, one.queue_id): one.client_id for one in assignments}
    locks = await admin.list_locks(GROUP)
    owned = {(one.topic, one.broker, one.queue_id): one.client_id for one in locks}
    return owned == assigned and set(owned.values()) == {"first", "second"}


async def tokens(admin: Admin) -> dict[tuple[str, int], int]:
    """Return the fencing token of each queue from offsets."""
    return {
        (progress.queue.queue.broker, progress.queue.queue.queue_id): progress.token
        for progress in await admin.progress(GROUP)
    }


@pytest.mark.long
async def test_group_is_moved_under_load_while_services_are_killed(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, offsets_sets=2) as cluster:
        traffic = NumberedTraffic(cluster.nameserver)
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic(TOPIC, QUEUES)
            async with traffic.running("first", "second"):
                await traffic.proceed(STEP)
                await until(lambda: are_all_queues_owned(admin), timeout_s=60)
                before = await tokens(admin)
                for victim in ("none", "old", "new", "lockmgr"):
                    old = (await locate_group(admin, GROUP)).offsets_set
                    new, committed = SETS[old], await _committed(admin)
                    await move_group(admin, GROUP, new)
                    if victim != "none":
                        process = {"old": PROCESS[old], "new": PROCESS[new]}.get(victim, victim)
                        await cluster.kill(process)
                    await until_moved(admin, new)
                    await traffic.proceed(STEP)
                    assert all(
                        offset >= committed[queue]
                        for queue, offset in (await _committed(admin)).items()
                    ), "a committed offset went back"
                assert await tokens(admin) == before, "a queue has changed its owner"


async def _committed(admin: Admin) -> dict[tuple[str, int], int]:
    return {
        (progress.queue.queue.broker, progress.queue.queue.queue_id): progress.committed_offset
        for progress in await admin.progress(GROUP)
    }


@pytest.mark.long
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
            initial_sets = {
                group: (await locate_group(admin, group)).offsets_set for group in groups
            }
            assert set(initial_sets.values()) == set(SETS), "the hash gives all groups to one set"
            mover = groups[0]
            to_set = SETS[initial_sets[mover]]
            (shown,) = (await command("group", "move", mover, "--to", to_set, "--dry-run")).json
            assert (shown["from_set"], shown["to_set"]) == (initial_sets[mover], to_set)
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
            assert [one["group"] for one in spread] == [mover], (
                "the group is in the set that the hash gives"
            )
            assert (await locate_group(admin, mover)).offsets_set == initial_sets[mover]
            shown = (await command("group", "describe", mover)).json["place"]
            assert shown == {"offsets_set": initial_sets[mover], "move": 2, "from_set": ""}
            other = next(group for group in groups if initial_sets[group] != initial_sets[mover])
            clone = await command("group", "clone", other, mover, "--execute", "--reason", "a test")
            assert clone.code != 0
            assert "GROUPS_APART" in clone.err
            assert f"--to {initial_sets[other]}" in clone.err

        async def all_answer() -> bool:
            return (await command("cluster", "status")).code == 0

        await until(all_answer, timeout_s=60)
        replication = (await command("cluster", "replication")).json
        assert {one["replica_set"] for one in replication if one["service"] == "offsets"} == {*SETS}
