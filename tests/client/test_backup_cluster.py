"""Goal: a snapshot is complete whatever its cluster does meanwhile, and a restore can be continued.

Method: real services in memory, and a backup in a folder. Writers that do something in the middle
of a snapshot are subclasses, which act before or after a read.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from baton.storage.v1 import query_service_pb2 as query_pb
from batonmq._core.queues import QueueRef
from batonmq.admin import (
    BackupManifest,
    BackupRestorer,
    BackupWriter,
    Compaction,
    Operation,
    list_snapshots,
    read_backup_manifest,
    verify_backup,
)
from batonmq.admin import _backup_files as backup_files_module
from batonmq.admin import backup_writer as backup_writer_module
from batonmq.admin.admin import Admin
from batonmq.admin.backup_store import FolderStore
from batonmq.errors import DataLoss, TopicExists, Unreachable
from batonmq_server.testing import MemoryBroker, run_virtual
from tests.support.conditions import until

TOPIC, QUEUE = "orders", QueueRef("orders", "broker-0", 0)
OPERATION = Operation("ann", "restore of snapshot 1")
Hook = Callable[[], Awaitable[Any]]


class InterruptedWriter(BackupWriter):
    """A writer that calls `hook` once, after its first read."""

    def __init__(self, admin: Admin, store: FolderStore, hook: Hook) -> None:
        super().__init__(admin, store)
        self._hook: Hook | None = hook

    async def _read(self, *args: Any, **options: Any) -> query_pb.ReadResponse:
        answer = await super()._read(*args, **options)
        hook, self._hook = self._hook, None
        if hook is not None:
            await hook()
        return answer


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    """The store of a backup."""
    return FolderStore(tmp_path / "backup")


@pytest.fixture
def one_batch_per_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each call read one batch."""
    monkeypatch.setattr(backup_writer_module, "READ_BYTES", 1)


