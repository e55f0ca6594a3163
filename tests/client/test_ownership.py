"""A consumer and its queues: how it reacts to the group's record and to the services.

Goal: a consumer owns the queues that are assigned to it and no others; a rebalance that keeps a
queue does not interrupt it; after the end of a token no message of it is started, acked or dropped
against the rules (protocol sections 5, 6, 9, 11, 13, 14, 15).
Method: real gRPC to simulated services in this process, which the test controls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from baton.common.v1 import error_pb2, queue_pb2
from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from batonmq._common.clock import Clock
from batonmq._connection.directory import Directory
from batonmq._consumer import lease_renewer
from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.group_view import GroupView
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.queue_acquirer import AcquiredQueue
from batonmq._consumer.session import OwnershipEvent, Session
from batonmq._core.queue_progress import GrantedProgress
from batonmq._core.queues import QueueRef
from batonmq.errors import BatonError, Held, NotAssigned, NotMember, SubscriptionDraining
from tests.client.group_twins import GROUP, TOPIC, Twins, twins
from tests.support.conditions import until
from tests.support.own_logs import own_warnings

SETTINGS = ConsumerSettings(
    consume_from="first",
    commit_interval_ms=60_000,
    keep_alive_ms=60_000,
    drain_timeout_ms=5_000,
    retry_first_ms=1,
    send_back=False,
)
"""Intervals so long that no timer fires: every call is caused by the test."""


@dataclass
class RunningConsumer:
    """A consumer, its handler calls and its ownership events.

    Attributes:
        gate: Handlers wait while it is cleared.
        started: Bodies of the messages whose handlers were started.
        ended: Bodies of the messages whose handlers succeeded.
    """

    consumer: Consumer
    gate: asyncio.Event
    started: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    messages: list[ReceivedMessage] = field(default_factory=list)
    events: list[OwnershipEvent] = field(default_factory=list)

    def kinds(self, queue_id: int) -> list[str]:
        return [event.kind for event in self.events if event.queue.queue_id == queue_id]

    def queues(self) -> set[int]:
        return {queue.queue_id for queue in self.consumer.assignment}


@asynccontextmanager
async def running_consumer(
    at: Twins, client_id: str = "a", expression: str = "*", **settings: Any
) -> AsyncIterator[RunningConsumer]:
    """Run a member that handles all its messages until the block ends."""
    events: list[OwnershipEvent] = []
    consumer = Consumer(
        at.address,
        GROUP,
        {TOPIC: expression},
        replace(SETTINGS, **settings),
        client_id=client_id,
        on_ownership=events.append,
    )
    running = RunningConsumer(consumer, asyncio.Event(), events=events)
    running.gate.set()

    async def handle(message: ReceivedMessage) -> None:
        running.messages.append(message)
        running.started.append(message.body.decode())
        await running.gate.wait()
        running.ended.append(message.body.decode())

    async with consumer, asyncio.TaskGroup() as tasks:
        tasks.create_task(consumer.run(handle))
        yield running
        running.gate.set()
        consumer.stop()


async def wait_for_held_pulls(at: Twins, *queues: int) -> None:
    """Wait until exactly these queues have a pull that storage holds."""
    await until(lambda: sorted(at.storage.held_pulls) == sorted(queues))


@asynccontextmanager
async def owning(queue_count: int, **settings: Any) -> AsyncIterator[tuple[Twins, RunningConsumer]]:
    """Run a member that owns all queues, each with a pull that storage holds."""
    queue_ids = range(queue_count)
    async with twins(queue_count) as at, running_consumer(at, **settings) as running:
        at.nameserver.assign("a", queue_ids)
        await wait_for_held_pulls(at, *queue_ids)
        yield at, running


# ---- assignment


async def test_consumer_acquires_the_queues_that_are_assigned_to_it_and_no_others() -> None:
    async with twins(4) as at, running_consumer(at) as running:
        at.nameserver.assign("other", [0])
        at.nameserver.assign("a", [1, 3])
        await wait_for_held_pulls(at, 1, 3)
        assert running.queues() == {1, 3}
        assert {queue_id for queue_id, _ in at.lockmgr.acquires} == {1, 3}


async def test_queues_that_keep_their_owner_are_not_interrupted_by_a_rebalance() -> None:
    async with twins(4) as at, running_consumer(at) as running:
        at.nameserver.assign("a", [0, 1])
        await wait_for_held_pulls(at, 0, 1)
        pulls = len(at.storage.pulls_of(0))
        at.nameserver.assign("a", [2])
        await wait_for_held_pulls(at, 0, 1, 2)
        at.nameserver.assign("b", [1])
        await until(lambda: at.lockmgr.releases == [1])
        for _ in range(10):
            at.nameserver.change()
        at.nameserver.assign("a", [3])
        await wait_for_held_pulls(at, 0, 2, 3)
        assert running.kinds(0) == ["granted"], (
            "the kept queue was fenced, drained or granted again"
        )
        assert len(at.storage.pulls_of(0)) == pulls, "the pull of the kept queue was interrupted"
        assert [queue_id for queue_id, _ in at.lockmgr.acquires] == [0, 1, 2, 3]
        at.storage.send(0, "x")
        await until(lambda: running.ended == ["x"])


async def test_handler_continues_during_a_rebalance_that_keeps_its_queue() -> None:
    async with twins(2) as at, running_consumer(at) as running:
        running.gate.clear()
        at.nameserver.assign("a", [0, 1])
        at.storage.send(0, "slow", "next")
        await until(lambda: running.started == ["slow"])
        at.nameserver.assign("b", [1])
        await until(lambda: at.lockmgr.releases == [1])
        running.gate.set()
        await until(lambda: running.ended == ["slow", "next"])
        assert running.kinds(0) == ["granted"]


async def test_stopped_consumer_leaves_and_releases_its_queues_before_its_block_ends() -> None:
    async with owning(2) as (at, running):
        running.gate.clear()
        at.storage.send(0, "slow", "next")
        await until(lambda: running.started == ["slow"])
        running.consumer.stop()
        await until(lambda: at.lockmgr.releases == [1])
        running.gate.set()
        await until(lambda: at.lockmgr.releases == [1, 0])
        assert running.consumer.assignment == ()
        assert running.ended == ["slow"]
        assert at.offsets.queues[0].handled == {0}


async def test_stopped_consumer_acquires_no_queue_while_its_iteration_has_not_ended() -> None:
    async with twins(2) as at, Consumer(at.address, GROUP, {TOPIC: "*"}, client_id="a") as consumer:
        at.nameserver.assign("a", [0, 1])
        await wait_for_held_pulls(at, 0, 1)
        consumer.stop()
        at.nameserver.assign("b", [1])
        await until(lambda: at.lockmgr.releases == [1])
        at.nameserver.assign("a", [1])
        at.nameserver.assign("b", [0])
        await until(lambda: at.lockmgr.releases == [1, 0])
        assert [queue_id for queue_id, _ in at.lockmgr.acquires] == [0, 1]


async def test_second_leave_waits_for_the_call_of_the_first() -> None:
    """The end of the block would cancel the call that `stop` has begun."""
    async with twins(1) as at, running_consumer(at) as running:
        membership, order = running.consumer._membership, list[str]()
        at.nameserver.may_leave.clear()

        async def leave(name: str) -> None:
            await membership.leave()
            order.append(name)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(leave("first"))
            await until(lambda: at.nameserver.leaves)
            tasks.create_task(leave("second"))
            await asyncio.sleep(0)
            at.nameserver.may_leave.set()
        assert order == ["first", "second"]
        assert len(at.nameserver.leaves) == 1


async def test_watch_of_a_group_that_was_left_is_not_reopened() -> None:
    async with twins(1) as at, running_consumer(at) as running:
        membership = running.consumer._membership
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(membership.run_watch())
            await until(lambda: len(at.nameserver.sessions) == 2)
            await membership.leave()
            at.nameserver.break_sessions()
        assert len(at.nameserver.sessions) == 2


async def test_record_of_an_older_generation_changes_nothing() -> None:
    async with owning(1) as (at, running):

        def older(group: nameserver_pb.Group) -> None:
            group.generation -= 10

        at.nameserver.owners.clear()
        at.nameserver.change(older)
        at.nameserver.assign("a", [0])  # older than the current record, and received after it
        assert running.kinds(0) == ["granted"]


async def test_removed_member_keeps_its_queues_until_it_has_joined_again() -> None:
    """Section 9: the record revokes the queues that are not assigned to it any more."""
    async with owning(2) as (at, running):
        beats = len(at.nameserver.heartbeats)
        at.nameserver.owners = {1: "a"}
        at.nameserver.change(lambda group: group.members.pop())
        await until(lambda: len(at.nameserver.heartbeats) > beats)
        await until(lambda: running.kinds(0) == ["granted", "draining", "released"])
        assert running.kinds(1) == ["granted"]


# ---- session


async def test_more_queues_than_one_keep_alive_holds_are_renewed_by_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease_renewer, "HOLDS_MAX", 2)
    async with owning(5, keep_alive_ms=10) as (at, running):

        def renewed() -> bool:
            recent = at.lockmgr.kept[-6:]
            named = {hold.queue.queue.queue_id for call in recent for hold in call}
            return [len(call) for call in recent].count(1) == 2 and len(named) == 5

        await until(renewed)
        assert running.queues() == set(range(5))
        assert max(map(len, at.lockmgr.kept)) == 2


async def test_broken_group_watch_causes_a_heartbeat_at_once_and_is_reopened() -> None:
    async with owning(1) as (at, running):
        (member,) = at.nameserver.group.members
        assert at.nameserver.sessions == [member.incarnation]
        beats = len(at.nameserver.heartbeats)
        at.nameserver.break_sessions()
        await until(lambda: len(at.nameserver.heartbeats) > beats)
        await until(lambda: len(at.nameserver.sessions) == 2)
        assert at.nameserver.sessions[1] == member.incarnation
        assert running.kinds(0) == ["granted"]


# ---- notices of lockmgr (section 5)


async def test_waiter_makes_the_owner_send_a_heartbeat_and_keep_an_assigned_queue() -> None:
    async with owning(1) as (at, running):
        beats = len(at.nameserver.heartbeats)
        at.lockmgr.push_wanted(0, lockmgr_pb.WANTED_REASON_WAITER)
        await until(lambda: len(at.nameserver.heartbeats) == beats + 1)
        assert running.kinds(0) == ["granted"]


async def test_waiter_makes_an_owner_that_missed_the_push_release_the_queue() -> None:
    async with owning(1) as (at, running):
        at.nameserver.owners = {0: "b"}
        at.nameserver.change_without_push()
        at.lockmgr.push_wanted(0, lockmgr_pb.WANTED_REASON_WAITER)
        await until(lambda: running.kinds(0) == ["granted", "draining", "released"])


async def test_owner_that_was_removed_from_the_group_joins_again() -> None:
    async with owning(1) as (at, running):
        beats = len(at.nameserver.heartbeats)
        at.lockmgr.push_wanted(0, lockmgr_pb.WANTED_REASON_NOT_MEMBER)
        await until(lambda: len(at.nameserver.heartbeats) == beats + 1)
        assert running.kinds(0) == ["granted"]


async def test_subscription_change_makes_a_member_release_every_queue() -> None:
    """Section 14; the notice arrives before the record here."""
    async with owning(3) as (at, running):
        for queue_id in range(3):
            at.lockmgr.refusals[queue_id] = [SubscriptionDraining("it drains")] * 3
        at.lockmgr.push_wanted(1, lockmgr_pb.WANTED_REASON_SUBSCRIPTION)
        await until(lambda: sorted(at.lockmgr.releases) == [0, 1, 2])
        assert {item.queue.queue.queue_id for item in at.offsets.closes} == {0, 1, 2}
        await wait_for_held_pulls(at, 0, 1, 2)
        assert running.kinds(0) == ["granted", "draining", "released", "granted"]


async def test_notice_about_an_earlier_token_is_ignored() -> None:
    async with owning(1) as (at, running):
        at.lockmgr.push_wanted(0, lockmgr_pb.WANTED_REASON_WAITER)
        late = lockmgr_pb.Wanted(token=99, reason=lockmgr_pb.WANTED_REASON_SUBSCRIPTION)
        late.queue.CopyFrom(at.lockmgr.acquires[0][1].queue)
        at.lockmgr.push(lockmgr_pb.WatchResponse(wanted=late))
        beats = len(at.nameserver.heartbeats)
        at.lockmgr.push_wanted(0, lockmgr_pb.WANTED_REASON_WAITER)
        await until(lambda: len(at.nameserver.heartbeats) > beats)
        assert running.kinds(0) == ["granted"]


async def test_queue_that_became_free_is_requested_at_once() -> None:
    async with twins(1) as at, running_consumer(at) as running:
        at.lockmgr.refusals[0] = [Held("it is held", retry_after_ms=3_600_000)]
        at.nameserver.assign("a", [0])
        await until(lambda: len(at.lockmgr.acquires) == 1)
        await until(lambda: at.lockmgr.watchers == 1)
        await notify_free_until_requested(at)
        await until(lambda: running.queues() == {0})


async def notify_free_until_requested(at: Twins) -> None:
    """Repeat the notice until the queue is requested: the stream may not be open yet."""

    def requested() -> bool:
        at.lockmgr.push_free(0)
        return len(at.lockmgr.acquires) == 2

    await until(requested)


async def test_lost_lock_watch_is_reopened_and_keep_alives_bring_its_notices() -> None:
    async with owning(1, keep_alive_ms=10) as (at, running):
        await until(lambda: at.lockmgr.watchers == 1)
        at.lockmgr.push(None)
        await until(lambda: at.lockmgr.watchers == 2)
        at.lockmgr.states[0] = lockmgr_pb.HoldReport(
            state=lockmgr_pb.HOLD_STATE_WANTED, wanted_reason=lockmgr_pb.WANTED_REASON_WAITER
        )
        beats = len(at.nameserver.heartbeats)
        await until(lambda: len(at.nameserver.heartbeats) > beats)
        assert running.kinds(0) == ["granted"]


@pytest.mark.parametrize("refusal", [NotAssigned("newer"), NotMember("removed")])
async def test_requester_with_an_old_record_fetches_the_new_one(refusal: BatonError) -> None:
    async with twins(1) as at, running_consumer(at):
        at.lockmgr.refusals[0] = [refusal]
        beats = len(at.nameserver.heartbeats)
        at.nameserver.assign("a", [0])
        await wait_for_held_pulls(at, 0)
        assert len(at.nameserver.heartbeats) == beats + 1


# ---- subscriptions (section 14)


async def test_pulls_name_the_groups_filter_and_its_generation_not_the_members() -> None:
    async with twins(1) as at, running_consumer(at, expression="mine") as running:
        at.nameserver.subscribe("theirs")
        at.nameserver.assign("a", [0])
        at.storage.send(0, "mine:1", "theirs:2", "mine:3")
        await until(lambda: running.ended == ["theirs:2"])
        generation = at.nameserver.group.subscription_generation
        (pull, *_) = at.storage.pulls
        assert (pull.expression, pull.subscription_generation) == ("theirs", generation)


async def test_new_filter_applies_from_the_next_pull_under_the_same_token() -> None:
    """The policy WARN changes the filter in this way."""
    async with twins(1) as at, running_consumer(at, expression="old") as running:
        at.nameserver.assign("a", [0])
        at.storage.send(0, "old:1", "new:2")
        await until(lambda: running.ended == ["old:1"])
        await wait_for_held_pulls(at, 0)
        at.nameserver.subscribe("new")
        await until(lambda: at.storage.pulls[-1].expression == "new")
        at.storage.send(0, "old:3", "new:4")
        await until(lambda: running.ended == ["old:1", "new:4"])
        assert running.kinds(0) == ["granted"]


async def test_grant_for_a_newer_subscription_waits_for_its_record() -> None:
    async with twins(1) as at, running_consumer(at, expression="old") as running:
        at.lockmgr.bound = at.nameserver.group.subscription_generation + 1
        at.storage.send(0, "old:1", "new:2")
        beats = len(at.nameserver.heartbeats)
        at.nameserver.assign("a", [0])
        await until(lambda: len(at.nameserver.heartbeats) > beats)
        assert at.storage.pulls == []
        at.nameserver.subscribe("new")
        await until(lambda: running.ended == ["new:2"])
        assert running.kinds(0) == ["granted"]


async def test_pull_refused_for_its_subscription_causes_a_new_acquire() -> None:
    async with owning(1) as (at, running):
        at.lockmgr.bound = at.offsets.queues[0].bound = 2
        at.storage.wake()
        await until(lambda: running.kinds(0) == ["granted", "fenced", "granted"])
        at.nameserver.subscribe("*")
        at.storage.send(0, "x")
        await until(lambda: running.ended == ["x"])


async def test_staged_member_logs_the_differences_and_has_no_queue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with twins(1) as at:
        at.nameserver.verdict = nameserver_pb.HeartbeatResponse(
            verdict=nameserver_pb.SUBSCRIPTION_VERDICT_STAGED,
            differences=[
                error_pb2.SubscriptionDifference(
                    topic=TOPIC,
                    setting="expression",
                    newcomer_client_id="new",
                    newcomer_value="b",
                    member_client_id="old",
                    member_value="a",
                )
            ],
        )
        async with running_consumer(at, "new", "b") as running:
            verdict = running.consumer.verdict
            assert verdict.kind == "staged"
            (difference,) = verdict.differences
            assert (difference.newcomer_value, difference.member_value) == ("b", "a")
            assert f"{TOPIC}: new requests 'b', old has 'a'" in caplog.text
            assert running.queues() == set()
            at.nameserver.verdict = nameserver_pb.HeartbeatResponse(
                verdict=nameserver_pb.SUBSCRIPTION_VERDICT_ACCEPTED
            )
            at.nameserver.subscribe("b")
            await until(lambda: running.consumer.verdict.kind == "accepted")


# ---- pause


async def test_paused_group_is_not_pulled_and_running_handlers_finish() -> None:
    async with (
        twins(1) as at,
        running_consumer(at, commit_interval_ms=10, keep_alive_ms=10) as running,
    ):
        running.gate.clear()
        at.nameserver.assign("a", [0])
        at.storage.send(0, "1", "2")
        await until(lambda: running.started == ["1"])
        await wait_for_held_pulls(at, 0)
        at.nameserver.pause("ann")
        await wait_for_held_pulls(at)
        pulls = len(at.storage.pulls)
        at.storage.send(0, "3")
        running.gate.set()
        await until(lambda: at.committed(0) == 2)
        renewed = len(at.lockmgr.kept)
        await until(lambda: len(at.lockmgr.kept) > renewed)
        assert (running.ended, len(at.storage.pulls)) == (["1", "2"], pulls)
        at.nameserver.pause("")
        await until(lambda: running.ended == ["1", "2", "3"])
        assert running.kinds(0) == ["granted"]


async def test_pull_refused_with_paused_is_not_logged_as_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Storage may learn of the pause before the member does."""
    caplog.set_level(logging.INFO, "batonmq")
    async with twins(1) as at, running_consumer(at) as running:
        at.storage.paused = True
        at.nameserver.assign("a", [0])
        await until(lambda: len(at.storage.pulls) > 3)
        at.storage.paused = False
        at.storage.send(0, "x")
        await until(lambda: running.ended == ["x"])
        assert running.kinds(0) == ["granted"]
    assert not own_warnings(caplog)


