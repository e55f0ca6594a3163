"""The offsets file: the progress of one member of a broadcasting group.

The file is one JSON document and is replaced as a whole: a new file is written and synced, then
renamed over the old one, and the folder is synced. So the file is always either the old or the new
one. A lock file next to it keeps a second process away.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import threading
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batonmq._core.queues import QueueRef
from batonmq._core.ranges import Range
from batonmq.errors import BatonError, DataLoss, InvalidArgument

log = logging.getLogger(__name__)

FORMAT = "baton-local-offsets-1"


@dataclass(frozen=True, slots=True)
class LocalProgress:
    """Handled offsets: all below `committed`, and the ranges `acked` above it."""

    committed: int
    acked: tuple[Range, ...] = ()


@dataclass(slots=True)
class _Topic:
    """Progress by queue; None for a queue that existed when the member first saw the topic."""

    topic_id: int
    queues: dict[QueueRef, LocalProgress | None] = field(default_factory=dict)


class LocalOffsets:
    """Progress of one member, in memory and in its file.

    Args:
        path: The file; it is created, with its folders, if it does not exist.
        group: The member's group.
    """

    def __init__(self, path: Path, group: str) -> None:
        self._path, self._group = path, group
        self._topics: dict[str, _Topic] = {}
        self._lock_file: int | None = None
        self._dirty = False
        self._saving = asyncio.Lock()
        self._writing = threading.Lock()
        self._version = self._written = 0

    async def open(self) -> None:
        """Lock the file and read it.

        Raises:
            InvalidArgument: another process uses the file, it belongs to another group, or it can't
                be read or written.
            DataLoss: the file is damaged.
        """
        opening = asyncio.get_running_loop().run_in_executor(None, self._open)
        try:
            await asyncio.wait({opening})
        except asyncio.CancelledError:
            opening.add_done_callback(self._opened_late)  # the thread may still lock it
            raise
        try:
            opening.result()
        except BaseException:
            self._unlock()
            raise

    async def close(self) -> None:
        """Save the progress and unlock the file."""
        try:
            if not await self.save():
                log.error("progress not saved, the next start repeats messages file=%s", self._path)
        finally:
            self._unlock()

    def note_topic(self, topic: str, topic_id: int, queues: Iterable[QueueRef]) -> bool:
        """Note a topic's route; return True if earlier progress on the topic does not count.

        The queues of a new topic, or of another topic of the same name, have been there from the
        beginning; queues that appear later are `added`.
        """
        known = self._topics.get(topic)
        if known is not None and known.topic_id == topic_id:
            return False
        self._topics[topic] = _Topic(topic_id, dict.fromkeys(queues))
        self._dirty = True
        return True

    def added(self, queue: QueueRef) -> bool:
        """Whether the queue was added to its topic after this member first saw the topic."""
        topic = self._topics.get(queue.topic)
        return topic is not None and queue not in topic.queues

    def get(self, queue: QueueRef) -> LocalProgress | None:
        """Return the progress on a queue; None if there is none yet."""
        topic = self._topics.get(queue.topic)
        return None if topic is None else topic.queues.get(queue)

    def put(self, queue: QueueRef, progress: LocalProgress) -> None:
        """Set the progress on a queue; it is durable after the next `save`."""
        queues = self._topics[queue.topic].queues
        if queues.get(queue) != progress:
            queues[queue] = progress
            self._dirty = True

    async def save(self) -> bool:
        """Write the progress to the file; return False if that failed. The next call repeats it."""
        async with self._saving:
            if not self._dirty:
                return True
            self._dirty = False
            self._version += 1
            try:
                await asyncio.to_thread(self._write, self._version, self._encode())
            except OSError as error:
                self._dirty = True
                log.warning("progress not saved file=%s error=%s", self._path, error)
                return False
            except BaseException:
                self._dirty = True
                raise
            return True

    def _open(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock()
            raw = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise InvalidArgument(
                f"can't read or write offsets file {self._path}: {error.strerror}",
                remedy="Give a path that this process may read and write.",
                facts={"field": "offsets_file"},
            ) from error
        self._topics = self._decode(raw)

    def _lock(self) -> None:
        mode = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._lock_file = os.open(self._path.with_name(f"{self._path.name}.lock"), mode, 0o644)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidArgument(
                f"offsets file {self._path} is in use by another consumer",
                remedy="Give each consumer a file of its own.",
                facts={"field": "offsets_file"},
            ) from error

    def _opened_late(self, opening: asyncio.Future[None]) -> None:
        if not opening.cancelled():
            opening.exception()  # retrieved here: the caller is gone
        self._unlock()

    def _unlock(self) -> None:
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def _write(self, version: int, raw: bytes) -> None:
        """Write in a thread. A cancelled save still gets here, maybe after a later one: skip it."""
        with self._writing:
            if version > self._written:
                _replace(self._path, raw)
                self._written = version

    def _encode(self) -> bytes:
        topics = {
            name: {
                "topic_id": topic.topic_id,
                "queues": [_queue_to_json(queue, topic.queues[queue]) for queue in topic.queues],
            }
            for name, topic in self._topics.items()
        }
        content = {"format": FORMAT, "group": self._group, "topics": topics}
        return json.dumps(content | {"crc32": _checksum(content)}, indent=1).encode()

    def _decode(self, raw: bytes) -> dict[str, _Topic]:
        try:
            content = json.loads(raw)
            if content.pop("crc32") != _checksum(content):
                raise self._damaged("the checksum does not match")
            if content["format"] != FORMAT:
                raise self._damaged(f"format {content['format']!r} is not known")
            topics = {
                name: _topic_from_json(name, topic) for name, topic in content["topics"].items()
            }
            group = content["group"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(f"it is not valid: {error!r}") from error
        if group != self._group:
            raise InvalidArgument(
                f"offsets file {self._path} belongs to group {group}, not {self._group}",
                remedy="Give each group a file of its own.",
                facts={"field": "offsets_file"},
            )
        return topics

    def _damaged(self, why: str) -> BatonError:
        return DataLoss(
            f"offsets file {self._path} is damaged: {why}",
            remedy="Restore the file from a copy, or move it away; without it the member starts "
            "where consume_from says.",
        )


def _queue_to_json(queue: QueueRef, progress: LocalProgress | None) -> dict[str, Any]:
    name = {"broker": queue.broker, "queue_id": queue.queue_id}
    if progress is None:
        return name
    return name | {"committed_offset": progress.committed, "acked": list(progress.acked)}


def _topic_from_json(name: str, topic: Mapping[str, Any]) -> _Topic:
    made = _Topic(int(topic["topic_id"]))
    for each in topic["queues"]:
        progress = None
        if "committed_offset" in each:
            acked = tuple((int(first), int(end)) for first, end in each["acked"])
            progress = LocalProgress(int(each["committed_offset"]), acked)
        made.queues[QueueRef(name, str(each["broker"]), int(each["queue_id"]))] = progress
    return made


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _replace(path: Path, raw: bytes) -> None:
    beside = path.with_name(f"{path.name}.new")
    try:
        with beside.open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
