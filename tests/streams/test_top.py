"""Goal: `baton top` shows what the events say: rates, lags, owners, hand-overs, conflicts, drops.

Method: a board with hand-made events; its frames as text, in several sizes; then the events of a
cluster in memory. `test_cluster.py` runs the command on a real cluster.
"""

from __future__ import annotations

import asyncio

from baton.common.v1 import queue_pb2
from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._core.queues import QueueRef
from batonmq._core.top_board import WINDOW_MS, Board, GroupQueueStatus, Snapshot
from batonmq.admin.event_watch import EventWatch
from batonmq.cli.top_screen import screen_lines, snapshot_item
from batonmq_server.testing import MemoryBroker, run_virtual
from tests.support.conditions import until

T0 = QueueRef("t", "a", 0)


def event(place: QueueRef = T0, group: str = "", **kind: object) -> pb.MetricEvent:
    queue = queue_pb2.QueueRef(topic=place.topic, broker=place.broker, queue_id=place.queue_id)
    return pb.MetricEvent(
        unix_ms=1_700_000_000_000,
        queue=queue_pb2.GroupQueue(group=group, queue=queue),
        **kind,  # type: ignore[arg-type]
    )


def busy() -> Board:
    board = Board(0)
    board.begin([GroupQueueStatus("g", T0, 10, 40, "c1")], {"g": 2})
    board.note_source("storage/a", 0)
    board.note_source("lockmgr/l", 7)
    appended = pb.Appended(message_count=500, byte_count=51_200, next_offset=540)
    board.take(event(appended=appended), 9_000)
    delivered = pb.DeliveredRange(message_count=100, redelivered_count=3)
    board.take(event(group="g", delivered=delivered), 9_000)
    board.take(event(group="g", committed=pb.CommittedRange(committed_offset=140)), 9_000)
    hand_over = pb.HandedOver(
        previous_client_id="c1", client_id="c2", contend_ms=1, drain_ms=20, fence_ms=3
    )
    board.take(event(group="g", lock_granted=pb.LockGranted(client_id="c2", token=2)), 9_100)
    board.take(event(group="g", handed_over=hand_over), 9_100)
    board.take(event(group="g", lock_denied=pb.LockDenied(client_id="c3", count=4)), 9_100)
    refused = pb.SubscriptionRefused(group="g", client_id="c4")
    board.take(event(QueueRef("", "", 0), "g", subscription_refused=refused), 9_200)
    return board


def text(snapshot: Snapshot, width: int = 110, height: int = 40) -> str:
    return "\n".join(screen_lines(snapshot, 4, width, height))


def test_rates_cover_the_last_seconds_and_lag_is_current() -> None:
    board = busy()
    snapshot = board.snapshot(9_500)
    (topic,) = snapshot.topics
    assert (topic.in_messages, topic.in_bytes, topic.out_messages) == (100, 10_240, 20)
    (group,) = snapshot.groups
    assert (group.members, group.lag, group.out_messages, group.redelivered) == (2, 400, 20, 3)
    assert (group.hand_overs, group.denials, group.conflicts) == (1, 4, 1)
    (owner,) = snapshot.owners
    assert (owner.client_id, owner.queues, owner.lag) == ("c2", 1, 400)
    later = board.snapshot(9_000 + WINDOW_MS)
    assert later.topics[0].in_messages == 0
    assert later.groups[0].hand_overs == 1
    assert board.snapshot(120_000).groups[0].hand_overs == 0


def test_rates_of_a_new_board_cover_only_its_time() -> None:
    board = Board(1_000)
    board.take(event(appended=pb.Appended(message_count=100, next_offset=100)), 2_500)
    assert board.snapshot(3_000).topics[0].in_messages == 50


def test_late_initial_state_does_not_replace_values_from_events() -> None:
    board = busy()
    board.begin([GroupQueueStatus("g", T0, 10, 40, "c1")], {"g": 2})
    snapshot = board.snapshot(9_500)
    assert (snapshot.groups[0].lag, snapshot.owners[0].client_id) == (400, "c2")


def test_released_queue_has_no_owner_and_queue_without_progress_no_lag() -> None:
    board = busy()
    board.take(event(group="g", lock_released=pb.LockReleased(client_id="c2", token=2)), 9_300)
    board.begin([GroupQueueStatus("h", T0, -1, 540)], {"h": 0})
    snapshot = board.snapshot(9_500)
    assert snapshot.owners == ()
    assert {row.group: row.lag for row in snapshot.groups} == {"g": 400, "h": -1}


def test_deleted_topic_and_group_leave_the_screen_with_all_their_rows() -> None:
    board = busy()
    kept = QueueRef("kept", "a", 0)
    board.begin([GroupQueueStatus("h", T0, 1, 2, "c1"), GroupQueueStatus("h", kept, 3, 9)], {})
    board.retain([("t", 1), ("kept", 2)], ["g", "h"])
    assert {row.topic for row in board.snapshot(20_000).topics} == {"t", "kept"}
    board.retain([("kept", 2)], ["h"])
    late = pb.CommittedRange(committed_offset=150)
    for group in ("g", "h"):
        board.take(event(group=group, committed=late), 20_000)
    board.take(event(appended=pb.Appended(message_count=0, next_offset=541)), 20_000)
    board.retain([("kept", 2)], ["h"])
    snapshot = board.snapshot(20_000)
    assert [row.topic for row in snapshot.topics] == ["kept"]
    assert [(row.group, row.lag) for row in snapshot.groups] == [("h", 6)]
    assert snapshot.owners == ()