# ---- commits that travel with pulls (section 6.6)


async def test_acks_travel_in_pulls_and_need_no_commit_call() -> None:
    few: dict[str, Any] = {"pull_messages_max": 2, "buffer_messages_max": 2}  # credit is due soon
    async with twins(1) as at, running_consumer(at, **few) as running:
        at.nameserver.assign("a", [0])
        at.storage.send(0, "1", "2", "3")
        await until(lambda: running.ended == ["1", "2", "3"])
        await wait_for_held_pulls(at, 0)
        at.storage.send(0, "4")
        await until(lambda: at.committed(0) >= 2)
        assert at.offsets.commits == []


async def test_acks_confirmed_by_pulls_make_room_in_the_span() -> None:
    few: dict[str, Any] = {"pull_messages_max": 2, "buffer_messages_max": 1, "span_max": 8}
    async with twins(1) as at, running_consumer(at, **few) as running:
        at.storage.send(0, *map(str, range(20)))
        at.nameserver.assign("a", [0])
        await until(lambda: len(running.ended) == 20)
        assert at.offsets.commits == []


async def test_credit_counts_on_the_acks_that_travel_with_it() -> None:
    few: dict[str, Any] = {"pull_messages_max": 4, "buffer_messages_max": 4, "span_max": 4}
    async with twins(1) as at, running_consumer(at, **few) as running:
        at.storage.send(0, *map(str, range(20)))
        at.nameserver.assign("a", [0])
        await until(lambda: len(running.ended) == 20)
        assert at.offsets.commits == []
    stated = 0
    for credit in at.storage.credits:
        stated = max(stated, credit.progress.committed_offset)
        assert credit.messages_limit <= stated + 4


