"""Broadcasting: every member gets every message, and keeps its progress in a file of its own.

Goal: no message is missed or repeated after a restart, even if queues are added meanwhile; a file
that is damaged, in use or of another group is refused with a remedy; a message that fails too often
is skipped, and none is sent back.
Method: the file alone, on disk; members on a real cluster.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copyfile

import pytest

from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.local_offsets import LocalOffsets, LocalProgress
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.queues import QueueRef
from batonmq.admin.admin import Admin
from batonmq.errors import DataLoss, InvalidArgument
from tests.client.group import QUICK, Scene, handle_all, scene
from tests.support.conditions import until

Q0, Q1, Q2 = (QueueRef("t", "b", queue_id) for queue_id in range(3))


def broadcasting(file: Path, base: ConsumerSettings = QUICK) -> ConsumerSettings:
    return replace(base, model="broadcasting", offsets_file=file)


# ---- the file


async def written_file(file: Path) -> None:
    """Write an offsets file of group g."""
    offsets = LocalOffsets(file, "g")
    await offsets.open()
    offsets.note_topic("t", 1, [Q0, Q1])
    offsets.put(Q0, LocalProgress(7, ((9, 12),)))
    await offsets.close()


async def test_file_keeps_progress_and_queues_without_progress(tmp_path: Path) -> None:
    file = tmp_path / "new" / "offsets.json"
    await written_file(file)
    offsets = LocalOffsets(file, "g")
    await offsets.open()
    assert not offsets.note_topic("t", 1, [Q0, Q1, Q2])
    assert offsets.get(Q0) == LocalProgress(7, ((9, 12),))
    assert (offsets.get(Q1), offsets.added(Q1)) == (None, False)
    assert (offsets.get(Q2), offsets.added(Q2)) == (None, True)
    await offsets.close()
    assert {each.name for each in file.parent.iterdir()} == {"offsets.json", "offsets.json.lock"}


async def test_file_forgets_a_topic_that_was_created_again(tmp_path: Path) -> None:
    await written_file(tmp_path / "f")
    offsets = LocalOffsets(tmp_path / "f", "g")
    await offsets.open()
    assert offsets.note_topic("t", 2, [Q0])
    assert (offsets.get(Q0), offsets.added(Q0)) == (None, False)
    await offsets.close()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda _: b"",
    "cut off": lambda raw: raw[:-10],
    "a number changed": lambda raw: raw.replace(b": 7", b": 8"),
    "no document": lambda _: b"[]",
    "of a later format": lambda raw: raw.replace(b"-offsets-1", b"-offsets-2"),
    "no text": lambda _: b"\xff\xfe",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
async def test_damaged_file_is_refused_and_not_changed(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    file = tmp_path / "f"
    await written_file(file)
    raw = damage(file.read_bytes())
    assert raw != file.read_bytes()
    file.write_bytes(raw)
    offsets = LocalOffsets(file, "g")
    with pytest.raises(DataLoss, match="damaged") as refused:
        await offsets.open()
    assert "consume_from" in refused.value.remedy
    await offsets.close()
    assert file.read_bytes() == raw


async def test_file_of_another_group_is_refused(tmp_path: Path) -> None:
    await written_file(tmp_path / "f")
    with pytest.raises(InvalidArgument, match="belongs to group g, not h"):
        await LocalOffsets(tmp_path / "f", "h").open()


async def test_file_in_use_is_refused_until_it_is_closed(tmp_path: Path) -> None:
    first, second = LocalOffsets(tmp_path / "f", "g"), LocalOffsets(tmp_path / "f", "g")
    await first.open()
    with pytest.raises(InvalidArgument, match="in use"):
        await second.open()
    await first.close()
    await second.open()
    await second.close()


async def test_cancelled_start_leaves_the_file_unlocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread goes on, and locks the file when the disk answers."""
    begun, answers, lock = asyncio.Event(), threading.Event(), LocalOffsets._lock
    locked, loop = asyncio.Event(), asyncio.get_running_loop()

    def slow(offsets: LocalOffsets) -> None:
        loop.call_soon_threadsafe(begun.set)
        answers.wait()
        lock(offsets)
        loop.call_soon_threadsafe(locked.set)

    monkeypatch.setattr(LocalOffsets, "_lock", slow)
    first = LocalOffsets(tmp_path / "f", "g")
    async with asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(first.open())
        await begun.wait()
        opening.cancel()
        await asyncio.wait({opening})
        answers.set()
        await locked.wait()
    await until(lambda: first._lock_file is None)
    second = LocalOffsets(tmp_path / "f", "g")
    await second.open()
    await second.close()


