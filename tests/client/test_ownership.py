"""How a consumer follows its group's record and what the servers say of its queues.

Goal: a consumer has the queues that are dealt to it and no others; queues that stay are not
touched when others move; whatever ends a token, nothing is started, acked or forgotten that
must not be (protocol sections 5, 6, 9, 11, 13, 14, 15).
Method: real gRPC, and behind it a cluster of one process that the test tells what to do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
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
from tests.support.waiting import until

SETTINGS = ConsumerSettings(
    consume_from="first",
    commit_interval_ms=60_000,
    keep_alive_ms=60_000,
    drain_timeout_ms=5_000,
    retry_first_ms=1,
    send_back=False,
)
"""Nothing happens by the clock: what happens, something has caused."""


@dataclass
class Life:
    """A consumer that runs, and what it has done.

    Attributes:
        gate: While it is cleared, handlers wait.
        started: Bodies of the messages whose handlers were started.
        ended: Of those, whose handlers ended well.
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
async def living(
    at: Twins, client_id: str = "a", expression: str = "*", **settings: Any
) -> AsyncIterator[Life]:
    """A member that handles what it gets until the block ends."""
    events: list[OwnershipEvent] = []
    consumer = Consumer(
        at.address,
        GROUP,
        {TOPIC: expression},
        replace(SETTINGS, **settings),
        client_id=client_id,
        on_ownership=events.append,
    )
    life = Life(consumer, asyncio.Event(), events=events)
    life.gate.set()

    async def handle(message: ReceivedMessage) -> None:
        life.messages.append(message)
        life.started.append(message.body.decode())
        await life.gate.wait()
        life.ended.append(message.body.decode())

    async with consumer, asyncio.TaskGroup() as tasks:
        tasks.create_task(consumer.run(handle))
        yield life
        life.gate.set()
        consumer.stop()


async def parked(at: Twins, *queues: int) -> None:
    """Until exactly these queues have a pull that waits for messages."""
    await until(lambda: sorted(at.storage.parked) == sorted(queues))


# ---- assignment


async def test_a_consumer_acquires_what_is_dealt_to_it_and_nothing_else() -> None:
    async with twins(4) as at, living(at) as life:
        at.nameserver.give("somebody", [0])
        at.nameserver.give("a", [1, 3])
        await parked(at, 1, 3)
        assert life.queues() == {1, 3}
        assert {queue_id for queue_id, _ in at.lockmgr.acquires} == {1, 3}


async def test_queues_that_stay_are_not_touched_when_others_move() -> None:
    async with twins(4) as at, living(at) as life:
        at.nameserver.give("a", [0, 1])
        await parked(at, 0, 1)
        pulls = len(at.storage.pulls_of(0))
        at.nameserver.give("a", [2])
        await parked(at, 0, 1, 2)
        at.nameserver.give("b", [1])
        await until(lambda: at.lockmgr.releases == [1])
        for _ in range(10):
            at.nameserver.change()
        at.nameserver.give("a", [3])
        await parked(at, 0, 2, 3)
        assert life.kinds(0) == ["granted"], "it was never fenced, drained or granted anew"
        assert len(at.storage.pulls_of(0)) == pulls, "the pull that waited waits still"
        assert [queue_id for queue_id, _ in at.lockmgr.acquires] == [0, 1, 2, 3]
        at.storage.send(0, "x")
        await until(lambda: life.ended == ["x"])


async def test_a_handler_goes_on_through_a_rebalance_that_leaves_its_queue() -> None:
    async with twins(2) as at, living(at) as life:
        life.gate.clear()
        at.nameserver.give("a", [0, 1])
        at.storage.send(0, "slow", "next")
        await until(lambda: life.started == ["slow"])
        at.nameserver.give("b", [1])
        await until(lambda: at.lockmgr.releases == [1])
        life.gate.set()
        await until(lambda: life.ended == ["slow", "next"])
        assert life.kinds(0) == ["granted"]


async def test_a_record_that_is_older_than_the_one_known_changes_nothing() -> None:
    async with twins(1) as at, living(at) as life:
        at.nameserver.give("a", [0])
        await parked(at, 0)

        def older(group: nameserver_pb.Group) -> None:
            group.generation -= 10

        at.nameserver.deal.clear()
        at.nameserver.change(older)
        at.nameserver.give("a", [0])  # still older, and seen after the one before
        assert life.kinds(0) == ["granted"]


