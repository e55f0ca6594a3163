"""Reads the files of a backup, and checks them."""

from __future__ import annotations

from batonmq.admin._backup_batches import decode_waiting, split_batches
from batonmq.admin.backup_manifest import BackupChunk, BackupFile, QueueBackup, check_content
from batonmq.admin.backup_store import BackupStore, in_thread
from batonmq.errors import DataLoss


async def read_chunk(store: BackupStore, queue: QueueBackup, chunk: BackupChunk) -> list[bytes]:
    """Return the batches of a chunk.

    Raises:
        DataLoss: The file is missing or damaged, or has other offsets.
    """
    batches, offset = list[bytes](), chunk.first_offset
    for header, batch in split_batches(await _read_file(store, chunk.file)):
        if header.first_offset != offset or header.topic != queue.queue.topic:
            raise DataLoss(f"file {chunk.file.name} of the backup has other offsets than it says")
        offset = header.next_offset
        batches.append(batch)
    if offset != chunk.next_offset:
        raise DataLoss(f"file {chunk.file.name} of the backup ends at offset {offset}")
    return batches


async def read_waiting(store: BackupStore, file: BackupFile) -> list[tuple[int, int, bytes]]:
    """Return the scheduled batches of a file: delivery time, number, batch of each.

    Raises:
        DataLoss: The file is missing or damaged.
    """
    return list(decode_waiting(await _read_file(store, file)))


async def _read_file(store: BackupStore, file: BackupFile) -> bytes:
    try:
        content = await in_thread(file.name, lambda: store.read(file.name))
    except FileNotFoundError:
        raise DataLoss(
            f"file {file.name} of the backup is missing",
            remedy="Restore another snapshot: baton backup list.",
            facts={"file": file.name},
        ) from None
    return check_content(file, content)
