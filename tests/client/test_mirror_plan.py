"""Goal: queues that move, retire or are added do not end a mirror, and each problem is precise.

Method: the pure plan, and `Mirror` with clusters in memory that have topics and no messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from random import Random
from types import SimpleNamespace
from typing import cast

import pytest

from baton.storage.v1.schedule_service_pb2 import ListScheduledRequest, ListScheduledResponse
from batonmq._core.queues import QueueRef
from batonmq.admin import mirror as mirror_module
from batonmq.admin._group_mirror import GroupMirror
from batonmq.admin._mirror_plan import bind_queues, find_topic_problem
from batonmq.admin._mirrored_clusters import FoundPairs, MirroredClusters, for_each
from batonmq.admin.admin import Admin
from batonmq.admin.group_reports import Group
from batonmq.admin.mirror import Mirror
from batonmq.admin.reports import Topic
from batonmq.errors import GroupNotFound, TopicExists, Unreachable
from tests.support.conditions import until


def topic(queues: Mapping[str, int], writable: Mapping[str, int], topic_id: int = 1) -> Topic:
    return Topic("t", topic_id, topic_id, queues, "read_write", writable)


def queue(broker: str, number: int) -> QueueRef:
    return QueueRef("t", broker, number)


class Cluster:
    """A cluster with one topic and no messages."""

    def __init__(self, name: str, one: Topic) -> None:
        self.name, self.topic, self.reads, self.extent = name, one, 0, (0, 0)
        self.failures, self.absent, self.random = 0, "", Random(0)

    @property
    def directory(self) -> Cluster:
        return self

    async def cluster(self) -> SimpleNamespace:
        if self.failures:
            self.failures -= 1
            raise Unreachable("no answer")
        return SimpleNamespace(name=self.name)

    async def list_topics(self) -> tuple[Topic, ...]:
        self.reads += 1
        return (self.topic,)

    async def extents(
        self, queues: Iterable[QueueRef]
    ) -> tuple[dict[QueueRef, tuple[int, int]], tuple[str, ...]]:
        known = [queue for queue in queues if queue.broker != self.absent]
        problems = (f"{self.absent} does not answer",) if self.absent else ()
        return dict.fromkeys(known, self.extent), problems

    async def describe_group(self, name: str) -> Group:
        raise GroupNotFound(name)

    async def progress(self, _: str) -> tuple[()]:
        return ()


def clusters(here: Topic, there: Topic, *groups: str) -> tuple[Cluster, Cluster, Mirror]:
    source, target = Cluster("x", here), Cluster("y", there)
    return source, target, Mirror(cast(Admin, source), cast(Admin, target), ["t"], groups)


def test_retiring_queues_do_not_count() -> None:
    here = topic({"a": 3, "b": 2}, {"a": 2, "b": 2})
    assert find_topic_problem("x", here, "y", topic({"a": 4}, {"a": 4}, 2)) is None
    problem = find_topic_problem("x", here, "y", topic({"a": 5}, {"a": 3}, 2))
    assert problem is not None
    assert problem.message == "topic t of the target has 3 writable queues; in the source it has 4"
    assert problem.remedy == (
        "Give the topic as many queues in the target: baton topic update t --queues 4."
    )


def test_moved_queue_gets_a_free_queue_and_the_retiring_one_keeps_its_own() -> None:
    moved = topic({"a": 2, "b": 1}, {"a": 1, "b": 1})
    bound = {queue("c", 0): queue("a", 0), queue("c", 1): queue("a", 1)}
    pairs, left = bind_queues(moved, topic({"c": 3}, {"c": 3}), bound)
    assert pairs[queue("b", 0)] == queue("c", 2)
    assert pairs[queue("a", 1)] == queue("c", 1)
    assert left == ()
    _, left = bind_queues(moved, topic({"c": 3}, {"c": 2}), bound)
    assert left == (queue("b", 0),), "a retiring queue of the target takes no messages"


def test_writable_queues_get_free_queues_before_retiring_ones() -> None:
    moved = topic({"a": 2, "b": 1}, {"a": 1, "b": 1})
    pairs, left = bind_queues(moved, topic({"a": 2}, {"a": 2}), {})
    assert pairs == {queue("a", 0): queue("a", 0), queue("b", 0): queue("a", 1)}
    assert left == (queue("a", 1),)


async def test_status_and_plan_name_queues_without_one_in_the_target() -> None:
    counts = {"a": 3, "b": 2}
    _, _, mirror = clusters(topic(counts, counts), topic({"a": 4}, {"a": 4}, 2))
    status = await mirror.status()
    assert len(status.queues) == 4
    (problem,) = status.problems
    assert "1 queues of topic t have no free queue in the target: t/b/1" in problem
    assert "--queues 5" in problem
    assert [type(one) for one in (await mirror.plan()).problems] == [TopicExists]


async def test_mirror_begins_again_for_other_queues_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "TOPIC_INTERVAL_S", 0.0)
    here, there = topic({"a": 2}, {"a": 2}), topic({"c": 3}, {"c": 3}, 2)
    source, _, mirror = clusters(here, there)
    mirror._before = MirroredClusters("x", "y", {"t": here}, {"t": there})
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(mirror._watch_topics())
        source.topic = topic({"a": 2}, {"a": 1})
        reads = source.reads
        await until(lambda: source.reads >= reads + 3)
        assert not watch.done(), "queues that retire end nothing"
        source.topic = topic({"a": 2, "b": 1}, {"a": 1, "b": 1})
        await watch
    source.topic = topic({"a": 2}, {"a": 2}, 7)
    with pytest.raises(TopicExists, match="created anew"):
        await mirror._watch_topics()


async def test_absent_broker_of_the_retry_topic_is_asked_for_its_schedule() -> None:
    asked: list[str] = []

    class Schedules:
        def __init__(self, broker: str) -> None:
            self.broker = broker

        async def ListScheduled(
            self, _: ListScheduledRequest, **__: float
        ) -> ListScheduledResponse:
            asked.append(self.broker)
            if self.broker == "absent":
                raise Unreachable("absent does not answer")
            return ListScheduledResponse()

    class Source:
        @property
        def directory(self) -> Source:
            return self

        async def brokers(self) -> set[str]:
            return {"a"}

        async def schedule(self, broker: str) -> Schedules:
            return Schedules(broker)

        async def ask(self, ask: Callable[[float], Awaitable[object]]) -> object:
            return await ask(1.0)

        async def describe_topic(self, _: str) -> SimpleNamespace:
            counts = {"a": 1, "absent": 1}
            return SimpleNamespace(topic=topic(counts, counts))

    source = cast(Admin, Source())
    with pytest.raises(Unreachable, match="absent"):
        async for _ in GroupMirror(source, source, "g")._waiting({}):
            pass
    assert asked == ["a", "absent"]


async def test_removed_messages_are_no_lag_of_a_group() -> None:
    here, there = topic({"a": 2}, {"a": 2}), topic({"a": 2}, {"a": 2}, 2)
    source, _, mirror = clusters(here, there, "g")
    source.extent = (100, 107)
    (group,) = (await mirror.status()).groups
    assert group.lag == 14


async def test_status_names_the_broker_whose_messages_are_missing_in_the_lag_after_a_failover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, there = topic({"a": 2}, {"a": 2}), topic({"c": 1, "d": 1}, {"c": 1, "d": 1}, 2)
    _, target, mirror = clusters(here, there, "g")
    pairs: dict[QueueRef, tuple[QueueRef, int | None]] = {
        queue("a", 0): (queue("c", 0), 0),
        queue("a", 1): (queue("d", 0), 0),
    }

    async def found(*_: object) -> FoundPairs:
        return FoundPairs(pairs, (), None)

    monkeypatch.setattr(mirror_module, "find_pairs", found)
    target.extent, target.absent = (0, 7), "d"
    status = await mirror.status()
    assert (status.groups[0].target_lag, status.problems) == (7, ("d does not answer",))


async def test_mirror_that_runs_waits_for_its_clusters_when_a_topic_has_other_queues() -> None:
    source, target, mirror = clusters(topic({"a": 1}, {"a": 1}), topic({"a": 1}, {"a": 1}, 2))
    source.failures = target.failures = 1
    await mirror._begin_again(once=False)
    assert [one.source for one in mirror._queues] == [queue("a", 0)]
    source.failures = 1
    with pytest.raises(Unreachable):
        await mirror._begin_again(once=True)


async def test_two_queues_that_fail_at_once_are_one_error() -> None:
    async def fail(name: str) -> None:
        raise Unreachable(name)

    with pytest.raises(Unreachable, match="a"):
        await for_each(["a", "b"], fail)


async def test_group_in_use_in_the_target_is_no_problem() -> None:
    source, target, mirror = clusters(topic({"a": 1}, {"a": 1}), topic({"a": 1}, {"a": 1}, 2))
    group = GroupMirror(cast(Admin, source), cast(Admin, target), "g")
    group.standby, mirror._group_mirrors = False, (group,)
    report = mirror._reported(0.0)
    assert (report.problems, report.groups_in_use) == ((), ("g",))