async def test_messages_in_handlers_that_fill_the_span_make_room_when_they_end() -> None:
    few: dict[str, Any] = {"pull_messages_max": 4, "buffer_messages_max": 4, "span_max": 4}
    few |= {"queue_concurrency": 4, "commit_interval_ms": 3_600_000}
    async with twins(1) as at, running_consumer(at, **few) as running:
        for begin in range(0, 20, 4):
            running.gate.clear()
            at.storage.send(0, *map(str, range(begin, begin + 4)))
            at.nameserver.assign("a", [0])
            await until(lambda count=begin + 4: len(running.started) == count)  # type: ignore[misc]
            await until(lambda: list(running.consumer.flow.values()) == ["count"])
            running.gate.set()
            await until(lambda count=begin + 4: len(running.ended) == count)  # type: ignore[misc]
        assert at.offsets.commits == []


async def test_acks_of_filtered_messages_travel_with_credit() -> None:
    few: dict[str, Any] = {"pull_messages_max": 2, "span_max": 8, "commit_interval_ms": 3_600_000}
    async with twins(1) as at, running_consumer(at, expression="b", **few):

        def acked_beyond(offset: int) -> Callable[[], bool]:
            return lambda: at.storage.credits[-1].progress.committed_offset > offset

        at.nameserver.assign("a", [0])
        await wait_for_held_pulls(at, 0)
        for end in range(20, 120, 20):
            at.storage.send(0, *(["a:"] * 20))
            await until(acked_beyond(end - 20))
        assert at.committed(0) > 60
        assert at.offsets.commits == []