async def test_failed_save_is_repeated_by_the_next(tmp_path: Path) -> None:
    file = tmp_path / "f"
    offsets = LocalOffsets(file, "g")
    await offsets.open()
    offsets.note_topic("t", 1, [Q0])
    blocker = tmp_path / "f.new"
    blocker.mkdir()
    assert not await offsets.save()
    assert not file.exists()
    blocker.rmdir()
    assert await offsets.save()
    assert file.exists()
    await offsets.close()


def test_contradicting_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="offsets_file"):
        ConsumerSettings(model="broadcasting")
    with pytest.raises(InvalidArgument, match="offsets_file"):
        ConsumerSettings(offsets_file=tmp_path / "f")
    with pytest.raises(InvalidArgument, match="send_back is not possible"):
        ConsumerSettings(model="broadcasting", offsets_file=tmp_path / "f", send_back=True)


# ---- members


def saved_offsets(file: Path) -> int:
    """Return the offsets that are handled according to the file."""
    topics = json.loads(file.read_bytes())["topics"] if file.exists() else {}
    return sum(q.get("committed_offset", 0) for topic in topics.values() for q in topic["queues"])


def of_all(*first_and_end: int) -> dict[str, int]:
    return dict.fromkeys(map(str, range(*first_and_end)), 1)


@pytest.mark.e2e
async def test_every_member_gets_every_message_once_also_over_a_restart(
    nameserver: str, tmp_path: Path
) -> None:
    async with scene(nameserver, queue_count=2) as at:
        other = Scene(nameserver, at.topic, at.group)
        one, two = broadcasting(tmp_path / "1"), broadcasting(tmp_path / "2")
        async with handle_all(other, "b", settings=two):
            async with handle_all(at, "a", settings=one):
                await at.send([str(n) for n in range(50)])
                await until(lambda: len(at.handled) == len(other.handled) == 50)
                # The file is saved while the member runs, too.
                await until(lambda: saved_offsets(tmp_path / "1") == 50)
            await at.send([str(n) for n in range(50, 80)])
            await until(lambda: len(other.handled) == 80)
        assert at.bodies == of_all(50)
        async with handle_all(at, "a", settings=one):
            await until(lambda: len(at.handled) == 80)
        assert at.bodies == other.bodies == of_all(80)


@pytest.mark.e2e
async def test_start_offset_is_in_the_file_before_the_first_message_is_handled(
    nameserver: str, tmp_path: Path
) -> None:
    last = replace(QUICK, consume_from="last", commit_interval_ms=60_000)
    async with scene(nameserver, queue_count=1) as at:
        await at.send(["before"])
        async with at.consumer("a", settings=broadcasting(tmp_path / "f", last)) as member:
            await until(lambda: len(member.assignment) == 1)
            await at.send(["during"])
            assert (await anext(member)).body == b"during"
            copyfile(tmp_path / "f", tmp_path / "at the crash")
        await at.send(["after"])
        async with handle_all(at, "b", settings=broadcasting(tmp_path / "at the crash", last)):
            await until(lambda: at.bodies["after"] == 1)
        assert at.bodies == {"during": 1, "after": 1}


