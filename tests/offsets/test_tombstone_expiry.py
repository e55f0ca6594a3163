"""Goal: nothing of a deleted group stays at offsets, and its next life repeats no token.

Method: the state of an epoch on a real disk, with a clock that the test moves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from batonmq._common.clock import Clock
from batonmq._core.queues import GroupQueue
from batonmq.errors import DiskFull, Fenced, UnknownQueue
from batonmq_server.offsets.core.change_log import Entry
from batonmq_server.offsets.core.ranges import EMPTY
from batonmq_server.offsets.core.resets import QueueReset, ResetExecutor, ResetOrder
from batonmq_server.offsets.core.values import (
    Acks,
    AckState,
    FenceAttempt,
    FenceCondition,
    Instant,
    ProgressSource,
    QueueLimits,
    Tombstone,
)
from batonmq_server.offsets.disk import LmdbDisk
from batonmq_server.offsets.epoch_state import EpochState
from batonmq_server.offsets.group_commit import GroupCommit
from batonmq_server.offsets.persistence import (
    FLOOR,
    HOLDS,
    DurableKey,
    entries_of,
    next_change,
    recover_standalone,
)
from batonmq_server.offsets.tombstone_expiry import KEPT_MS, TombstoneExpiry
from tests.offsets.rules_scene import A

KEY = GroupQueue("readers", "news", "broker-0", 0)
OTHER = GroupQueue("others", "news", "broker-0", 1)
META = frozenset((b"\0format", b"\0position", b"\0history", FLOOR))


class StillClock(Clock):
    """A clock that stands still between two calls of `advance`."""

    def __init__(self) -> None:
        self.now_ms = 1_000

    def monotonic_ms(self) -> int:
        return self.now_ms

    def unix_ms(self) -> int:
        return 1_700_000_000_000 + self.now_ms

    def advance(self, ms: int) -> None:
        self.now_ms += ms


class Scene:
    """An epoch without its servers."""

    def __init__(self, disk: LmdbDisk, clock: StillClock) -> None:
        self.disk, self.clock = disk, clock
        changes, self.table, history = recover_standalone(disk, QueueLimits(), self.now)
        self.full: DiskFull | None = None

        async def write(entries: Sequence[Entry]) -> None:
            change = next_change(changes, self.table.epoch, entries)
            await disk.write(change.entries)
            changes.append(change)

        self.commits: GroupCommit[DurableKey] = GroupCommit(
            write, entries_of(self.table, history), self.check_room
        )
        state = EpochState(table=self.table, history=history, commits=self.commits, disk=disk)
        self.resets = ResetExecutor(self.table, history)
        self.expiry = TombstoneExpiry(state, clock)

    @property
    def now(self) -> Instant:
        return Instant(self.clock.monotonic_ms(), self.clock.unix_ms())

    def check_room(self) -> None:
        if self.full is not None:
            raise self.full

    async def fence(self, key: GroupQueue, expected_token: int) -> int:
        """Return the token of a fence."""
        attempt = FenceAttempt(
            attempt=f"{key}-{self.table.epoch}-{expected_token}-{self.clock.unix_ms()}",
            expected_token=expected_token,
            condition=FenceCondition.CLOSED_OR_DRAINED,
            holder=A,
        )
        grant = self.table.fence(key, self.table.term, attempt, self.now)
        await self.durable(key)
        return grant.token

    async def use(self, key: GroupQueue, fences: int) -> None:
        """Fence a queue that has no progress, so often."""
        for token in range(fences):
            assert await self.fence(key, token) == token + 1
            self.table.close(key, token + 1, Acks(0, 0, EMPTY), EMPTY, self.now)

    async def delete(self, group: str) -> None:
        await self.durable(*self.table.delete_group(group, "", self.now))

    async def durable(self, *keys: DurableKey) -> None:
        for key in keys:
            self.commits.mark_changed(key)
        await self.commits.wait_all_durable()

    def stored(self) -> list[bytes]:
        """Return the keys on the disk that belong to queues and groups."""
        return [key for key, _ in self.disk.read() if key not in META]


@asynccontextmanager
async def opened(folder: Path, clock: StillClock) -> AsyncIterator[Scene]:
    with LmdbDisk(folder) as disk:
        scene = Scene(disk, clock)
        async with asyncio.TaskGroup() as tasks:
            writer = tasks.create_task(scene.commits.run())
            yield scene
            writer.cancel()


@pytest.fixture
def clock() -> StillClock:
    return StillClock()


async def test_deleted_group_leaves_nothing_but_the_floor_after_7_days(
    tmp_path: Path, clock: StillClock
) -> None:
    async with opened(tmp_path, clock) as scene:
        await scene.use(KEY, 3)
        order = ResetOrder("op", ProgressSource.RESET, "admin", "replay")
        target = QueueReset(KEY, AckState(0))
        outcome = scene.resets.reset(KEY.group, order, [target], scene.now, dry_run=False)
        await scene.durable(KEY, outcome.slot)
        await scene.delete(KEY.group)
        clock.advance(KEPT_MS)
        await scene.expiry.expire()
        assert scene.table.state(KEY) == Tombstone(5, 2, clock.unix_ms() - KEPT_MS)
        assert scene.resets.history.newest_first(KEY.group)
        clock.advance(1)
        await scene.expiry.expire()
        assert scene.stored() == []
        assert not scene.table.knows(KEY.group)
        assert scene.resets.history.newest_first(KEY.group) == []
    async with opened(tmp_path, clock) as scene:
        assert scene.table.floor == (5, 2)
        with pytest.raises(UnknownQueue) as raised:
            scene.table.query(KEY)
        assert (raised.value.detail.token, raised.value.detail.reset_epoch) == (0, 2)


async def test_next_life_of_a_queue_repeats_no_token(tmp_path: Path, clock: StillClock) -> None:
    async with opened(tmp_path, clock) as scene:
        await scene.use(KEY, 3)
        await scene.delete(KEY.group)
        clock.advance(KEPT_MS + 1)
        await scene.expiry.expire()
        assert await scene.fence(KEY, 0) == 5, "the tombstone had token 4"
        with pytest.raises(Fenced):
            scene.table.commit(KEY, 3, Acks(0, 0, EMPTY), scene.now)
    async with opened(tmp_path, clock) as scene:
        assert scene.table.query(KEY).token == 5
        with pytest.raises(UnknownQueue):
            scene.table.commit(OTHER, 3, Acks(0, 0, EMPTY), scene.now)
        assert await scene.fence(OTHER, 0) == 5, "the floor is that of all queues of the set"


async def test_late_commit_without_a_token_does_not_begin_the_next_life(
    tmp_path: Path, clock: StillClock
) -> None:
    async with opened(tmp_path, clock) as scene:
        scene.table.commit_unowned(KEY, Acks(0, 4, EMPTY), scene.now)
        await scene.durable(KEY)
        await scene.delete(KEY.group)
        clock.advance(KEPT_MS + 1)
        await scene.expiry.expire()
        with pytest.raises(Fenced):
            scene.table.commit_unowned(KEY, Acks(0, 9, EMPTY), scene.now)
        assert scene.table.commit_unowned(KEY, Acks(1, 2, EMPTY), scene.now).committed_offset == 2


async def test_young_tombstone_keeps_the_resets_of_its_group(
    tmp_path: Path, clock: StillClock
) -> None:
    second = KEY._replace(queue_id=1)
    async with opened(tmp_path, clock) as scene:
        order = ResetOrder("op", ProgressSource.RESET, "admin", "replay")
        targets = [QueueReset(key, AckState(0)) for key in (KEY, second)]
        outcome = scene.resets.reset(KEY.group, order, targets, scene.now, dry_run=False)
        await scene.durable(KEY, second, outcome.slot)
        await scene.delete(KEY.group)
        clock.advance(KEPT_MS)
        await scene.fence(second, 2)
        await scene.delete(KEY.group)
        clock.advance(1)
        await scene.expiry.expire()
        assert scene.table.state(KEY) is None
        assert scene.table.state(second) is not None
        assert [one.order.op_id for one in scene.resets.history.newest_first(KEY.group)] == ["op"]


async def test_many_tombstones_are_removed_in_several_writes(
    tmp_path: Path, clock: StillClock
) -> None:
    keys = [KEY._replace(queue_id=number) for number in range(2_500)]
    async with opened(tmp_path, clock) as scene:
        for key in keys:
            scene.table.commit_unowned(key, Acks(0, 1, EMPTY), scene.now)
        await scene.durable(*keys)
        await scene.delete(KEY.group)
        clock.advance(KEPT_MS + 1)
        await scene.expiry.expire()
        assert scene.stored() == []


async def test_tombstones_stay_while_no_change_can_be_made(
    tmp_path: Path, clock: StillClock
) -> None:
    async with opened(tmp_path, clock) as scene:
        await scene.use(KEY, 1)
        await scene.delete(KEY.group)
        clock.advance(KEPT_MS + 1)
        scene.full = DiskFull("no room")
        with pytest.raises(DiskFull):
            await scene.expiry.expire()
        assert scene.table.state(KEY) is not None
        scene.full = None
        await scene.expiry.expire()
        assert [key for key in scene.stored() if not key.startswith(HOLDS)] == []
