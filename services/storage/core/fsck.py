"""Examines a data directory that is not in use: every batch of the log, and the indexes.

The indexes are rebuilt from the log, up to the checkpoint, without writing: each write is compared
with the existing file. The sections of compacted queues are compared with their orders and with the
batches that these list. The log is never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from batonmq._core.records import Header
from batonmq.errors import BatonError, DataLoss
from batonmq_server.runtime.descriptors import descriptors_max
from batonmq_server.storage.core import checkpoint
from batonmq_server.storage.core.checkpoint import Checkpoint
from batonmq_server.storage.core.checkpoint_writer import CheckpointWriter
from batonmq_server.storage.core.commitlog import FOLDER as LOG_FOLDER
from batonmq_server.storage.core.commitlog import CommitLog
from batonmq_server.storage.core.files import FILES_MAX, Disk, File, FileCache
from batonmq_server.storage.core.keyindex import FOLDER as KEYINDEX_FOLDER
from batonmq_server.storage.core.keyindex import KeyIndex, open_path
from batonmq_server.storage.core.producers import ProducerTable
from batonmq_server.storage.core.recovery import Recovery
from batonmq_server.storage.core.scan import END_OF_LOG, LogScan
from batonmq_server.storage.core.section_check import check_sections, compare_sections
from batonmq_server.storage.core.store import MessageStore

PROBLEMS_MAX = 1_000
_ANY_SEGMENT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class FsckProblem:
    """A problem that fsck has found.

    Attributes:
        part: `log`, `consumequeue`, `keyindex` or `checkpoint`.
        position: Position in the log; -1 if it does not apply.
    """

    part: str
    position: int
    detail: str


@dataclass(slots=True, kw_only=True)
class FsckReport:
    """The result of an examination.

    Attributes:
        problems: The first 1,000 problems; `problem_count` counts all.
        notes: Findings that are not problems but may surprise the operator.
        indexes_compared: Whether the indexes were compared: that needs a checkpoint.
        repaired: Whether the indexes were rebuilt.
        sections: Sections of compacted queues that were compared.
    """

    first_position: int = 0
    next_position: int = 0
    synced_position: int = 0
    checkpoint_position: int = 0
    segments: int = 0
    batches: int = 0
    messages: int = 0
    queues: int = 0
    sections: int = 0
    damaged_batches: int = 0
    problem_count: int = 0
    problems: list[FsckProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    indexes_compared: bool = False
    repaired: bool = False

    @property
    def log_is_good(self) -> bool:
        """Whether no problem is in the log."""
        return all(problem.part != "log" for problem in self.problems)

    def add(self, part: str, position: int, detail: str) -> None:
        """Add a problem."""
        self.problem_count += 1
        if len(self.problems) < PROBLEMS_MAX or (part == "log" and self.log_is_good):
            self.problems.append(FsckProblem(part, position, detail))


class ProtectedLogDisk(Disk):
    """A disk on which the log is read-only."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk

    def names(self, folder: str) -> list[str]:
        """See Disk."""
        return self.disk.names(folder)

    def create(self, path: str, size: int) -> File:
        """Fail: nothing may create a segment."""
        raise AssertionError(path)

    def open(self, path: str, *, create: bool = False) -> File:
        """See Disk."""
        return self.disk.open(path, create=create and not _in_log(path))

    def remove(self, path: str) -> None:
        """See Disk; files of the log are not removed."""
        if not _in_log(path):
            self.disk.remove(path)

    def load(self, path: str) -> bytes:
        """See Disk."""
        return self.disk.load(path)

    def space(self) -> tuple[int, int]:
        """See Disk."""
        return self.disk.space()

    def replace(self, path: str, content: bytes) -> None:
        """See Disk."""
        assert not _in_log(path), path
        self.disk.replace(path, content)

    def replace_sparse(self, path: str, head: bytes, size: int) -> None:
        """See Disk. Only a purge order of the log itself calls it."""
        self.disk.replace_sparse(path, head, size)

    def sync(self, paths: Sequence[str]) -> None:
        """See Disk."""
        self.disk.sync(paths)


class ComparingDisk(ProtectedLogDisk):
    """A read-only disk: each write is compared with the existing file.

    Attributes:
        ends: Once True, writes are no longer compared.
        is_purged: Returns whether a run of the key index is about a purged segment: it keeps
            entries of deleted topics that the log no longer has.
    """

    def __init__(self, disk: Disk, report: FsckReport) -> None:
        super().__init__(disk)
        self._report, self._different = report, set[str]()
        self.ends = False
        self.is_purged: Callable[[str], bool] = lambda _: False

    def open(self, path: str, *, create: bool = False) -> File:
        """See Disk."""
        if not create:
            return self.disk.open(path)
        return _ComparingFile(self, path)

    def remove(self, path: str) -> None:
        """Do nothing: the disk is read-only."""

    def replace_sparse(self, path: str, head: bytes, size: int) -> None:
        """Fail: an examination carries out no purge order."""
        raise AssertionError(path)

    def replace(self, path: str, content: bytes) -> None:
        """Compare `content` with the whole file."""
        if self.ends or not self._report.log_is_good or self.is_purged(path):
            return  # without the damaged batches a run can't be rebuilt
        if self.disk.load(path) != content:
            self.differs(path, "differs from the log")

    def differs(self, path: str, how: str) -> None:
        """Add a problem for the file at `path`, once."""
        if path not in self._different:
            self._different.add(path)
            self._report.add(path.split("/", maxsplit=1)[0], -1, f"{path} {how}")