@pytest.mark.e2e
async def test_queue_added_while_the_member_runs_or_is_down_is_read_from_its_first_message(
    nameserver: str, tmp_path: Path
) -> None:
    last = broadcasting(tmp_path / "f", replace(QUICK, consume_from="last"))
    async with scene(nameserver, queue_count=1) as at, Admin(nameserver) as admin:
        await at.send(["before"])
        async with handle_all(at, "a", settings=last) as member:
            await until(lambda: len(member.assignment) == 1)
            await admin.update_topic(at.topic, queue_count=2)
            await at.send(["1"], queue_id=1)
            await until(lambda: at.bodies == {"1": 1})
        await admin.update_topic(at.topic, queue_count=3)
        await at.send(["2"], queue_id=2)
        async with handle_all(at, "a", settings=last):
            await until(lambda: len(at.handled) == 2)
        assert at.bodies == {"1": 1, "2": 1}


@pytest.mark.e2e
async def test_message_that_fails_too_often_is_skipped_and_not_sent_back(
    nameserver: str, tmp_path: Path
) -> None:
    settings = broadcasting(tmp_path / "f", replace(QUICK, retries_max=2))
    async with scene(nameserver, queue_count=1) as at:
        await at.send(["bad", "good"])
        async with at.consumer("a", settings=settings) as member, asyncio.TaskGroup() as tasks:

            async def handle(message: ReceivedMessage) -> None:
                at.note(member, message)
                if message.body == b"bad":
                    raise ValueError("on purpose")

            tasks.create_task(member.run(handle))
            await until(lambda: at.bodies["good"])
            member.stop()
        assert at.bodies == {"bad": 3, "good": 1}
        await at.send(["next"])
        async with handle_all(at, "a", settings=settings):
            await until(lambda: at.bodies["next"])
        assert at.bodies == {"bad": 3, "good": 1, "next": 1}
        async with Admin(nameserver) as admin:
            topics = {topic.name for topic in await admin.list_topics()}
        assert not {f"%RETRY%{at.group}", f"%DLQ%{at.group}"} & topics


@pytest.mark.e2e
async def test_topic_created_again_while_the_member_is_down_is_read_from_its_start(
    nameserver: str, tmp_path: Path
) -> None:
    settings = broadcasting(tmp_path / "f")
    async with scene(nameserver, queue_count=1) as at, Admin(nameserver) as admin:
        await at.send(["1", "2"])
        async with handle_all(at, "a", settings=settings):
            await until(lambda: len(at.handled) == 2)
        await admin.delete_topic(at.topic)
        await admin.create_topic(at.topic, 1)
        await at.send(["3"])
        async with handle_all(at, "a", settings=settings):
            await until(lambda: len(at.handled) == 3)
        assert at.bodies == {"1": 1, "2": 1, "3": 1}


@pytest.mark.e2e
async def test_members_of_one_group_filter_by_their_own_subscriptions(
    nameserver: str, tmp_path: Path
) -> None:
    async with scene(nameserver, queue_count=1) as at:
        other = Scene(nameserver, at.topic, at.group)
        async with (
            handle_all(at, "a", "x", broadcasting(tmp_path / "1")),
            handle_all(other, "b", "y", broadcasting(tmp_path / "2")),
        ):
            await at.send(["x:1", "y:1", "x:2"])
            await until(lambda: len(at.handled) == 2 and len(other.handled) == 1)
        assert (at.bodies, other.bodies) == ({"x:1": 1, "x:2": 1}, {"y:1": 1})


@pytest.mark.e2e
async def test_member_with_a_damaged_file_does_not_join(nameserver: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"{")
    async with scene(nameserver) as at:
        with pytest.raises(DataLoss, match="damaged"):
            async with at.consumer("a", settings=broadcasting(tmp_path / "f")):
                pass
        async with Admin(nameserver) as admin:
            assert at.group not in {group.name for group in await admin.list_groups()}
