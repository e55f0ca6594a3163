"""Goal: Celery keeps the promise of BatonMQ: a task counts when it was handled, not before.

Method: real workers and their pools as programs, a real cluster, kill -9 and a restart of storage.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import pytest
from kombu import Queue

from batonmq import Admin
from tests.kombu.celery_worker import Tasks, Worker, tasks_of
from tests.support.cluster import local_cluster
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


def _queue_call(tasks: Tasks, call: str, name: str = "celery") -> object:
    """Call a method of a declared queue in a connection of its own."""
    with tasks.app.connection() as connection, closing(connection.channel()) as channel:
        return getattr(Queue(name, routing_key=name)(channel), call)()


async def _unacked(admin: Admin) -> int:
    """Return how many messages the group of the workers has not acknowledged."""
    progress = await admin.group_progress("celery")
    assert not progress.problems
    return sum(queue.lag or 0 for queue in progress.queues)


async def _all_acked(admin: Admin) -> bool:
    return await _unacked(admin) == 0


async def _is_dead(admin: Admin) -> bool:
    if "%DLQ%celery" not in {topic.name for topic in await admin.list_topics()}:
        return False
    detail = await admin.describe_topic("%DLQ%celery")
    return sum(queue.count or 0 for queue in detail.queues) == 1


async def _hand_over(tasks: Tasks, first: Worker) -> None:
    """Stop a worker while a task runs and others wait, and have a second one go on."""
    await tasks.send("wait", "slow")
    await until(lambda: tasks.notes("began", "slow"))
    before = tasks.done()
    names = [f"later-{number}" for number in range(12)]
    for name in names:
        await tasks.send("work", name)
    async with asyncio.TaskGroup() as group, tasks.worker("second", "-P", "solo") as second:
        await until(lambda: "ready" in second.log.read_text())
        stopping = group.create_task(first.stop())
        await until(lambda: "Warm shutdown" in first.log.read_text())
        tasks.open_gate()
        assert await stopping == 0, first.log.read_text()
        await until(lambda: tasks.done() == sorted([*before, "slow", *names]))
        assert len(tasks.notes("began", "slow")) == 1
        assert await second.stop() == 0, second.log.read_text()


@pytest.mark.long
async def test_a_pool_of_processes_runs_each_task_once_and_again_if_its_process_dies(
    tmp_path: Path,
) -> None:
    async with (
        local_cluster(tmp_path / "cluster") as cluster,
        tasks_of(cluster.nameserver, tmp_path) as tasks,
        Admin(cluster.nameserver) as admin,
    ):
        names = [f"{number:02}" for number in range(20)]
        for name in names:
            await tasks.send("work", name)
        assert await asyncio.to_thread(_queue_call, tasks, "purge") == 20
        async with tasks.worker("one", "-P", "prefork", "-c", "1") as worker:
            for name in names:
                await tasks.send("work", f"task-{name}")
            expected = [f"task-{name}" for name in names]
            await until(lambda: tasks.done() == expected)

            # A process of the pool dies of a task: it runs again, and then is a dead letter.
            await tasks.send("crash", "poison")
            await until(lambda: len(tasks.notes("began", "poison")) == 2)
            await until(lambda: _is_dead(admin))
            # Its successor was forked while the worker was connected, and sends a task.
            await tasks.send("send_child", "parent")
            await tasks.send("fail_once", "retried")
            expected = sorted([*expected, "parent", "parent-child", "retried"])
            await until(lambda: tasks.done() == expected)
            assert len(tasks.notes("attempt", "retried")) == 2
            assert len(tasks.notes("began", "poison")) == 2

            await _hand_over(tasks, worker)
        await until(lambda: _all_acked(admin))
        assert await asyncio.to_thread(_queue_call, tasks, "delete") is None
        assert "celery" not in {topic.name for topic in await admin.list_topics()}


@pytest.mark.long
async def test_a_killed_worker_has_only_its_unacknowledged_tasks_run_again(tmp_path: Path) -> None:
    async with (
        local_cluster(tmp_path / "cluster") as cluster,
        tasks_of(cluster.nameserver, tmp_path) as tasks,
        Admin(cluster.nameserver) as admin,
    ):
        async with tasks.worker("killed", "-P", "solo", "--prefetch-multiplier", "4") as killed:
            done = [f"done-{number}" for number in range(8)]
            for name in done:
                await tasks.send("work", name)
            await until(lambda: tasks.done() == done)
            await until(lambda: _all_acked(admin))
            await tasks.send("wait", "running")
            await until(lambda: tasks.notes("began", "running"))
            late = [f"late-{number}" for number in range(8)]
            for name in late:
                await tasks.send("work", name)
            await tasks.send("work", "at-its-time", countdown=1)
            # The blocked worker keeps its queues: a second worker gets what it can free, no more.
            async with tasks.worker("second", "-P", "solo") as second:
                await until(lambda: "ready" in second.log.read_text())
                await cluster.restart("storage")
                assert len(tasks.notes("began", "running")) == 1
                killed.kill()
                await until(lambda: len(tasks.notes("began", "running")) == 2)
                tasks.open_gate()
                expected = sorted([*done, *late, "at-its-time", "running"])
                await until(lambda: tasks.done() == expected)
                await until(lambda: _all_acked(admin))
                assert await second.stop() == 0, second.log.read_text()
        assert tasks.done() == expected