@pytest.mark.parametrize(("commit_on_pull", "window"), [(True, 2_000), (False, 1_000)])
async def test_window_leaves_room_for_acks_that_do_not_travel(
    commit_on_pull: bool, window: int
) -> None:
    async with twins(1) as at, running_consumer(at, commit_on_pull=commit_on_pull):
        at.nameserver.assign("a", [0])
        await wait_for_held_pulls(at, 0)
        assert at.storage.credits[0].messages_limit == window


async def test_first_credit_of_a_delivery_counts_on_confirmed_acks_only() -> None:
    """The node may be a follower, which takes no acks."""
    few: dict[str, Any] = {"pull_messages_max": 4, "buffer_messages_max": 4, "span_max": 4}
    async with twins(1) as at, running_consumer(at, **few) as running:
        at.storage.send(0, *map(str, range(3)))
        at.nameserver.assign("a", [0])
        await until(lambda: len(running.ended) == 3)
        await wait_for_held_pulls(at, 0)
        at.storage.paused = True
        at.storage.wake()
        await until(lambda: len(at.storage.pulls) > 3)
        assert at.storage.credits[-1].number == 1
        assert at.storage.credits[-1].progress.committed_offset == 3
        assert at.storage.credits[-1].messages_limit == 1
        at.storage.paused = False
        at.storage.send(0, *map(str, range(3, 9)))
        await until(lambda: len(running.ended) == 9)


