"""The consumer, on a real cluster.

Goal: every message of a group is handled once, in the order of its queue, while members join and
leave; a message whose handler did not end is redelivered, flagged; a member with another
subscription is rejected with the differences.
Method: real services; each test has its own topic and group; handlers wait for events of the test,
so that nothing depends on speed.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from random import Random

import pytest

from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from batonmq._connection.directory import Directory
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message, tag_hash
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from batonmq.errors import (
    BadExpression,
    ClientIdInUse,
    InvalidArgument,
    SubscriptionConflict,
    TopicNotFound,
    Unreachable,
)
from tests.client.group import QUICK, Scene, handle_all, scene
from tests.support.conditions import until

pytestmark = pytest.mark.e2e


def numbers(count: int, first: int = 0) -> list[str]:
    return [str(number) for number in range(first, first + count)]


def assert_once_and_in_order(at: Scene, bodies: list[str]) -> None:
    assert at.bodies == dict.fromkeys(bodies, 1)
    assert not any(one.redelivered for one in at.handled)
    for queue in {one.queue for one in at.handled}:
        offsets = [one.offset for one in at.handled if one.queue == queue]
        assert offsets == sorted(offsets)


async def committed(at: Scene) -> None:
    async def done() -> bool:
        return await at.lag() == 0

    await until(done)


# ---- handlers


async def test_coroutine_handles_every_message_once_and_in_order(nameserver: str) -> None:
    async with scene(nameserver) as at:
        await at.send(numbers(500))
        async with handle_all(at, "a"):
            await until(lambda: len(at.handled) == 500)
        assert_once_and_in_order(at, numbers(500))
        assert {one.attempts for one in at.handled} == {1}
        await committed(at)


async def test_plain_function_runs_in_threads(nameserver: str) -> None:
    async with scene(nameserver) as at:
        await at.send(numbers(40))
        barrier = threading.Barrier(4, timeout=50)
        threads: set[str] = set()

        async with at.consumer("a") as consumer, asyncio.TaskGroup() as tasks:

            def handle(message: ReceivedMessage) -> None:
                if message.offset == 0:
                    barrier.wait()  # returns only if all four queues are handled at once
                threads.add(threading.current_thread().name)
                at.note(consumer, message)

            tasks.create_task(consumer.run(handle))
            await until(lambda: len(at.handled) == 40)
            consumer.stop()
        assert_once_and_in_order(at, numbers(40))
        assert threading.current_thread().name not in threads


async def test_failed_message_is_retried_while_other_queues_go_on(nameserver: str) -> None:
    async with scene(nameserver, queue_count=2) as at:
        await at.send(["bad", "behind"], queue_id=0)
        await at.send(numbers(50), queue_id=1)
        async with at.consumer("a") as consumer, asyncio.TaskGroup() as tasks:

            async def handle(message: ReceivedMessage) -> None:
                at.note(consumer, message)
                others = sum(one.queue.queue_id == 1 for one in at.handled)
                if message.body == b"bad" and (message.attempts < 3 or others < 50):
                    raise ValueError("on purpose")

            tasks.create_task(consumer.run(handle))
            await until(lambda: at.bodies["behind"])
            consumer.stop()
        attempts = [one.attempts for one in at.handled if one.body == "bad"]
        assert len(attempts) >= 3
        assert attempts == list(range(1, len(attempts) + 1))
        assert at.by("a")[-1] == "behind", "in order: not before the failed message"
        assert at.bodies == {"bad": len(attempts), "behind": 1} | dict.fromkeys(numbers(50), 1)


async def test_concurrency_limits_handlers_that_run_at_once(nameserver: str) -> None:
    async with scene(nameserver, queue_count=4) as at:
        for queue_id in range(4):
            await at.send([f"{queue_id}"], queue_id=queue_id)
        running, most = set[int](), list[int]()
        settings = replace(QUICK, concurrency=2)
        async with at.consumer("a", settings=settings) as consumer, asyncio.TaskGroup() as tasks:

            async def handle(message: ReceivedMessage) -> None:
                running.add(message.queue_id)
                most.append(len(running))
                if len(most) <= 2:
                    await until(lambda: len(most) >= 2)
                running.discard(message.queue_id)

            tasks.create_task(consumer.run(handle))
            await until(lambda: len(most) == 4)
            consumer.stop()
        assert max(most) == 2


# ---- iteration


async def test_next_message_of_the_iteration_acknowledges_the_previous_one(nameserver: str) -> None:
    async with scene(nameserver, queue_count=1) as at:
        await at.send(numbers(10), queue_id=0)
        patient = replace(QUICK, drain_timeout_ms=60_000)
        async with asyncio.timeout(40), at.consumer("a", settings=patient) as consumer:
            async for message in consumer:
                at.note(consumer, message)
                if message.body == b"5":
                    break
        async with handle_all(at, "b"):
            await until(lambda: at.bodies["9"])
        assert at.by("a") == numbers(6)
        assert at.by("b") == ["5", "6", "7", "8", "9"]
        flagged = [one.body for one in at.handled if one.redelivered]
        assert flagged == ["5"], "the message was started and not finished"


async def test_block_that_fails_leaves_its_message_to_the_next_member(nameserver: str) -> None:
    async with scene(nameserver, queue_count=1) as at:
        await at.send(["x"], queue_id=0)
        with pytest.raises(ValueError, match="on purpose"):
            async with at.consumer("a") as consumer:
                async for message in consumer:
                    at.note(consumer, message)
                    raise ValueError("on purpose")
        async with handle_all(at, "b"):
            await until(lambda: at.by("b"))
        assert [(one.client_id, one.redelivered) for one in at.handled] == [
            ("a", False),
            ("b", True),
        ]


async def test_consumer_whose_run_is_cancelled_starts_no_more_messages(nameserver: str) -> None:
    async with scene(nameserver, queue_count=1) as at:
        async with at.consumer("a") as consumer:

            async def handle(message: ReceivedMessage) -> None:
                at.note(consumer, message)

            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(consumer.run(handle))
                await at.send(numbers(1))
                await until(lambda: at.bodies.total() == 1)
                with pytest.raises(InvalidArgument, match="a handler already"):
                    await consumer.run(handle)
                running.cancel()
            await at.send(numbers(10, first=1))
            await consumer.run(handle)
            await asyncio.sleep(0.5)
            assert at.bodies.total() == 1
        async with handle_all(at, "b"):
            await until(lambda: at.bodies.total() == 11)
        assert at.by("b") == numbers(10, first=1)


async def test_stop_ends_the_iteration(nameserver: str) -> None:
    async with scene(nameserver) as at, at.consumer("a") as consumer:
        async with asyncio.TaskGroup() as tasks:

            async def read() -> None:
                async for message in consumer:
                    at.note(consumer, message)

            reading = tasks.create_task(read())
            await until(lambda: len(consumer.assignment) == 4)
            consumer.stop()
            await reading
        assert at.handled == []


@pytest.mark.parametrize("how", ["iteration", "run"])
async def test_queues_of_a_stopped_consumer_go_to_the_next_member_while_its_block_goes_on(
    nameserver: str, how: str
) -> None:
    async with scene(nameserver) as at, at.consumer("a") as consumer:
        await at.send(numbers(1))

        async def handle(message: ReceivedMessage) -> None:
            at.note(consumer, message)
            consumer.stop()

        if how == "run":
            await consumer.run(handle)
        else:
            async for message in consumer:
                await handle(message)
        async with handle_all(at, "b") as other:
            await until(lambda: len(other.assignment) == 4)
            await at.send(numbers(10, first=1))
            await until(lambda: len(at.by("b")) == 10)
        assert consumer.assignment == ()
        assert at.by("a") == numbers(1)
        assert sorted(at.by("b")) == sorted(numbers(10, first=1))


async def test_topic_may_be_deleted_when_its_consumer_has_stopped(nameserver: str) -> None:
    async with scene(nameserver) as at, Admin(nameserver) as admin, at.consumer("a") as consumer:
        follows = list(consumer._loops)
        consumer.stop()
        async for _ in consumer:
            pass
        await admin.delete_topic(at.topic)
        await until(lambda: any(task.done() for task in follows))  # one knows that it is deleted


# ---- members


async def test_second_member_gets_its_share_and_every_message_is_handled_once(
    nameserver: str,
) -> None:
    async with scene(nameserver, queue_count=8) as at, Producer(nameserver) as producer:
        sent: list[str] = []

        async def send_until(condition: asyncio.Event) -> None:
            while not condition.is_set():
                for _ in range(20):
                    sent.append(str(len(sent)))
                    await producer.submit(at.topic, Message(sent[-1].encode()))
                await producer.flush()

        async with asyncio.TaskGroup() as tasks:
            enough = asyncio.Event()
            tasks.create_task(send_until(enough))
            async with handle_all(at, "a") as a:
                await until(lambda: len(a.assignment) == 8 and at.by("a"))
                async with handle_all(at, "b") as b:
                    await until(lambda: len(b.assignment) == len(a.assignment) == 4)
                    await until(lambda: at.by("b"))
                await until(lambda: len(a.assignment) == 8)
                enough.set()
                await until(lambda: len(at.handled) >= len(sent))
                await committed(at)
        assert_once_and_in_order(at, sent)
        assert {one.queue.queue_id for one in at.handled} == set(range(8))


async def test_queues_that_stay_keep_their_tokens_while_members_join_and_leave(
    nameserver: str,
) -> None:
    async with scene(nameserver, queue_count=8) as at, handle_all(at, "a") as a:
        await until(lambda: len(a.assignment) == 8)
        async with handle_all(at, "b") as b, handle_all(at, "c") as c:
            await until(lambda: {len(m.assignment) for m in (a, b, c)} <= {2, 3})
            kept = set(a.assignment)
            await at.send(numbers(100))
            await until(lambda: len(at.handled) == 100)
        await until(lambda: len(a.assignment) == 8)
        for queue in kept:
            events = [
                event.kind
                for client_id, event in at.events
                if client_id == "a" and event.queue == queue
            ]
            assert events == ["granted"]
        assert_once_and_in_order(at, numbers(100))


async def test_queue_is_granted_drained_and_released_in_this_order(nameserver: str) -> None:
    async with scene(nameserver, queue_count=1) as at:
        async with handle_all(at, "a") as a:
            await until(lambda: a.assignment)
            assert a.assignment == (QueueRef(at.topic, "broker-0", 0),)
        assert not a.assignment
        async with handle_all(at, "b") as b:
            await until(lambda: b.assignment)
        kinds = [(client_id, event.kind) for client_id, event in at.events]
        assert kinds == [
            (client_id, kind)
            for client_id in ("a", "b")
            for kind in ("granted", "draining", "released")
        ]
        tokens = [event.token for _, event in at.events]
        assert tokens[0] == tokens[1] == tokens[2] < tokens[3] == tokens[5]


async def test_closing_waits_for_running_handlers(nameserver: str) -> None:
    async with scene(nameserver, queue_count=1) as at:
        await at.send(["slow", "next"], queue_id=0)
        started, proceed = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:

            async def live() -> None:
                async with at.consumer("a") as consumer, asyncio.TaskGroup() as inner:

                    async def handle(message: ReceivedMessage) -> None:
                        started.set()
                        await proceed.wait()
                        at.note(consumer, message)

                    inner.create_task(consumer.run(handle))
                    await started.wait()
                    consumer.stop()

            closing = tasks.create_task(live())
            await until(lambda: any(event.kind == "draining" for _, event in at.events))
            assert not closing.done()
            proceed.set()
        async with handle_all(at, "b"):
            await until(lambda: at.by("b"))
        assert [(one.client_id, one.body) for one in at.handled] == [("a", "slow"), ("b", "next")]
        assert not any(one.redelivered for one in at.handled)


async def test_handler_that_outlasts_the_drain_is_cancelled_and_its_message_redelivered(
    nameserver: str,
) -> None:
    async with scene(nameserver, queue_count=1) as at:
        await at.send(["stuck", "next"], queue_id=0)
        started = asyncio.Event()
        settings = replace(QUICK, drain_timeout_ms=50)
        async with at.consumer("a", settings=settings) as consumer, asyncio.TaskGroup() as tasks:

            async def handle(message: ReceivedMessage) -> None:
                at.note(consumer, message)
                started.set()
                await asyncio.Event().wait()

            tasks.create_task(consumer.run(handle))
            await started.wait()
            consumer.stop()
        async with handle_all(at, "b"):
            await until(lambda: len(at.by("b")) == 2)
        assert [(one.client_id, one.body, one.redelivered) for one in at.handled] == [
            ("a", "stuck", False),
            ("b", "stuck", True),
            ("b", "next", False),
        ]


async def test_work_in_flight_survives_the_loss_of_a_token(nameserver: str) -> None:
    """A lock manager that is killed between the fence and its answer causes this."""
    async with scene(nameserver, queue_count=1) as at:
        await at.send(numbers(10), queue_id=0)
        proceed = asyncio.Event()
        settings = replace(QUICK, commit_interval_ms=60_000)
        async with at.consumer("a", settings=settings) as consumer, asyncio.TaskGroup() as tasks:

            async def handle(message: ReceivedMessage) -> None:
                at.note(consumer, message)
                if message.body == b"5":
                    await proceed.wait()

            tasks.create_task(consumer.run(handle))
            await until(lambda: at.bodies["5"])
            await take_token(at)
            await at.send(["10"], queue_id=0)  # ends the held pull with FENCED
            await until(
                lambda: [event.kind for _, event in at.events][-2:] == ["fenced", "granted"]
            )
            proceed.set()
            await until(lambda: at.bodies["10"])
            consumer.stop()
        assert at.bodies == dict.fromkeys(numbers(11), 1)
        assert at.by("a") == numbers(11)
        assert await at.lag() == 0


async def take_token(at: Scene) -> None:
    """Fence the one queue of the topic for its owner, without an answer to the owner."""
    directory = Directory(at.nameserver, Random(1))
    lockmgr, offsets = await directory.lockmgr(), await directory.offsets(at.group)
    locks = await lockmgr.List(lockmgr_pb.ListRequest(group=at.group), timeout=10)
    (lock,) = locks.entries
    answer = await offsets.Fence(
        offsets_pb.FenceRequest(
            term=locks.term,
            items=[
                offsets_pb.FenceItem(
                    queue=lock.queue,
                    attempt="unknown",
                    expected_token=lock.token,
                    condition=offsets_pb.FENCE_CONDITION_FORCED,
                    forced_by="test",
                    forced_reason="the fence of a killed lock manager",
                    holder=lock.owner,
                )
            ],
        ),
        timeout=10,
    )
    assert answer.outcomes[0].fenced.token == lock.token + 1
    await directory.close()


# ---- received messages


async def test_tags_with_the_same_hash_are_distinguished(nameserver: str) -> None:
    assert tag_hash("Aa") == tag_hash("BB")
    async with scene(nameserver) as at:
        await at.send([f"{tag}:{n}" for n in range(20) for tag in ("Aa", "BB", "C")])
        async with handle_all(at, "a", "Aa"):
            await until(lambda: len(at.handled) == 20)
            await committed(at)
        assert at.bodies == {f"Aa:{n}": 1 for n in range(20)}


async def test_each_of_two_groups_gets_every_message_it_subscribes_to(nameserver: str) -> None:
    async with scene(nameserver) as at:
        other = Scene(nameserver, at.topic)
        await at.send([f"{tag}:{n}" for n in range(20) for tag in ("x", "y")])
        async with handle_all(at, "a", "x || y"), handle_all(other, "a", "y"):
            await until(lambda: len(at.handled) == 40 and len(other.handled) == 20)
        assert set(other.bodies) == {f"y:{n}" for n in range(20)}


@pytest.mark.parametrize("consume_from", ["first", "last"])
async def test_group_without_progress_starts_at_consume_from(
    nameserver: str, consume_from: str
) -> None:
    settings = replace(QUICK, consume_from="first" if consume_from == "first" else "last")
    async with scene(nameserver) as at:
        await at.send(numbers(20))
        async with handle_all(at, "a", settings=settings) as consumer:
            await until(lambda: len(consumer.assignment) == 4)
            await at.send(numbers(20, first=20))
            await until(lambda: set(at.bodies) >= set(numbers(20, first=20)))
        expected = numbers(40) if consume_from == "first" else numbers(20, first=20)
        assert at.bodies == dict.fromkeys(expected, 1)


async def test_group_with_progress_ignores_consume_from(nameserver: str) -> None:
    last = replace(QUICK, consume_from="last")
    async with scene(nameserver) as at:
        async with handle_all(at, "a", settings=last) as consumer:
            await until(lambda: len(consumer.assignment) == 4)
        await at.send(numbers(20))
        async with handle_all(at, "a", settings=last):
            await until(lambda: len(at.handled) == 20)
        assert_once_and_in_order(at, numbers(20))


async def test_received_message_has_the_fields_that_were_sent(nameserver: str) -> None:
    async with scene(nameserver, queue_count=1) as at:
        async with Producer(nameserver) as producer:
            receipt = await producer.send(
                at.topic,
                b"\x00body",
                tag="tag",
                keys=("k1", "k2"),
                properties={"name": "value", "ü": ""},
            )
        async with at.consumer("a") as consumer:
            message = await anext(consumer)
    assert (message.topic, message.broker, message.queue_id) == (at.topic, "broker-0", 0)
    assert (message.body, message.tag, message.keys) == (b"\x00body", "tag", ("k1", "k2"))
    assert message.properties == {"name": "value", "ü": ""}
    assert (message.queue, message.offset) == (receipt.queue, receipt.offset)
    assert message.store_unix_ms == receipt.store_unix_ms >= message.born_unix_ms > 0
    assert (message.redelivered, message.attempts) == (False, 1)
    assert message.token > 0


# ---- refusals


async def test_different_subscription_is_refused_and_both_clients_are_named(
    nameserver: str,
) -> None:
    async with scene(nameserver) as at, handle_all(at, "old", "a || b"):
        with pytest.raises(SubscriptionConflict) as refused:
            async with at.consumer("new", "b || c"):
                pass
        (difference,) = refused.value.differences
        assert (difference.topic, difference.setting) == (at.topic, "expression")
        assert (difference.newcomer_client_id, difference.newcomer_value) == ("new", "b||c")
        assert (difference.member_client_id, difference.member_value) == ("old", "a||b")
        assert "new" in refused.value.message
        assert "old" in refused.value.message
        async with handle_all(at, "same", " b||a "):
            pass


async def test_client_id_of_a_live_member_is_refused(nameserver: str) -> None:
    async with scene(nameserver) as at, handle_all(at, "a") as first:
        with pytest.raises(ClientIdInUse) as refused:
            async with at.consumer("a", settings=replace(QUICK, start_timeout_ms=0)):
                pass
        assert refused.value.facts["client_id"] == "a"
        await until(lambda: len(first.assignment) == 4)


async def test_client_id_is_free_again_after_its_member_left(nameserver: str) -> None:
    async with scene(nameserver) as at:
        for _ in range(2):
            async with handle_all(at, "a") as consumer:
                await until(lambda: len(consumer.assignment) == 4)


async def test_unknown_topic_is_refused(nameserver: str) -> None:
    with pytest.raises(TopicNotFound):
        async with Consumer(nameserver, "g", {"absent": "*"}):
            pass


async def test_consumer_of_two_topics_that_are_deleted_together_ends_with_one_error(
    nameserver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(nameserver) as at:
        deleted = asyncio.Event()

        async def follow(directory: Directory, topic: str, on_route: object) -> None:
            await deleted.wait()
            raise TopicNotFound(f"there is no topic {topic}")

        monkeypatch.setattr("batonmq._consumer.consumer.follow_route", follow)
        other = f"{at.topic}-other"
        async with Admin(nameserver) as admin:
            await admin.create_topic(other, 1)
        with pytest.raises(TopicNotFound):
            async with Consumer(nameserver, at.group, {at.topic: "*", other: "*"}, QUICK) as member:
                await until(lambda: len(member.assignment) == 5)
                deleted.set()
                await asyncio.Event().wait()


async def test_invalid_expression_is_refused_before_any_call() -> None:
    with pytest.raises(BadExpression):
        Consumer("127.0.0.1:1", "g", {"t": "a || "})


async def test_missing_nameserver_is_unreachable_after_the_start_timeout() -> None:
    settings = replace(QUICK, start_timeout_ms=100)
    with pytest.raises(Unreachable):
        async with Consumer("127.0.0.1:1", "g", {"t": "*"}, settings):
            pass