class Fsck:
    """One examination of a data directory.

    Args:
        synced_position: Position up to which the log was synced.
    """

    def __init__(self, disk: Disk, synced_position: int) -> None:
        self._real = disk
        self.report = FsckReport(synced_position=synced_position)
        self._disk = ComparingDisk(disk, self.report)
        self._checkpoint: Checkpoint | None = None

    def run(self) -> FsckReport:
        """Examine everything."""
        try:
            store, recovery = _fresh(self._disk)
        except DataLoss as error:
            self.report.add("log", -1, error.message)
            return self.report
        self._disk.is_purged = partial(_is_purged_run, store.log)
        self._load_checkpoint(store.log)
        try:
            recovery.reset_indexes(self._checkpoint)
        except DataLoss as error:
            self.report.add("log", -1, error.message)
            return self.report
        self._scan(store, recovery)
        if self._checkpoint is not None and not self._disk.ends:
            self._compare(store, self._checkpoint)
        self._check_sections(store)
        log, report = store.log, self.report
        report.first_position = log.first_position
        report.segments = len(self._real.names(LOG_FOLDER))
        report.queues = store.queue_count
        store.cache.close()
        log.close()
        return report

    def repair(self) -> bool:
        """Rebuild the indexes unless the log has problems; return whether they were rebuilt."""
        if not self.report.log_is_good:
            return False
        disk = ProtectedLogDisk(self._real)
        store, recovery = _fresh(disk)
        recovery.reset_indexes(self._checkpoint)
        store.log.next_position, _ = recovery.scan(store.log.first_position)
        store.log.sync_closed()
        unsynced = store.log.unsynced()
        for file in unsynced.files:
            file.sync()
        store.synced(unsynced.position)
        CheckpointWriter(disk, store, 0).run()
        store.cache.close()
        store.log.close()
        self.report.repaired = True
        return True

    def _load_checkpoint(self, log: CommitLog) -> None:
        raw, report = self._real.load(checkpoint.PATH), self.report
        decoded = checkpoint.decode(raw)
        if decoded is None:
            self._disk.ends = True
            if raw:
                report.add("checkpoint", -1, "the checkpoint is damaged")
            elif log.first_position < log.next_position:
                report.notes.append("no checkpoint: the next start rebuilds all indexes")
            return
        report.checkpoint_position = decoded.position
        report.synced_position = max(report.synced_position, decoded.position)
        report.indexes_compared = True
        self._checkpoint = decoded

    def _scan(self, store: MessageStore, recovery: Recovery) -> None:
        """Scan the whole log, also after damaged batches."""
        report = self.report
        scan = LogScan(store.log, store.log.first_position)
        while True:
            for header, batch in scan:
                self._take(store, recovery, header, batch)
            report.next_position = at = scan.position
            if at >= report.synced_position:
                if scan.reason != END_OF_LOG:
                    report.notes.append(
                        f"torn tail at position {at}; the next start cuts it off: {scan.reason}"
                    )
                return
            reason = scan.reason
            found = scan.find_next()
            report.damaged_batches += 1
            end = f"; the next good batch is at {scan.position}" if found else ""
            report.add("log", at, f"damaged at position {at}: {reason}{end}")
            if not found:
                return

    def _take(
        self, store: MessageStore, recovery: Recovery, header: Header, batch: memoryview
    ) -> None:
        saved = self._checkpoint
        if saved is not None and not self._disk.ends and header.position >= saved.position:
            self._compare(store, saved)
        self.report.batches += 1
        self.report.messages += header.count
        try:
            recovery.take(header, batch)
        except DataLoss as error:
            self.report.add("log", header.position, error.message)
            key = header.topic_id, header.queue_id
            store.queues[key].flush()
            store.add_queue(key, header.topic, header.first_offset)
            store.restore(header, batch)
        except BatonError as error:
            self.report.add("log", header.position, error.message)

    def _compare(self, store: MessageStore, saved: Checkpoint) -> None:
        """Compare the indexes and the checkpoint with the rebuilt store at its position."""
        report = self.report
        store.flush()
        if not report.log_is_good:
            report.notes.append("checkpoint and key index not compared: the log is damaged")
            self._disk.ends = True
            return
        store.keys.write_ended_runs()
        keys = store.keys.unsaved(saved.position)
        path = open_path(keys.open_run.extent.first_position)
        content = self._real.load(path)[: keys.rows.nbytes]
        run = saved.open_run.extent
        if store.log.purged_between(run.first_position, saved.position):
            pass  # the purge is later than the checkpoint: the run still has the removed messages
        elif keys.open_run != saved.open_run or content != keys.rows.tobytes():
            self._disk.differs(path, "differs from the log and the checkpoint")
        at_checkpoint = {(queue.topic_id, queue.queue_id): queue for queue in saved.queues}
        for key, queue in store.queues.items():
            state = at_checkpoint.get(key)
            if queue.last_position < 0:
                continue  # a trim order names it; the log has none of its batches
            purged = store.log.purged_between(queue.last_position, saved.position)
            if purged and state is not None and state.next_offset > queue.next_offset:
                continue  # the purge is later than the checkpoint
            if state is None or state.next_offset != queue.next_offset:
                says = "nothing" if state is None else f"{state.next_offset}"
                report.add(
                    "checkpoint",
                    saved.position,
                    f"{queue.folder} ends at offset {queue.next_offset}; "
                    f"the checkpoint says {says}",
                )
        store.apply_compactions(saved.position)
        for problem in compare_sections(store.log, store.compacted.parts, saved.sections):
            report.add("checkpoint", problem.position, problem.detail)
        self._disk.ends = True

    def _check_sections(self, store: MessageStore) -> None:
        """Check the sections that a start of the node uses: of the checkpoint, and later ones."""
        report, compacted = self.report, store.compacted
        if self._checkpoint is not None:
            store.apply_compactions(self._checkpoint.position)
            for key in list(compacted.parts):
                compacted.forget(key)
            for key, section in self._checkpoint.sections:
                compacted.put(key, section)
        store.apply_compactions(report.next_position)
        report.sections = sum(len(part.sections) for part in compacted.parts.values())
        if not report.log_is_good:
            if report.sections:
                report.notes.append("compacted queues not compared: the log is damaged")
            return
        for problem in check_sections(store):
            if not problem.is_missing:
                report.add("log", problem.position, problem.detail)
            elif _is_ordered_away(store, problem.position):
                report.add("log", problem.position, f"{problem.detail}, although it is needed")
            else:
                report.notes.append(
                    f"{problem.detail}; a follower gets the newer order from its leader"
                )


