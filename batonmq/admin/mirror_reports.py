"""Reports of `Mirror`."""

from __future__ import annotations

from dataclasses import dataclass

from batonmq._core.queues import QueueRef
from batonmq.errors import BatonError


@dataclass(frozen=True, slots=True)
class MirrorPlan:
    """What a mirror would do.

    Attributes:
        new_topics: Topics that would be created in the target.
        message_count: Messages to copy or to skip.
        new_standbys: Groups that would be created in the target, as standbys.
        groups_in_use: Groups that the target uses: their progress would be left alone.
        problems: Why the mirror would be rejected; empty if it would not.
    """

    topics: tuple[str, ...]
    new_topics: tuple[str, ...]
    queue_count: int
    message_count: int
    new_standbys: tuple[str, ...]
    groups_in_use: tuple[str, ...]
    problems: tuple[BatonError, ...]


@dataclass(frozen=True, slots=True)
class MirroredQueue:
    """A queue of a mirror.

    Attributes:
        mirrored_offset: Offset in the source after the last message that the target has; None if it
            has none.
        end_offset: End of the queue in the source.
        lag: Messages that are not mirrored. Those that another mirror has brought to the source
            count until a message after them is mirrored.
        removed: Messages of them that the source does not keep any more.
    """

    source: QueueRef
    target: QueueRef
    mirrored_offset: int | None
    end_offset: int
    lag: int
    removed: int


@dataclass(frozen=True, slots=True)
class MirroredGroup:
    """A group of a mirror, with its progress on all mirrored queues together.

    Attributes:
        state: `standby`, `in use` (in the target), or `missing`.
        lag: Messages in the source that the group has not handled there.
        target_lag: Messages in the target that would be delivered after a failover.
    """

    name: str
    state: str
    lag: int
    target_lag: int


@dataclass(frozen=True, slots=True)
class MirrorStatus:
    """How far a mirror has come, as both clusters say it; no mirror needs to run.

    Attributes:
        problems: Brokers that did not answer.
    """

    queues: tuple[MirroredQueue, ...]
    groups: tuple[MirroredGroup, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MirrorReport:
    """What a running mirror has done since its start.

    Attributes:
        copied_count: Messages that were copied.
        rate: Messages that were copied per second, since the report before.
        lag: Messages that are not copied yet.
        removed_count: Messages that were removed from the source before they were copied.
        skipped_count: Messages of other clusters, which were not copied.
        problems: Why queues and groups do not move.
        groups_in_use: Groups that the target uses: their progress is left alone, as planned.
    """

    copied_count: int
    rate: float
    lag: int
    removed_count: int
    skipped_count: int
    problems: tuple[str, ...]
    groups_in_use: tuple[str, ...]