async def test_acks_that_a_pull_did_not_confirm_are_sent_again() -> None:
    async with twins(1) as at, running_consumer(at) as running:
        at.nameserver.assign("a", [0])
        at.storage.send(0, "1")
        await until(lambda: running.ended == ["1"])
        await wait_for_held_pulls(at, 0)
        at.nameserver.assign("b", [0])
        await until(lambda: at.lockmgr.releases == [0])
        assert at.committed(0) == 1


async def test_acks_are_committed_by_calls_without_commit_on_pull() -> None:
    settings: dict[str, Any] = {"commit_on_pull": False, "commit_interval_ms": 10}
    async with twins(1) as at, running_consumer(at, **settings):
        at.nameserver.assign("a", [0])
        at.storage.send(0, "1", "2")
        await until(lambda: 0 in at.offsets.queues and at.committed(0) == 2)
        assert not any(pull.HasField("progress") for pull in at.storage.pulls)


# ---- reset (section 13)


async def test_story_13_reset_discards_work_in_flight_and_continues_at_the_new_offset() -> None:
    async with twins(1) as at, running_consumer(at, commit_interval_ms=10) as running:
        at.nameserver.assign("a", [0])
        at.storage.send(0, "0", "1", "2")
        await until(lambda: 0 in at.offsets.queues and at.committed(0) == 3)
        running.gate.clear()
        at.storage.send(0, "3", "4")
        await until(lambda: running.started[-1] == "3")
        await wait_for_held_pulls(at, 0)
        at.offsets.reset(0, to=1)
        at.storage.wake()
        await until(lambda: running.kinds(0) == ["granted", "fenced", "granted"])
        assert not at.lockmgr.acquires[-1][1].resume, "the request claims nothing"
        assert at.committed(0) == 1
        running.gate.set()
        await until(lambda: at.committed(0) == 5)
        assert running.started == ["0", "1", "2", "3", "1", "2", "3", "4"]


