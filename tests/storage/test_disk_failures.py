"""A replica set in which the disk of a node fails, or is full, at a bad moment.

Goal: the node acknowledges nothing that may not be on its disk, resigns in favour of a healthy
node, and recovers by itself with the bytes of the others. After a failed sync the unsynced bytes
are never trusted.
Method: real nodes in one process (tests/storage/replicas.py); calls of their disks raise what the
kernel would (tests/storage/failing_disk.py). T26 and T28 of the standing test list.
"""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path

import pytest

from batonmq_server.storage.node import StorageNode
from tests.storage.batches import batch
from tests.storage.failing_disk import DiskFailure, FailingDisks, failing_disks
from tests.storage.replicas import Replica, Scene
from tests.storage.test_replication import numbered, others, three
from tests.support.conditions import until
from tests.support.replica_nodes import LEASE_MS

pytestmark = pytest.mark.timeout(180)
SYNC, REPLACE, CREATE = (frozenset({name}) for name in ("sync", "replace", "create"))


@pytest.fixture
def disks(monkeypatch: pytest.MonkeyPatch) -> FailingDisks:
    return failing_disks(monkeypatch)


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


async def wait_recovered(scene: Scene, node: Replica) -> None:
    """Wait until all nodes are in sync with the same bytes; `node` has not stopped."""
    await scene.wait_in_sync("a", "b", "c")
    await scene.wait_equal()
    assert not node.ended.is_set()


async def test_leader_whose_sync_fails_resigns_and_cuts_what_it_wrote(
    scene: Scene, disks: FailingDisks
) -> None:
    """The next sync would succeed, because the kernel has dropped the unwritten pages.

    Followers may be slow on a busy machine: if they left the in-sync set meanwhile, only the first
    leader could lead again.
    """
    scene.settings |= {"replica_lag_ms_max": 30_000}
    first = await three(scene)
    await first.append(*numbered(0, 3))
    failing = disks.failing[first.folder] = DiskFailure(errno.EIO, SYNC, left=1)
    error = await first.rejection(*numbered(3, 1))
    assert error.reason == "UNREACHABLE"
    assert failing.met == 1
    second = await scene.leader()
    assert second is not first
    assert await second.bodies() == numbers(3)
    (receipt,) = await second.append(*numbered(3, 1))
    assert (receipt.first_offset, receipt.duplicate) == (3, False)
    await wait_recovered(scene, first)


@pytest.mark.long
async def test_follower_whose_sync_fails_is_out_of_sync_until_it_has_everything(
    scene: Scene, disks: FailingDisks
) -> None:
    leader = await three(scene)
    follower = scene.nodes[others(scene, leader)[0]]
    failing = disks.failing[follower.folder] = DiskFailure(errno.EIO, SYNC)
    await leader.append(*numbered(0, 3))
    assert follower.name not in (await scene.set_record()).in_sync
    await until(lambda: failing.met > 3)
    disks.failing.clear()
    await wait_recovered(scene, follower)

    async def has_all() -> bool:  # it learns with its next answer that the set has them
        return await follower.bodies() == numbers(3)

    await until(has_all)


async def test_bytes_of_a_failed_sync_are_cut_off_even_if_the_first_cut_fails(
    scene: Scene, disks: FailingDisks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files look undamaged: only the running node has the position of the last good sync."""
    cuts: list[int] = []
    real = StorageNode.cut

    def cut(node: StorageNode, position: int, *, damaged: bool = False) -> None:
        cuts.append(position)
        if len(cuts) == 1:
            raise OSError(errno.EIO, "the cut fails")
        real(node, position, damaged=damaged)

    monkeypatch.setattr(StorageNode, "cut", cut)
    leader = await three(scene)
    await leader.append(*numbered(0, 3))
    await scene.wait_equal()
    follower = scene.nodes[others(scene, leader)[0]]
    disks.failing[follower.folder] = DiskFailure(errno.EIO, SYNC, left=1)
    await leader.append(*numbered(3, 1))
    await wait_recovered(scene, follower)
    assert len(cuts) == 2
    assert cuts[0] == cuts[1]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
async def test_node_that_cannot_record_its_epoch_leads_once_it_can(
    scene: Scene, disks: FailingDisks, number: int
) -> None:
    scene.members = ("a", "b")
    await scene.start("a", "b")
    first = await scene.leader()
    await scene.wait_in_sync("a", "b")
    await first.append(*numbered(0, 3))
    successor = scene.nodes[others(scene, first)[0]]

    async def seen() -> bool:
        return await successor.bodies() == numbers(3)

    await until(seen)
    failing = disks.failing[successor.folder] = DiskFailure(number, REPLACE)
    await first.crash()
    await until(lambda: failing.met > 0)
    assert not await successor.serves()
    assert await seen(), "reads are still served"
    disks.failing.clear()
    await scene.wait_vacant()
    successor.session.node_clock.ahead_ms += 3 * LEASE_MS  # it is no candidate during this time
    assert await scene.leader() is successor
    (receipt,) = await successor.append(*numbered(3, 1))
    assert receipt.first_offset == 3


async def test_elected_node_that_cannot_record_its_epoch_resigns_for_another(
    scene: Scene, disks: FailingDisks
) -> None:
    first = await three(scene)
    await first.append(*numbered(0, 3))
    await scene.wait_equal()
    folders = {scene.nodes[name].folder for name in others(scene, first)}

    def only(full: Path) -> None:
        for other in folders - {full}:
            disks.failing.pop(other, None)

    # The node that is elected first has no space; the other one has.
    for folder in folders:
        disks.failing[folder] = DiskFailure(errno.ENOSPC, REPLACE, on_failure=partial(only, folder))
    await first.crash()
    second = await scene.leader()
    ((full, failing),) = disks.failing.items()
    assert failing.met > 0
    assert second.folder != full
    assert await second.bodies() == numbers(3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("calls", "number"), [(REPLACE, errno.ENOSPC), (CREATE, errno.EIO), (REPLACE, errno.EIO)]
)
async def test_follower_that_cannot_discard_its_copy_does_so_later(
    scene: Scene, disks: FailingDisks, calls: frozenset[str], number: int
) -> None:
    scene.settings |= {"retention_bytes": 4 * 64 * 1024, "disk_interval_ms": 50}
    leader = await three(scene)
    follower = scene.nodes[others(scene, leader)[0]]
    await follower.stop()
    for _ in range(40):
        await leader.append(batch(bytes(20_000)), batch(bytes(20_000), queue_id=1))

    async def removed() -> bool:
        return (await leader.describe()).first_position > 0

    await until(removed)
    (follower,) = await scene.start(follower.name)
    failing = disks.failing[follower.folder] = DiskFailure(number, calls)
    await until(lambda: failing.met > 3)
    assert follower.name not in (await scene.set_record()).in_sync
    disks.failing.clear()
    await wait_recovered(scene, follower)