async def test_a_member_that_was_removed_keeps_its_queues_until_it_is_back() -> None:
    """Section 9: it is told by the record; what is not its any more it gives back then."""
    async with twins(2) as at, living(at) as life:
        at.nameserver.give("a", [0, 1])
        await parked(at, 0, 1)
        beats = len(at.nameserver.heartbeats)
        at.nameserver.deal = {1: "a"}
        at.nameserver.change(lambda group: group.members.pop())
        await until(lambda: len(at.nameserver.heartbeats) > beats)
        await until(lambda: life.kinds(0) == ["granted", "draining", "released"])
        assert life.kinds(1) == ["granted"]


# ---- session


async def test_more_queues_than_one_keep_alive_takes_are_renewed_by_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease_renewer, "HOLDS_MAX", 2)
    async with twins(5) as at, living(at, keep_alive_ms=10) as life:
        at.nameserver.give("a", range(5))
        await parked(at, *range(5))

        def renewed() -> bool:
            recent = at.lockmgr.kept[-6:]
            named = {hold.queue.queue.queue_id for call in recent for hold in call}
            return [len(call) for call in recent].count(1) == 2 and len(named) == 5

        await until(renewed)
        assert life.queues() == set(range(5))
        assert max(map(len, at.lockmgr.kept)) == 2


async def test_the_group_watch_names_its_member_and_a_broken_one_brings_a_heartbeat_at_once() -> (
    None
):
    async with twins(1) as at, living(at) as life:
        at.nameserver.give("a", [0])
        await parked(at, 0)
        (member,) = at.nameserver.group.members
        assert at.nameserver.sessions == [member.incarnation]
        beats = len(at.nameserver.heartbeats)
        at.nameserver.break_sessions()
        await until(lambda: len(at.nameserver.heartbeats) > beats)
        await until(lambda: len(at.nameserver.sessions) == 2)
        assert at.nameserver.sessions[1] == member.incarnation
        assert life.kinds(0) == ["granted"]


# ---- notices of lockmgr (section 5)


async def test_a_waiter_makes_the_owner_look_at_its_group_and_keep_what_is_its() -> None:
    async with twins(1) as at, living(at) as life:
        at.nameserver.give("a", [0])
        await parked(at, 0)
        beats = len(at.nameserver.heartbeats)
        at.lockmgr.want(0, lockmgr_pb.WANTED_REASON_WAITER)
        await until(lambda: len(at.nameserver.heartbeats) == beats + 1)
        assert life.kinds(0) == ["granted"]


async def test_a_waiter_is_let_in_by_an_owner_that_has_missed_the_push() -> None:
    async with twins(1) as at, living(at) as life:
        at.nameserver.give("a", [0])
        await parked(at, 0)
        at.nameserver.deal = {0: "b"}
        at.nameserver.change_unheard()
        at.lockmgr.want(0, lockmgr_pb.WANTED_REASON_WAITER)
        await until(lambda: life.kinds(0) == ["granted", "draining", "released"])


async def test_an_owner_that_is_no_member_any_more_joins_again() -> None:
    async with twins(1) as at, living(at) as life:
        at.nameserver.give("a", [0])
        await parked(at, 0)
        beats = len(at.nameserver.heartbeats)
        at.lockmgr.want(0, lockmgr_pb.WANTED_REASON_NOT_MEMBER)
        await until(lambda: len(at.nameserver.heartbeats) == beats + 1)
        assert life.kinds(0) == ["granted"]


async def test_a_change_of_the_subscription_makes_a_member_give_back_every_queue() -> None:
    """Section 14; the record that says so comes later here."""
    async with twins(3) as at, living(at) as life:
        at.nameserver.give("a", [0, 1, 2])
        await parked(at, 0, 1, 2)
        for queue_id in range(3):
            at.lockmgr.refusals[queue_id] = [SubscriptionDraining("it drains")] * 3
        at.lockmgr.want(1, lockmgr_pb.WANTED_REASON_SUBSCRIPTION)
        await until(lambda: sorted(at.lockmgr.releases) == [0, 1, 2])
        assert {item.queue.queue.queue_id for item in at.offsets.closes} == {0, 1, 2}
        await parked(at, 0, 1, 2)
        assert life.kinds(0) == ["granted", "draining", "released", "granted"]