class _ComparingFile(File):
    def __init__(self, disk: ComparingDisk, path: str) -> None:
        self._disk, self._path = disk, path

    @property
    def size(self) -> int:
        return 0

    def write(self, at: int, parts: Sequence[bytes | memoryview]) -> None:
        if self._disk.ends:
            return
        wanted = b"".join(parts)
        try:
            file = self._disk.disk.open(self._path)
        except FileNotFoundError:
            self._disk.differs(self._path, "is missing")
            return
        try:
            content = file.read(at, len(wanted))
        finally:
            file.close()
        if content != wanted:
            pairs = zip(content, wanted, strict=False)
            first = next((n for n, (a, b) in enumerate(pairs) if a != b), len(content))
            self._disk.differs(self._path, f"differs from the log at byte {at + first}")

    def read(self, at: int, bytes_max: int) -> bytes:
        raise AssertionError(self._path)

    def cut(self, at: int) -> int:
        raise AssertionError(self._path)

    def resize(self, size: int) -> None:
        raise AssertionError(self._path)

    def used(self, at: int) -> int:
        raise AssertionError(self._path)

    def sync(self) -> None:
        return

    def close(self) -> None:
        return


def _fresh(disk: Disk) -> tuple[MessageStore, Recovery]:
    cache = FileCache(disk, min(FILES_MAX, descriptors_max() // 4))  # the rest is for other uses
    log = CommitLog(disk, cache, _ANY_SEGMENT_BYTES)
    keys = KeyIndex(disk, cache, log.segment_end, log.first_position)
    store = MessageStore(log, cache, ProducerTable(), 0, keys)
    return store, Recovery(disk, store, synced_position=0, accept_loss=False)


def _is_ordered_away(store: MessageStore, position: int) -> bool:
    """Return whether the log has the order that purged its part at a position.

    A copy may begin with purged segments. Until it has the order that purged them, it has not got
    all compactions before that order either.
    """
    return any(
        begin <= position < end for order in store.purge_orders for begin, end in order.segments
    )


def _is_purged_run(log: CommitLog, path: str) -> bool:
    folder, _, name = path.partition("/")
    return folder == KEYINDEX_FOLDER and name.isdecimal() and log.is_purged(int(name))


def _in_log(path: str) -> bool:
    return path.split("/", maxsplit=1)[0] == LOG_FOLDER
