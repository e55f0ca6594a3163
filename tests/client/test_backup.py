"""Goal: a backup says when it is damaged, and a restore translates progress without a loss.

Method: the rules get manifests and batches made here; both stores keep the same files. The whole
way, with clusters, is in tests/e2e/test_backup.py.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path

import pytest

from baton.storage.v1.schedule_service_pb2 import ScheduleItem
from batonmq._core.queues import QueueRef
from batonmq._core.records import (
    BatchBuilder,
    Message,
    check_batch,
    decode_records,
    encode_record,
    stamped_head,
)
from batonmq.admin import (
    BackupChunk,
    BackupManifest,
    BackupStore,
    GroupBackup,
    QueueBackup,
    QueueProgressBackup,
    TopicBackup,
    list_snapshots,
    open_backup_store,
    read_backup_manifest,
    verify_backup,
)
from batonmq.admin._backup_batches import (
    decode_waiting,
    encode_waiting,
    restored_id,
    scheduled_key,
    split_batches,
    without_stamp,
)
from batonmq.admin._backup_plan import (
    find_excess,
    map_queues,
    restored_progress,
    scheduled_queue,
)
from batonmq.admin.backup_manifest import (
    backup_file,
    check_content,
    decode_manifest,
    encode_manifest,
    manifest_name,
)
from batonmq.admin.backup_restorer import scheduled_requests
from batonmq.admin.backup_store import ObjectStore
from batonmq.errors import BadChecksum, DataLoss, InvalidArgument

A0, A1, B0 = QueueRef("t", "a", 0), QueueRef("t", "a", 1), QueueRef("t", "b", 0)
FILE = backup_file("f", b"x")


def stored(first_offset: int, *bodies: bytes) -> bytes:
    """Return a batch as storage has it."""
    builder = BatchBuilder()
    for body in bodies:
        message = Message(body, "tag", ("key",))
        builder.add(message, encode_record(message))
    batch = builder.encode(topic="t", queue_id=1, producer=(7, 1), sequence=3, born_unix_ms=9)
    head = stamped_head(
        batch, position=5, first_offset=first_offset, store_unix_ms=8, topic_id=1, epoch=2
    )
    return head + batch[len(head) :]


def queue_backup(queue: QueueRef, *ranges: tuple[int, int]) -> QueueBackup:
    chunks = tuple(BackupChunk(first, end, FILE) for first, end in ranges)
    return QueueBackup(queue, ranges[-1][1] if ranges else 0, chunks)


def group_backup(*progress: QueueProgressBackup) -> GroupBackup:
    return GroupBackup("g", "clustering", "reject", "on", "sticky", ("t",), None, progress)


def manifest(**parts: object) -> BackupManifest:
    made = BackupManifest(number=2, cluster="c", begin_unix_ms=1, end_unix_ms=2)
    return replace(made, **parts)  # type: ignore[arg-type]


def test_batch_is_stored_again_as_its_producer_sent_it() -> None:
    batch = stored(40, b"one", b"two")
    again = without_stamp(batch, 3, restored_id("c", 1))
    header = check_batch(again, stamped=False)
    assert (header.queue_id, header.born_unix_ms, header.count) == (3, 9, 2)
    assert (header.first_offset, header.store_unix_ms, header.topic_id) == (0, 0, 0)
    assert [one.body for one in decode_records(again, header, (0, 1))] == [b"one", b"two"]
    assert header.producer_id > 0
    assert again != without_stamp(batch, 3, restored_id("c", 2))
    assert again == without_stamp(batch, 3, restored_id("c", 1))


def test_chunk_is_split_into_its_batches_and_a_damaged_one_is_found() -> None:
    content = stored(0, b"a") + stored(1, b"b", b"c")
    assert [header.first_offset for header, _ in split_batches(content)] == [0, 1]
    with pytest.raises(BadChecksum):
        list(split_batches(content[:-1] + b"?"))


def test_scheduled_batches_keep_time_and_number() -> None:
    batch = without_stamp(stored(0, b"a"), 0, 1)
    waiting = [(5, 6, batch), (7, 8, batch)]
    assert list(decode_waiting(encode_waiting(waiting))) == waiting
    assert scheduled_key(check_batch(batch, stamped=False)) is None


def test_manifest_keeps_its_values_and_finds_a_change() -> None:
    whole = manifest(
        topics=(TopicBackup("t", 1, 2, {"a": 2}, "read_write", "any", 3, 4, inherited=True),),
        queues=(queue_backup(A0, (3, 9)),),
        groups=(group_backup(QueueProgressBackup(A0, 5, ((7, 8),))),),
        scheduled={"a": FILE},
        notes=("a note",),
    )
    content = encode_manifest(whole)
    assert decode_manifest(content, "m") == whole
    with pytest.raises(DataLoss, match="m of the backup is damaged"):
        decode_manifest(content.replace(b"a note", b"A note"), "m")
    with pytest.raises(DataLoss):
        decode_manifest(content[:-20], "m")
    with pytest.raises(InvalidArgument, match="format 2"):
        decode_manifest(content.replace(b'"format": 1', b'"format": 2'), "m")


def test_changed_file_is_damaged() -> None:
    assert check_content(FILE, b"x") == b"x"
    with pytest.raises(DataLoss, match="file f of the backup is damaged"):
        check_content(FILE, b"y")


@pytest.mark.parametrize(
    ("offset", "restored"),
    [(0, 0), (10, 0), (12, 2), (20, 10), (25, 10), (30, 10), (33, 13), (99, 15)],
)
def test_offset_is_translated_over_what_retention_has_removed(offset: int, restored: int) -> None:
    assert queue_backup(A0, (10, 20), (30, 35)).restored_offset(offset) == restored


def test_progress_is_translated_with_the_acknowledged_ranges() -> None:
    group = group_backup(QueueProgressBackup(A0, 12, ((15, 20), (30, 31), (33, 34))))
    backups = (queue_backup(A0, (10, 20), (30, 35)), queue_backup(A1, (0, 5)))
    one, other = restored_progress(group, manifest(queues=backups), {A0: B0, A1: A1})
    assert (one.queue, one.committed_offset) == (B0, 2)
    assert one.acked == ((5, 11), (13, 14))
    assert (other.queue, other.committed_offset, other.acked) == (A1, 0, ())


def test_group_without_progress_on_a_topic_gets_none() -> None:
    backups = (queue_backup(A0, (0, 5)),)
    assert restored_progress(group_backup(), manifest(queues=backups), {A0: A0}) == []


def test_queue_keeps_its_broker_where_it_can() -> None:
    present = {"t": (A0, B0, QueueRef("t", "c", 0))}
    assert map_queues([A0, A1], present) == {A0: A0, A1: B0}
    with pytest.raises(InvalidArgument, match="topic t has 1 queues, the backup has 2"):
        map_queues([A0, A1], {"t": (A0,)})


def test_scheduled_message_of_a_removed_queue_goes_to_another_one() -> None:
    mapping = {A0: B0, A1: A1}
    assert scheduled_queue("t", "a", 1, mapping) == A1
    assert scheduled_queue("t", "a", 2, mapping) == B0
    assert scheduled_queue("t", "gone", 3, mapping) == A1
    assert scheduled_queue("u", "a", 0, mapping) is None


def test_request_of_scheduled_messages_has_a_limited_size() -> None:
    items = [ScheduleItem(batch=bytes(3 * 1024 * 1024)) for _ in range(5)]
    assert [len(part) for part in scheduled_requests(items)] == [3, 2]
    assert [len(part) for part in scheduled_requests([ScheduleItem()] * 600)] == [512, 88]


def test_progress_beyond_the_messages_is_found() -> None:
    sound = manifest(
        queues=(queue_backup(A0, (0, 5)),), groups=(group_backup(QueueProgressBackup(A0, 5)),)
    )
    assert find_excess(sound) == []
    beyond = replace(sound, groups=(group_backup(QueueProgressBackup(A0, 6)),))
    assert len(find_excess(beyond)) == 1


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BackupStore:
    """A folder, and an object store of fsspec."""
    if request.param == "folder":
        return open_backup_store(str(tmp_path / "deep" / "backup"))
    return open_backup_store(f"memory://{secrets.token_hex(8)}/backup")


async def test_store_keeps_files_and_verification_reads_them_back(store: BackupStore) -> None:
    assert await list_snapshots(store) == []
    with pytest.raises(InvalidArgument, match="the backup has no snapshot"):
        await read_backup_manifest(store)
    content = stored(0, b"a") + stored(1, b"b")
    file = backup_file("messages/t/a/1/x-000002", content)
    queue = QueueBackup(A1, 2, (BackupChunk(0, 2, file),))
    for number in (1, 2):
        one = manifest(number=number, queues=(queue,))
        store.write(manifest_name(number), encode_manifest(one))
    assert await list_snapshots(store) == [1, 2]
    newest = await read_backup_manifest(store)
    missing = await verify_backup(store, newest)
    assert missing.problems == (f"file {file.name} of the backup is missing",)
    store.write(file.name, content)
    assert await verify_backup(store, newest) == replace(missing, message_count=2, problems=())
    store.write(file.name, content[:-1] + b"?")
    assert "is damaged" in (await verify_backup(store, newest)).problems[0]
    with pytest.raises(InvalidArgument, match="no snapshot 9"):
        await read_backup_manifest(store, 9)


def test_object_store_of_an_unknown_kind_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="nothing://x can't be used"):
        open_backup_store("nothing://x")


async def test_file_that_exists_is_not_created_again(store: BackupStore) -> None:
    store.create("snapshots/1.json", b"first")
    with pytest.raises(FileExistsError):
        store.create("snapshots/1.json", b"second")
    assert store.read("snapshots/1.json") == b"first"
    assert store.names("snapshots") == ["snapshots/1.json"]


def test_file_is_created_where_the_store_has_no_condition_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("not implemented")

    folder = open_backup_store(str(tmp_path))
    monkeypatch.setattr(Path, "hardlink_to", refuse)
    objects = open_backup_store(f"memory://{secrets.token_hex(8)}")
    assert isinstance(objects, ObjectStore)
    put = objects._files.pipe_file
    monkeypatch.setattr(
        objects._files,
        "pipe_file",
        lambda path, content, **options: refuse() if options else put(path, content),
    )
    for store in (folder, objects):
        store.create("a/1", b"first")
        with pytest.raises(FileExistsError):
            store.create("a/1", b"second")
        assert store.read("a/1") == b"first"