async def test_a_notice_about_an_earlier_token_is_ignored() -> None:
    async with twins(1) as at, living(at) as life:
        at.nameserver.give("a", [0])
        await parked(at, 0)
        at.lockmgr.want(0, lockmgr_pb.WANTED_REASON_WAITER)
        late = lockmgr_pb.Wanted(token=99, reason=lockmgr_pb.WANTED_REASON_SUBSCRIPTION)
        late.queue.CopyFrom(at.lockmgr.acquires[0][1].queue)
        at.lockmgr.tell(lockmgr_pb.WatchResponse(wanted=late))
        beats = len(at.nameserver.heartbeats)
        at.lockmgr.want(0, lockmgr_pb.WANTED_REASON_WAITER)
        await until(lambda: len(at.nameserver.heartbeats) > beats)
        assert life.kinds(0) == ["granted"]


async def test_a_queue_that_became_free_is_asked_for_at_once() -> None:
    async with twins(1) as at, living(at) as life:
        at.lockmgr.refusals[0] = [Held("it is held", retry_after_ms=3_600_000)]
        at.nameserver.give("a", [0])
        await until(lambda: len(at.lockmgr.acquires) == 1)
        await until(lambda: at.lockmgr.watchers == 1)
        await asked_again(at)
        await until(lambda: life.queues() == {0})


async def asked_again(at: Twins) -> None:
    """Tell that the queue is free until it is asked for: the stream may not be open yet."""

    def told() -> bool:
        at.lockmgr.free(0)
        return len(at.lockmgr.acquires) == 2

    await until(told)


async def test_a_lost_watch_is_reopened_and_keep_alives_tell_meanwhile() -> None:
    async with twins(1) as at, living(at, keep_alive_ms=10) as life:
        at.nameserver.give("a", [0])
        await parked(at, 0)
        await until(lambda: at.lockmgr.watchers == 1)
        at.lockmgr.tell(None)
        await until(lambda: at.lockmgr.watchers == 2)
        at.lockmgr.states[0] = lockmgr_pb.HoldReport(
            state=lockmgr_pb.HOLD_STATE_WANTED, wanted_reason=lockmgr_pb.WANTED_REASON_WAITER
        )
        beats = len(at.nameserver.heartbeats)
        await until(lambda: len(at.nameserver.heartbeats) > beats)
        assert life.kinds(0) == ["granted"]


@pytest.mark.parametrize("refusal", [NotAssigned("newer"), NotMember("removed")])
async def test_an_asker_whose_record_is_old_fetches_the_new_one(refusal: BatonError) -> None:
    async with twins(1) as at, living(at):
        at.lockmgr.refusals[0] = [refusal]
        beats = len(at.nameserver.heartbeats)
        at.nameserver.give("a", [0])
        await parked(at, 0)
        assert len(at.nameserver.heartbeats) == beats + 1


# ---- subscriptions (section 14)


async def test_pulls_name_the_groups_filter_and_its_generation_whatever_was_asked_for() -> None:
    async with twins(1) as at, living(at, expression="mine") as life:
        at.nameserver.subscribe("theirs")
        at.nameserver.give("a", [0])
        at.storage.send(0, "mine:1", "theirs:2", "mine:3")
        await until(lambda: life.ended == ["theirs:2"])
        generation = at.nameserver.group.subscription_generation
        (pull, *_) = at.storage.pulls
        assert (pull.expression, pull.subscription_generation) == ("theirs", generation)


async def test_another_filter_counts_from_the_next_pull_and_no_token_changes() -> None:
    """As under the policy WARN."""
    async with twins(1) as at, living(at, expression="old") as life:
        at.nameserver.give("a", [0])
        at.storage.send(0, "old:1", "new:2")
        await parked(at, 0)
        at.nameserver.subscribe("new")
        await until(lambda: at.storage.pulls[-1].expression == "new")
        at.storage.send(0, "old:3", "new:4")
        await until(lambda: life.ended == ["old:1", "new:4"])
        assert life.kinds(0) == ["granted"]


async def test_a_grant_for_a_newer_subscription_waits_for_the_record_that_has_it() -> None:
    async with twins(1) as at, living(at, expression="old") as life:
        at.lockmgr.bound = at.nameserver.group.subscription_generation + 1
        at.storage.send(0, "old:1", "new:2")
        beats = len(at.nameserver.heartbeats)
        at.nameserver.give("a", [0])
        await until(lambda: len(at.nameserver.heartbeats) > beats)
        assert at.storage.pulls == []
        at.nameserver.subscribe("new")
        await until(lambda: life.ended == ["new:2"])
        assert life.kinds(0) == ["granted"]