@pytest.fixture
def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call the store in the event loop: virtual time has no threads."""

    async def call_directly(_: str, call: Callable[[], Any]) -> Any:
        return call()

    for module in (backup_writer_module, backup_files_module):
        monkeypatch.setattr(module, "in_thread", call_directly)


async def send(broker: MemoryBroker, *bodies: bytes, delay_ms: int | None = None) -> None:
    async with broker.producer() as producer:
        for body in bodies:
            if delay_ms is None:
                await producer.send(TOPIC, body, queue=QUEUE)
            else:
                await producer.send(TOPIC, body, queue=QUEUE, delay_ms=delay_ms)


async def problems_of(store: FolderStore, manifest: BackupManifest) -> tuple[str, ...]:
    return (await verify_backup(store, manifest)).problems


async def test_restore_goes_on_after_its_scheduled_messages_were_delivered(
    store: FolderStore,
) -> None:
    async with MemoryBroker() as lost, lost.admin() as admin:
        await lost.create_topic(TOPIC, 1)
        await lost.create_topic("later", 1)
        await send(lost, b"1", b"2")
        async with lost.producer() as producer:
            for topic in (TOPIC, "later"):
                await producer.send(topic, b"3", delay_ms=1_000)
        manifest = await BackupWriter(admin, store).run()
    async with MemoryBroker() as broker, broker.admin() as admin:
        restorer = BackupRestorer(admin, store, manifest, OPERATION)
        await restorer.run()

        async def all_due() -> bool:
            found = [*await broker.messages(TOPIC), *await broker.messages("later")]
            return len(found) == 4

        await until(all_due)
        await restorer.run(proceed=True)
        assert [one.body for one in await broker.messages(TOPIC)] == [b"1", b"2", b"3"]
        assert [one.body for one in await broker.messages("later")] == [b"3"]
        await send(broker, b"4")
        with pytest.raises(TopicExists, match="not of this snapshot"):
            await restorer.run(proceed=True)


async def test_scheduled_message_of_a_deleted_topic_is_not_in_a_snapshot(
    store: FolderStore,
) -> None:
    async with MemoryBroker() as broker, broker.admin() as admin:
        await broker.create_topic(TOPIC, 1)
        await send(broker, b"1", delay_ms=3_600_000)
        await admin.delete_topic(TOPIC)
        await broker.create_topic(TOPIC, 1)
        await send(broker, b"2", delay_ms=3_600_000)
        manifest = await BackupWriter(admin, store).run()
    assert manifest.scheduled_count == 1


def test_broker_that_is_not_registered_is_asked_for_its_scheduled_messages() -> None:
    async def main() -> dict[str, Any]:
        async with MemoryBroker(broker_count=2) as broker, broker.admin() as admin:
            await broker.create_topic(TOPIC, 2)
            await send(broker, b"1", delay_ms=3_600_000)
            topics = [await admin.describe_topic(TOPIC)]
            service = broker._running["broker-0"].service
            await broker._stop(["broker-0"])
            assert await admin.directory.brokers() == {"broker-1"}
            broker._start(service)
            writer = BackupWriter(admin, FolderStore(Path("unused")))
            writer._topic_ids = {TOPIC: topics[0].topic.topic_id}
            return await writer._scheduled([one.topic for one in topics])

    assert list(run_virtual(main())) == ["broker-0"]


@pytest.mark.usefixtures("one_batch_per_read")
async def test_topic_made_again_during_a_snapshot_is_not_mixed_with_the_old_one(
    store: FolderStore,
) -> None:
    async with MemoryBroker() as broker, broker.admin() as admin:
        await broker.create_topic(TOPIC, 1)
        await send(broker, b"1", b"2")

        async def make_again() -> None:
            await admin.delete_topic(TOPIC)
            await broker.create_topic(TOPIC, 1)
            await send(broker, b"3", b"4")

        manifest = await InterruptedWriter(admin, store, make_again).run()
        assert [one.count for one in manifest.queues] == [1]
        assert manifest.notes == (f"topic {TOPIC} was deleted during the snapshot",)
        assert await problems_of(store, manifest) == ()


@pytest.mark.usefixtures("one_batch_per_read")
async def test_queue_that_got_shorter_during_a_snapshot_is_noted(store: FolderStore) -> None:
    async with MemoryBroker() as broker, broker.admin() as admin:
        await broker.create_topic(TOPIC, 1)
        await send(broker, b"1", b"2")

        async def make_again() -> None:
            await admin.delete_topic(TOPIC)
            await broker.create_topic(TOPIC, 1)

        manifest = await InterruptedWriter(admin, store, make_again).run()
        assert "got shorter during the snapshot" in manifest.notes[0]
        assert await problems_of(store, manifest) == ()


@pytest.mark.usefixtures("one_batch_per_read")
async def test_queue_that_is_removed_during_a_snapshot_is_completed_by_the_next(
    store: FolderStore,
) -> None:
    settings = {"nameserver": {"shrink_interval_ms": 50}}
    async with MemoryBroker(settings=settings) as broker, broker.admin() as admin:
        await broker.create_topic(TOPIC, 2)
        last = QueueRef(TOPIC, "broker-0", 1)
        async with broker.producer() as producer:
            for body in (b"1", b"2"):
                await producer.send(TOPIC, body, queue=last)

        async def remove() -> None:
            await admin.update_topic(TOPIC, queue_count=1)

            async def removed() -> bool:
                return (await admin.describe_topic(TOPIC)).topic.queue_count == 1

            await until(removed)

        manifest = await InterruptedWriter(admin, store, remove).run()
        assert manifest.notes == (f"queue {last} was removed during the snapshot",)
        assert await problems_of(store, manifest) == ()
        await admin.update_topic(TOPIC, queue_count=2)
        manifest = await BackupWriter(admin, store).run()
        (copied,) = (one.chunks for one in manifest.queues if one.queue == last)
        assert [(one.first_offset, one.next_offset) for one in copied] == [(0, 1), (1, 2)]
        assert await problems_of(store, manifest) == ()


async def test_chunk_ends_with_its_last_message_if_retention_removes_the_others(
    store: FolderStore,
) -> None:
    async with MemoryBroker() as broker, broker.admin() as admin:
        await broker.create_topic(TOPIC, 1)
        await send(broker, b"1", b"2", b"3", b"4")

        class Trimmed(BackupWriter):
            async def _extents(self, queues: Any) -> Any:
                return {queue: (0, 3) for queue in queues}

            async def _read(self, queue: QueueRef, offset: int, *_: Any, **__: Any) -> Any:
                first = offset if offset == 0 else 3  # what is between was removed
                return await super()._read(queue, first, 3, messages_max=1)

        manifest = await Trimmed(admin, store).run()
    (queue,) = manifest.queues
    assert [(one.first_offset, one.next_offset) for one in queue.chunks] == [(0, 1)]
    assert await problems_of(store, manifest) == ()


async def test_follower_that_lags_does_not_end_a_queue(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with MemoryBroker() as broker, broker.admin() as admin:
        await broker.create_topic(TOPIC, 1)
        await send(broker, b"1", b"2")
        query, answers = admin.directory.query, [query_pb.ReadResponse()]

        class Lagging:
            def __init__(self, stub: Any) -> None:
                self._stub = stub

            async def Read(self, request: query_pb.ReadRequest, **options: float) -> Any:
                return answers.pop() if answers else await self._stub.Read(request, **options)

        async def lagging(name: str) -> Any:
            return Lagging(await query(name))

        monkeypatch.setattr(admin.directory, "query", lagging)
        manifest = await BackupWriter(admin, store).run()
    assert manifest.message_count == 2


async def test_error_of_one_file_is_not_in_a_group(store: FolderStore) -> None:
    async with MemoryBroker() as broker, broker.admin() as admin:
        await broker.create_topic(TOPIC, 1)
        await send(broker, b"1")
        manifest = await BackupWriter(admin, store).run()
        store.remove(manifest.files[0].name)
        await admin.delete_topic(TOPIC)
        with pytest.raises(DataLoss, match="is missing"):
            await BackupRestorer(admin, store, manifest, OPERATION).run()
        await broker.create_topic(TOPIC, 1)
        await send(broker, b"2")

        class Full(FolderStore):
            def write(self, name: str, content: bytes) -> None:
                raise OSError("no space left")

        with pytest.raises(Unreachable, match="no space left"):
            await BackupWriter(admin, Full(Path("unused"))).run()


def test_restore_names_a_broker_that_does_not_answer() -> None:
    async def main() -> None:
        async with MemoryBroker() as broker, broker.admin() as admin:
            await broker.create_topic(TOPIC, 1)
            await broker._kill(["broker-0"])
            one = BackupManifest(number=1, cluster="c", begin_unix_ms=1, end_unix_ms=2)
            present = {TOPIC: (QUEUE,)}
            restorer = BackupRestorer(admin, FolderStore(Path("unused")), one, OPERATION)
            with pytest.raises(Unreachable, match="broker-0"):
                await restorer._find_other_state(set(), present)

    run_virtual(main())


async def test_two_writers_at_once_take_two_sound_snapshots(store: FolderStore) -> None:
    async with MemoryBroker() as broker, broker.admin() as admin:
        await broker.create_topic(TOPIC, 1)
        await send(broker, b"1")
        await send(broker, b"2", delay_ms=3_600_000)

        async def write_another() -> None:
            await send(broker, b"3")
            await send(broker, b"4", delay_ms=3_600_000)
            assert (await BackupWriter(admin, store).run()).number == 1

        manifest = await InterruptedWriter(admin, store, write_another).run()
    assert manifest.number == 2
    for number in (1, 2):
        one = await read_backup_manifest(store, number)
        assert await problems_of(store, one) == ()
        assert (one.message_count, one.scheduled_count) == (2, 2)


async def test_manifest_whose_write_was_repeated_by_the_store_is_written(
    store: FolderStore,
) -> None:
    class Repeating(FolderStore):
        def create(self, name: str, content: bytes) -> None:
            super().create(name, content)
            super().create(name, content)

    async with MemoryBroker() as broker, broker.admin() as admin:
        await broker.create_topic(TOPIC, 1)
        manifest = await BackupWriter(admin, Repeating(store._folder)).run()
    assert manifest.number == 1
    assert await list_snapshots(store) == [1]


@pytest.mark.usefixtures("without_threads")
@pytest.mark.parametrize(("retention_h", "kept"), [(0.1, {b"b"}), (10, {b"", b"a", b"b"})])
def test_deleted_key_of_a_compacted_topic_is_not_in_a_later_snapshot(
    store: FolderStore, retention_h: float, kept: set[bytes]
) -> None:
    """Its tombstone may be gone before the later snapshot, or is in that snapshot."""
    settings = Compaction(tombstone_retention_ms=int(retention_h * 3_600_000), dirty_percent=1)

    async def restored() -> set[bytes]:
        async with MemoryBroker() as broker, broker.admin() as admin:
            await admin.create_topic(TOPIC, 1, compaction=settings)
            async with broker.producer() as producer:
                await producer.send(TOPIC, b"a", ordering_key="deleted")
                await BackupWriter(admin, store).run()
                await producer.send(TOPIC, b"", ordering_key="deleted")
                await producer.send(TOPIC, b"b", ordering_key="kept")

            async def compacted() -> bool:
                counts = await admin.message_counts({QUEUE: 0})
                return counts[QUEUE] == len(kept - {b"a"})

            await until(compacted, timeout_s=7_200)
            manifest = await BackupWriter(admin, store).run()
        assert await problems_of(store, manifest) == ()
        async with MemoryBroker() as broker, broker.admin() as admin:
            await BackupRestorer(admin, store, manifest, OPERATION).run()
            return {one.body for one in await broker.messages(TOPIC)}

    assert run_virtual(restored()) == kept


@pytest.mark.usefixtures("without_threads")
def test_compaction_between_two_snapshots_is_no_note(store: FolderStore) -> None:
    settings = Compaction(tombstone_retention_ms=36_000_000, dirty_percent=1)

    async def main() -> None:
        async with MemoryBroker() as broker, broker.admin() as admin:
            await admin.create_topic(TOPIC, 1, compaction=settings)
            async with broker.producer() as producer:

                async def send_keys(keys: str) -> None:
                    for key in keys:
                        await producer.send(TOPIC, key.encode(), ordering_key=key)

                await send_keys("ababc")
                await BackupWriter(admin, store).run()
                await send_keys("abab")

            async def compacted() -> bool:
                return (await admin.message_counts({QUEUE: 0}))[QUEUE] == len("abc")

            await until(compacted, timeout_s=7_200)
            manifest = await BackupWriter(admin, store).run()
        assert (manifest.notes, manifest.message_count) == ((), len("abc"))

    run_virtual(main())