async def test_story_14_result_of_a_handler_started_before_a_reset_does_not_count() -> None:
    async with twins(1) as at, running_consumer(at, commit_interval_ms=10) as running:
        running.gate.clear()
        at.nameserver.assign("a", [0])
        at.storage.send(0, "0")
        await until(lambda: running.started == ["0"])
        await wait_for_held_pulls(at, 0)
        at.offsets.reset(0, to=0)
        at.storage.wake()
        await until(lambda: running.kinds(0) == ["granted", "fenced", "granted"])
        assert running.ended == []
        running.gate.set()
        await until(lambda: at.committed(0) == 1)
        assert running.started == ["0", "0"], "the message was handled once in the new epoch"


async def test_failed_message_is_not_retried_after_a_reset() -> None:
    async with twins(1) as at:
        tries: list[int] = []
        proceed = asyncio.Event()
        async with Consumer(at.address, GROUP, {TOPIC: "*"}, SETTINGS, client_id="a") as consumer:

            async def handle(message: ReceivedMessage) -> None:
                tries.append(message.token)
                if message.token == 1:
                    await proceed.wait()
                    raise ValueError("on purpose")

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(consumer.run(handle))
                at.nameserver.assign("a", [0])
                at.storage.send(0, "0")
                await until(lambda: tries == [1])
                await wait_for_held_pulls(at, 0)
                at.offsets.reset(0, to=0)
                at.storage.wake()
                await until(lambda: len(at.lockmgr.acquires) == 2)
                await wait_for_held_pulls(at, 0)
                proceed.set()
                await until(lambda: len(tries) == 2)
                consumer.stop()
        assert tries == [1, 3]
        assert at.committed(0) == 1


# ---- release (section 9)


async def test_handlers_run_without_limit_without_a_drain_timeout() -> None:
    async with (
        twins(1) as at,
        running_consumer(at, drain_timeout_ms=None, keep_alive_ms=10) as running,
    ):
        running.gate.clear()
        at.nameserver.assign("a", [0])
        at.storage.send(0, "slow")
        await until(lambda: running.started == ["slow"])
        at.nameserver.assign("b", [0])
        await until(lambda: running.kinds(0) == ["granted", "draining"])
        renewed = len(at.lockmgr.kept)
        await until(lambda: len(at.lockmgr.kept) > renewed + 2)
        assert at.offsets.closes == []
        assert [hold.token for hold in at.lockmgr.kept[-1]] == [1], "the lease was not renewed"
        running.gate.set()
        await until(lambda: at.lockmgr.releases == [0])
        (closing,) = at.offsets.closes
        assert (closing.committed_offset, list(closing.unfinished)) == (1, [])


async def test_close_names_messages_that_outlast_the_drain_timeout_as_unfinished() -> None:
    async with twins(1) as at, running_consumer(at, drain_timeout_ms=0) as running:
        running.gate.clear()
        at.nameserver.assign("a", [0])
        at.storage.send(0, "slow", "next")
        await until(lambda: running.started == ["slow"])
        at.nameserver.assign("b", [0])
        await until(lambda: at.lockmgr.releases == [0])
        (closing,) = at.offsets.closes
        assert [(r.first_offset, r.next_offset) for r in closing.unfinished] == [(0, 1)]


async def pass_own_deadline(at: Twins, running: RunningConsumer) -> None:
    """Let the own deadline of queue 0 pass while the lock manager refuses it."""
    at.lockmgr.refusals[0] = [Held("no", retry_after_ms=60_000)]
    (queue,) = running.consumer._queues.values()
    queue.lease.deadline_ms = 0
    assert not queue.may_start()  # in the same step, before a keep-alive renews the lease
    assert running.kinds(0) == ["granted", "fenced"]
    await until(lambda: not at.lockmgr.refusals[0])