def test_topic_that_was_created_anew_has_the_lag_of_the_new_one() -> None:
    board = busy()
    board.retain([("t", 1)], ["g"])
    board.retain([("t", 2)], ["g"])
    lag = pb.QueueLag(committed_offset=0, next_offset=3)
    board.take(event(group="g", queue_lag=lag), 20_000)
    assert [row.lag for row in board.snapshot(20_000).groups] == [3]


def test_topic_and_group_that_were_never_listed_stay() -> None:
    board = busy()
    for _ in range(3):
        board.retain([("other", 1)], [])
    snapshot = board.snapshot(9_500)
    assert [row.topic for row in snapshot.topics] == ["t"]
    assert [row.group for row in snapshot.groups] == ["g"]


def test_unknown_kinds_are_ignored() -> None:
    board = busy()
    before = board.snapshot(9_500)
    board.take(pb.MetricEvent.FromString(b"\xfa\x7f\x02\x08\x01"), 9_500)
    assert board.snapshot(9_500) == before


def test_frame_shows_topics_groups_owners_and_recent_events() -> None:
    frame = text(busy().snapshot(9_500))
    lines = [line.split() for line in frame.splitlines()]
    assert ["t", "100", "10", "20"] in lines
    assert ["g", "2", "20", "400", "3", "1", "4", "1"] in lines
    assert ["c2", "g", "1", "400"] in lines
    assert "t/a/0 passed from c1 to c2: waited 1 + 20 ms, fence 3 ms" in frame
    assert "c4 was rejected for its subscription" in frame
    assert "4 nodes, events from 2, 7 events dropped" in frame


def test_frame_is_never_larger_than_the_terminal() -> None:
    board = busy()
    for number in range(200):
        place = QueueRef(f"topic-{number:03}", "a", 0)
        board.take(event(place, appended=pb.Appended(message_count=1, next_offset=1)), 9_400)
        granted = pb.LockGranted(client_id=f"client-{number:03}")
        board.take(event(place, f"group-{number:03}", lock_granted=granted), 9_400)
    for width, height in ((80, 24), (60, 30), (200, 60), (110, 40)):
        lines = text(board.snapshot(9_500), width, height).splitlines()
        assert len(lines) <= height
        assert max(map(len, lines)) <= width
        assert any("more" in line for line in lines)
        assert any(line.startswith("t ") for line in lines), "the busiest topic is missing"


def test_text_of_clients_can_not_move_the_cursor() -> None:
    board = Board(0)
    forced = pb.LockForced(by="\x1b[2J", previous_client_id="[red]c")
    board.take(event(group="g", lock_forced=forced), 1)
    frame = text(board.snapshot(2))
    assert "\x1b" not in frame and "[red]c" in frame


def test_json_item_has_the_values_of_the_frame() -> None:
    item = snapshot_item(busy().snapshot(9_500), 4)
    assert item["groups"][0]["lag"] == 400
    assert item["sources"] == {"lockmgr/l": 7, "storage/a": 0}
    assert len(item["recent"]) == 2


def test_events_of_all_nodes_are_followed_also_after_a_restart() -> None:
    async def scene() -> tuple[Snapshot, set[str]]:
        async with MemoryBroker() as broker:
            board, clock = Board(0), broker.clock

            def take(batch: pb.MetricBatch) -> None:
                board.note_source(batch.source, batch.dropped_count)
                for one in batch.events:
                    board.take(one, clock.monotonic_ms())

            watch = EventWatch(broker.nameserver, take, broker.environment)
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(watch.run())
                await broker.create_topic("t", queues=1)
                await asyncio.sleep(2)
                await broker.restart("storage")
                await asyncio.sleep(10)
                settings = ConsumerSettings(consume_from="first")
                consumer = broker.consumer("g", {"t": "*"}, settings, client_id="c")
                async with broker.producer() as producer, consumer:
                    for _ in range(100):
                        await producer.send("t", b"")
                    async for message in consumer:
                        if message.offset == 99:
                            break
                    await until(lambda: len(board.snapshot(clock.monotonic_ms()).sources) == 4)
                    snapshot = board.snapshot(clock.monotonic_ms())
                watching.cancel()
            return snapshot, watch.following

    snapshot, following = run_virtual(scene())
    (topic,) = (row for row in snapshot.topics if row.topic == "t")
    assert topic.in_messages > 0 and topic.out_messages > 0
    assert [(row.client_id, row.queues) for row in snapshot.owners] == [("c", 2)]
    assert {source.partition("/")[0] for source in snapshot.sources} == {
        "storage", "offsets", "lockmgr", "nameserver",
    }  # fmt: skip
    assert following == set(), "a cancelled watch still follows nodes"