async def test_a_pull_refused_for_its_subscription_acquires_the_queue_again() -> None:
    async with twins(1) as at, living(at) as life:
        at.nameserver.give("a", [0])
        await parked(at, 0)
        at.lockmgr.bound = at.offsets.queues[0].bound = 2
        at.storage.wake()
        await until(lambda: life.kinds(0) == ["granted", "fenced", "granted"])
        at.nameserver.subscribe("*")
        at.storage.send(0, "x")
        await until(lambda: life.ended == ["x"])


async def test_a_staged_member_is_told_so_and_has_no_queue(
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
        async with living(at, "new", "b") as life:
            verdict = life.consumer.verdict
            assert verdict.kind == "staged"
            (difference,) = verdict.differences
            assert (difference.newcomer_value, difference.member_value) == ("b", "a")
            assert f"{TOPIC}: new requests 'b', old has 'a'" in caplog.text
            assert life.queues() == set()
            at.nameserver.verdict = nameserver_pb.HeartbeatResponse(
                verdict=nameserver_pb.SUBSCRIPTION_VERDICT_ACCEPTED
            )
            at.nameserver.subscribe("b")
            await until(lambda: life.consumer.verdict.kind == "accepted")


# ---- pause


async def test_a_paused_group_is_not_pulled_for_and_what_is_in_hand_is_finished() -> None:
    async with twins(1) as at, living(at, commit_interval_ms=10, keep_alive_ms=10) as life:
        life.gate.clear()
        at.nameserver.give("a", [0])
        at.storage.send(0, "1", "2")
        await until(lambda: life.started == ["1"])
        await parked(at, 0)
        at.nameserver.pause("ann")
        await parked(at)
        pulls = len(at.storage.pulls)
        at.storage.send(0, "3")
        life.gate.set()
        await until(lambda: at.committed(0) == 2)
        renewed = len(at.lockmgr.kept)
        await until(lambda: len(at.lockmgr.kept) > renewed)
        assert (life.ended, len(at.storage.pulls)) == (["1", "2"], pulls)
        at.nameserver.pause("")
        await until(lambda: life.ended == ["1", "2", "3"])
        assert life.kinds(0) == ["granted"]


async def test_a_pull_refused_because_of_a_pause_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Storage may know of the pause before the member does."""
    caplog.set_level(logging.INFO, "batonmq")
    async with twins(1) as at, living(at) as life:
        at.storage.paused = True
        at.nameserver.give("a", [0])
        await until(lambda: len(at.storage.pulls) > 3)
        at.storage.paused = False
        at.storage.send(0, "x")
        await until(lambda: life.ended == ["x"])
        assert life.kinds(0) == ["granted"]
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


# ---- commits that travel with pulls (section 6.6)


async def test_acks_ride_in_pulls_and_are_committed_without_a_call_of_their_own() -> None:
    async with twins(1) as at, living(at, pull_messages_max=2) as life:
        at.nameserver.give("a", [0])
        at.storage.send(0, "1", "2", "3")
        await until(lambda: life.ended == ["1", "2", "3"])
        await parked(at, 0)
        at.storage.send(0, "4")
        await until(lambda: at.committed(0) >= 2)
        assert at.offsets.commits == []


async def test_acks_that_pulls_have_taken_make_room_for_more() -> None:
    few: dict[str, Any] = {"pull_messages_max": 2, "buffer_messages_max": 1, "span_max": 8}
    async with twins(1) as at, living(at, **few) as life:
        at.storage.send(0, *map(str, range(20)))
        at.nameserver.give("a", [0])
        await until(lambda: len(life.ended) == 20)
        assert at.offsets.commits == []


async def test_acks_that_a_pull_did_not_take_are_told_again() -> None:
    async with twins(1) as at, living(at) as life:
        at.nameserver.give("a", [0])
        at.storage.send(0, "1")
        await until(lambda: life.ended == ["1"])
        await parked(at, 0)
        at.nameserver.give("b", [0])
        await until(lambda: at.lockmgr.releases == [0])
        assert at.committed(0) == 1


async def test_without_commit_on_pull_acks_are_committed_by_calls() -> None:
    settings: dict[str, Any] = {"commit_on_pull": False, "commit_interval_ms": 10}
    async with twins(1) as at, living(at, **settings):
        at.nameserver.give("a", [0])
        at.storage.send(0, "1", "2")
        await until(lambda: 0 in at.offsets.queues and at.committed(0) == 2)
        assert not any(pull.HasField("progress") for pull in at.storage.pulls)


# ---- reset (section 13)


async def test_story_13_a_reset_discards_what_is_in_hand_and_goes_on_at_the_new_place() -> None:
    async with twins(1) as at, living(at, commit_interval_ms=10) as life:
        at.nameserver.give("a", [0])
        at.storage.send(0, "0", "1", "2")
        await until(lambda: 0 in at.offsets.queues and at.committed(0) == 3)
        life.gate.clear()
        at.storage.send(0, "3", "4")
        await until(lambda: life.started[-1] == "3")
        await parked(at, 0)
        at.offsets.reset(0, to=1)
        at.storage.wake()
        await until(lambda: life.kinds(0) == ["granted", "fenced", "granted"])
        assert not at.lockmgr.acquires[-1][1].resume, "nothing is brought along"
        assert at.committed(0) == 1
        life.gate.set()
        await until(lambda: at.committed(0) == 5)
        assert life.started == ["0", "1", "2", "3", "1", "2", "3", "4"]


async def test_story_14_the_result_of_a_handler_begun_before_a_reset_does_not_count() -> None:
    async with twins(1) as at, living(at, commit_interval_ms=10) as life:
        life.gate.clear()
        at.nameserver.give("a", [0])
        at.storage.send(0, "0")
        await until(lambda: life.started == ["0"])
        await parked(at, 0)
        at.offsets.reset(0, to=0)
        at.storage.wake()
        await until(lambda: life.kinds(0) == ["granted", "fenced", "granted"])
        assert life.ended == []
        life.gate.set()
        await until(lambda: at.committed(0) == 1)
        assert life.started == ["0", "0"], "it was handled once in the new epoch"


async def test_a_message_that_fails_is_not_tried_again_after_a_reset() -> None:
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
                at.nameserver.give("a", [0])
                at.storage.send(0, "0")
                await until(lambda: tries == [1])
                await parked(at, 0)
                at.offsets.reset(0, to=0)
                at.storage.wake()
                await until(lambda: len(at.lockmgr.acquires) == 2)
                await parked(at, 0)
                proceed.set()
                await until(lambda: len(tries) == 2)
                consumer.stop()
        assert tries == [1, 3]
        assert at.committed(0) == 1


# ---- giving back (section 9)


async def test_handlers_may_take_as_long_as_they_like_without_a_drain_timeout() -> None:
    async with twins(1) as at, living(at, drain_timeout_ms=None, keep_alive_ms=10) as life:
        life.gate.clear()
        at.nameserver.give("a", [0])
        at.storage.send(0, "slow")
        await until(lambda: life.started == ["slow"])
        at.nameserver.give("b", [0])
        await until(lambda: life.kinds(0) == ["granted", "draining"])
        renewed = len(at.lockmgr.kept)
        await until(lambda: len(at.lockmgr.kept) > renewed + 2)
        assert at.offsets.closes == []
        assert [hold.token for hold in at.lockmgr.kept[-1]] == [1], "it is renewed meanwhile"
        life.gate.set()
        await until(lambda: at.lockmgr.releases == [0])
        (closing,) = at.offsets.closes
        assert (closing.committed_offset, list(closing.unfinished)) == (1, [])


async def test_what_outlasts_the_drain_timeout_is_told_as_unfinished() -> None:
    async with twins(1) as at, living(at, drain_timeout_ms=0) as life:
        life.gate.clear()
        at.nameserver.give("a", [0])
        at.storage.send(0, "slow", "next")
        await until(lambda: life.started == ["slow"])
        at.nameserver.give("b", [0])
        await until(lambda: at.lockmgr.releases == [0])
        (closing,) = at.offsets.closes
        assert [(r.first_offset, r.next_offset) for r in closing.unfinished] == [(0, 1)]


# ---- ownership off (section 15)


async def test_story_15_without_ownership_nothing_is_acquired_and_acks_are_unions() -> None:
    async with twins(2, owned=False) as at:
        at.storage.send(0, "0", "1")
        async with living(at, commit_interval_ms=10, keep_alive_ms=10) as life:
            at.nameserver.give("a", [0, 1])
            await until(lambda: life.ended == ["0", "1"])
            await until(lambda: at.committed(0) == 2)
            assert life.queues() == {0, 1}
            assert {pull.token for pull in at.storage.pulls} == {0}
            assert {message.token for message in life.messages} == {0}
            at.storage.send(0, "2")
            await until(lambda: life.ended == ["0", "1", "2"])
        assert at.committed(0) == 3, "it ends by committing"
        assert life.kinds(0) == ["granted", "draining", "released"]
        lockmgr = at.lockmgr
        assert (lockmgr.acquires, lockmgr.kept, lockmgr.releases) == ([], [], [])
        assert (lockmgr.watchers, at.offsets.closes) == (0, [])


async def test_without_ownership_a_member_goes_on_where_the_group_is() -> None:
    async with twins(1, owned=False) as at:
        at.storage.send(0, *map(str, range(6)))
        async with living(at, commit_interval_ms=10) as life:
            at.nameserver.give("a", [0])
            await until(lambda: at.offsets.queues and at.committed(0) == 6)
        at.offsets.queues[0].handled = {0, 1, 3}
        async with living(at, "b") as life:
            at.nameserver.give("b", [0])
            await until(lambda: life.ended == ["2", "4", "5"])


async def test_what_was_said_of_a_queue_lately_is_not_said_again_too_soon() -> None:
    """Without news a commit goes out half a lease later: so a reset is found, a lease renewed."""
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


async def test_without_ownership_and_progress_where_to_start_is_decided_once() -> None:
    async with twins(1, owned=False) as at:
        at.storage.send(0, "before")
        async with living(at, consume_from="last") as life:
            at.nameserver.give("a", [0])
            await parked(at, 0)
            assert at.committed(0) == 1, "although nothing was handled"
            at.storage.send(0, "after")
            await until(lambda: life.ended == ["after"])


async def test_without_ownership_a_reset_is_found_by_the_next_commit() -> None:
    async with twins(1, owned=False) as at:
        at.storage.send(0, "0", "1", "2")
        async with living(at, commit_interval_ms=10) as life:
            at.nameserver.give("a", [0])
            await until(lambda: at.offsets.queues and at.committed(0) == 3)
            await parked(at, 0)
            at.offsets.reset(0, to=1)
            at.storage.send(0, "3")
            await until(lambda: at.committed(0) == 4)
            assert life.started == ["0", "1", "2", "3", "1", "2", "3"]


@pytest.mark.parametrize("owned", [True, False])
async def test_a_group_that_changed_its_mode_is_consumed_in_the_new_one(owned: bool) -> None:
    async with twins(1, owned=owned) as at, living(at) as life:
        at.nameserver.give("a", [0])
        at.storage.send(0, "0")
        await until(lambda: life.ended == ["0"])
        await parked(at, 0)
        at.offsets.queues[0] = replace(at.offsets.queues[0], closed=True, handled={0})
        at.set_owned(owned=not owned)
        at.storage.send(0, "1")
        await until(lambda: life.ended == ["0", "1"])
        assert life.kinds(0) == ["granted", "fenced", "granted"]
        assert bool(life.messages[-1].token) != owned
        assert at.offsets.closes == []


async def test_mode_changed_from_a_server_brings_the_record_and_drops_what_is_in_hand() -> None:
    async with twins(1) as at, living(at) as life:
        life.gate.clear()
        at.nameserver.give("a", [0])
        at.storage.send(0, "0", "1")
        await until(lambda: life.started == ["0"])
        await parked(at, 0)
        beats = len(at.nameserver.heartbeats)
        at.offsets.owned = False
        at.storage.wake()
        await until(lambda: len(at.nameserver.heartbeats) > beats)
        assert life.kinds(0) == ["granted", "fenced"]
        at.set_owned(owned=False)
        await until(lambda: life.kinds(0) == ["granted", "fenced", "granted"])
        life.gate.set()
        await until(lambda: life.ended == ["0", "1"])
        assert life.started == ["0", "0", "1"]


async def test_a_message_is_not_handled_while_what_its_handler_returned_is_not_awaited() -> None:
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
            at.nameserver.give("a", [0])
            at.storage.send(0, "first", "second")
            await until(lambda: seen == ["first"])
            assert at.committed(0) == 0
            gate.set()
            await until(lambda: seen == ["first", "second"])
            at.nameserver.give("b", [0])
            await until(lambda: at.committed(0) == 2)
            consumer.stop()