async def kept_token(at: Twins, running: RunningConsumer) -> list[int]:
    """Return the tokens of a keep-alive that is sent now."""
    count = len(at.lockmgr.kept)
    running.consumer._session.keep_alive_soon.set()
    await until(lambda: len(at.lockmgr.kept) > count)
    return [hold.token for hold in at.lockmgr.kept[-1]]


async def test_queue_revoked_after_the_own_deadline_is_drained_closed_and_released_late() -> None:
    """No service has refused the token, so the next owner need not wait for the lease."""
    async with twins(1) as at, running_consumer(at) as running:
        running.gate.clear()
        at.nameserver.assign("a", [0])
        at.storage.send(0, "runs", "waits")
        await until(lambda: running.started == ["runs"])
        await pass_own_deadline(at, running)
        assert await kept_token(at, running) == [1], "the lease was not renewed"
        at.nameserver.assign("b", [0])
        await until(lambda: running.consumer.assignment != ())
        assert at.offsets.closes == []
        running.gate.set()
        await until(lambda: at.lockmgr.releases == [0])
        (closing,) = at.offsets.closes
        assert (closing.token, closing.committed_offset, list(closing.unfinished)) == (1, 1, [])
        assert running.started == ["runs"], "a waiting message was started"
        assert running.kinds(0) == ["granted", "fenced"], (
            "the end of the grant is not reported exactly once"
        )


async def test_late_close_names_handlers_that_outlast_the_drain_timeout() -> None:
    async with twins(1) as at, running_consumer(at, drain_timeout_ms=0) as running:
        running.gate.clear()
        at.nameserver.assign("a", [0])
        at.storage.send(0, "runs")
        await until(lambda: running.started == ["runs"])
        await pass_own_deadline(at, running)
        at.nameserver.assign("b", [0])
        await until(lambda: at.lockmgr.releases == [0])
        (closing,) = at.offsets.closes
        assert [(r.first_offset, r.next_offset) for r in closing.unfinished] == [(0, 1)]


async def test_token_that_was_refused_after_the_own_deadline_is_not_closed() -> None:
    async with twins(1) as at, running_consumer(at) as running:
        at.nameserver.assign("a", [0])
        await wait_for_held_pulls(at, 0)
        await pass_own_deadline(at, running)
        at.lockmgr.states[0] = lockmgr_pb.HoldReport(state=lockmgr_pb.HOLD_STATE_NOT_OWNER)
        assert await kept_token(at, running) == [1]
        assert await kept_token(at, running) == []
        at.nameserver.assign("b", [0])
        await until(lambda: running.consumer._queues == {})
        assert (at.offsets.closes, at.lockmgr.releases) == ([], [])


# ---- ownership off (section 15)


async def test_story_15_group_without_ownership_acquires_nothing_and_commits_unions() -> None:
    async with twins(2, owned=False) as at:
        at.storage.send(0, "0", "1")
        async with running_consumer(at, commit_interval_ms=10, keep_alive_ms=10) as running:
            at.nameserver.assign("a", [0, 1])
            await until(lambda: running.ended == ["0", "1"])
            await until(lambda: at.committed(0) == 2)
            assert running.queues() == {0, 1}
            assert {pull.token for pull in at.storage.pulls} == {0}
            assert {message.token for message in running.messages} == {0}
            at.storage.send(0, "2")
            await until(lambda: running.ended == ["0", "1", "2"])
        assert at.committed(0) == 3, "the last call is a commit"
        assert running.kinds(0) == ["granted", "draining", "released"]
        lockmgr = at.lockmgr
        assert (lockmgr.acquires, lockmgr.kept, lockmgr.releases) == ([], [], [])
        assert (lockmgr.watchers, at.offsets.closes) == (0, [])


async def test_member_without_ownership_continues_at_the_groups_progress() -> None:
    async with twins(1, owned=False) as at:
        at.storage.send(0, *map(str, range(6)))
        async with running_consumer(at, commit_interval_ms=10) as running:
            at.nameserver.assign("a", [0])
            await until(lambda: at.offsets.queues and at.committed(0) == 6)
        at.offsets.queues[0].handled = {0, 1, 3}
        async with running_consumer(at, "b") as running:
            at.nameserver.assign("b", [0])
            await until(lambda: running.ended == ["2", "4", "5"])


async def test_commit_without_new_acks_is_due_half_a_lease_after_the_last() -> None:
    """Such a commit renews the lease, and finds out about a reset."""
    session = Session(
        group=GROUP,
        incarnation=queue_pb2.Incarnation(client_id="a", incarnation_id=1),
        settings=SETTINGS,
        directory=Directory("127.0.0.1:1", Random(1)),
        clock=Clock(),
        random=Random(1),
        on_ownership=lambda _: None,
        view=GroupView(owned=False),
    )
    queue = AssignedQueue(session, QueueRef(TOPIC, "broker-a", 0))
    queue.begin(AcquiredQueue(GrantedProgress(0, 0, 7)))
    progress = queue.progress
    assert progress is not None
    first = queue.acks_due(0)
    assert first is not None
    assert first.committed == 7
    queue.committed(progress, first, sent_ms=0)
    assert queue.acks_due(11_999) is None
    assert queue.acks_due(12_000) is not None
    progress.receive(8, [])
    assert queue.acks_due(1) is not None


async def test_start_offset_without_ownership_and_progress_is_committed_once() -> None:
    async with twins(1, owned=False) as at:
        at.storage.send(0, "before")
        async with running_consumer(at, consume_from="last") as running:
            at.nameserver.assign("a", [0])
            await wait_for_held_pulls(at, 0)
            assert at.committed(0) == 1, "committed though nothing was handled"
            at.storage.send(0, "after")
            await until(lambda: running.ended == ["after"])


async def test_reset_without_ownership_is_found_by_the_next_commit() -> None:
    async with twins(1, owned=False) as at:
        at.storage.send(0, "0", "1", "2")
        async with running_consumer(at, commit_interval_ms=10) as running:
            at.nameserver.assign("a", [0])
            await until(lambda: at.offsets.queues and at.committed(0) == 3)
            await wait_for_held_pulls(at, 0)
            at.offsets.reset(0, to=1)
            at.storage.send(0, "3")
            await until(lambda: at.committed(0) == 4)
            assert running.started == ["0", "1", "2", "3", "1", "2", "3"]


@pytest.mark.parametrize("owned", [True, False])
async def test_group_that_changed_its_mode_is_consumed_in_the_new_mode(owned: bool) -> None:
    async with twins(1, owned=owned) as at, running_consumer(at) as running:
        at.nameserver.assign("a", [0])
        at.storage.send(0, "0")
        await until(lambda: running.ended == ["0"])
        await wait_for_held_pulls(at, 0)
        at.offsets.queues[0] = replace(at.offsets.queues[0], closed=True, handled={0})
        at.set_owned(owned=not owned)
        at.storage.send(0, "1")
        await until(lambda: running.ended == ["0", "1"])
        assert running.kinds(0) == ["granted", "fenced", "granted"]
        assert bool(running.messages[-1].token) != owned
        assert at.offsets.closes == []


async def test_mode_changed_from_a_server_fetches_the_record_and_drops_work_in_flight() -> None:
    async with twins(1) as at, running_consumer(at) as running:
        running.gate.clear()
        at.nameserver.assign("a", [0])
        at.storage.send(0, "0", "1")
        await until(lambda: running.started == ["0"])
        await wait_for_held_pulls(at, 0)
        beats = len(at.nameserver.heartbeats)
        at.offsets.owned = False
        at.storage.wake()
        await until(lambda: len(at.nameserver.heartbeats) > beats)
        assert running.kinds(0) == ["granted", "fenced"]
        at.set_owned(owned=False)
        await until(lambda: running.kinds(0) == ["granted", "fenced", "granted"])
        running.gate.set()
        await until(lambda: running.ended == ["0", "1"])
        assert running.started == ["0", "0", "1"]


async def test_message_is_handled_only_when_a_returned_coroutine_has_ended() -> None:
    """A plain function may return a coroutine, as lambdas often do."""
    gate = asyncio.Event()
    seen: list[str] = []

    async def handle(message: ReceivedMessage) -> None:
        seen.append(message.body.decode())
        await gate.wait()

    def plain(message: ReceivedMessage) -> object:
        return handle(message)

    async with twins(1) as at:
        consumer = Consumer(at.address, GROUP, {TOPIC: "*"}, SETTINGS, client_id="a")
        async with consumer, asyncio.TaskGroup() as tasks:
            tasks.create_task(consumer.run(plain))
            at.nameserver.assign("a", [0])
            at.storage.send(0, "first", "second")
            await until(lambda: seen == ["first"])
            assert at.committed(0) == 0
            gate.set()
            await until(lambda: seen == ["first", "second"])
            at.nameserver.assign("b", [0])
            await until(lambda: at.committed(0) == 2)
            consumer.stop()


# ---- the position (section 6.8)


async def test_owner_states_its_position_with_each_credit() -> None:
    async with (
        twins(1) as at,
        running_consumer(at, pull_messages_max=1, buffer_messages_max=2) as running,
    ):
        at.nameserver.assign("a", [0])
        at.storage.send(0, *map(str, range(10)))
        await until(lambda: len(running.ended) == 10)
        positions = [credit.received_offset for credit in at.storage.credits]
        assert positions == sorted(positions)
        assert positions[0] == 0
        assert 8 <= positions[-1] <= 10, "the window is two messages"


async def test_idle_owner_states_its_position_to_a_new_epoch_of_offsets() -> None:
    async with twins(1) as at, running_consumer(at, commit_interval_ms=10) as running:
        at.nameserver.assign("a", [0])
        at.storage.send(0, "1", "2")
        await until(lambda: running.ended == ["1", "2"])
        await until(lambda: [item.received_offset for item in at.offsets.commits][-1:] == [2])
