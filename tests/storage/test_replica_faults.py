"""A replica set under random faults.

Goal: whichever nodes crash, are cut off, delayed, stopped or damaged, in any order: each message
with a receipt is stored once, at the offset of the receipt and in order; at the end all copies are
equal.
Method: writers retry each message at any node until it has a receipt, while faults from a seed hit
three real nodes in one process (tests/storage/replicas.py). A node is damaged only while another
node, which was never damaged, has everything.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from random import Random

import pytest

from batonmq.errors import BatonError
from tests.storage.batches import batch
from tests.storage.replicas import Replica, Scene, replica_set

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

WRITERS, FAULTS = 3, 5
HASTY = {
    "leader_lease_ms": 2_000,
    "node_lease_ms": 2_000,
    "replica_lag_ms_max": 1_000,
    "segment_bytes": 32 * 1024,
}
"""Short timeouts, so that a short fault has an effect."""
MINE = {"SEQUENCE_GAP", "DUPLICATE_SEQUENCE", "PRODUCER_FENCED", "DATA_LOSS", "INTERNAL"}
"""Errors that no fault may cause."""


class FaultRun:
    """The events of one replica set, and the expected state."""

    def __init__(self, scene: Scene, random: Random) -> None:
        self.scene, self.random = scene, random
        self.acked = [0] * WRITERS
        self.rotted: set[str] = set()
        self.over = asyncio.Event()

    async def write(self, queue_id: int) -> None:
        """Send messages one after another, each until it has a receipt."""
        while not self.over.is_set():
            number = self.acked[queue_id]
            body = b"%d" % number
            padding = bytes(self.random.randrange(2_000))
            one = batch(
                body + b" " + padding,
                queue_id=queue_id,
                producer=(1 + queue_id, 1),
                sequence=number,
            )
            if await self._stored(one, number):
                self.acked[queue_id] += 1

    async def _stored(self, one: bytes, number: int) -> bool:
        while not self.over.is_set():
            for node in self.alive():
                if node.stopping.is_set():  # stopping since `alive` was read
                    continue
                try:
                    (receipt,) = await node.append(one, timeout_s=1)
                except BatonError as error:
                    assert error.reason not in MINE, error
                else:
                    assert receipt.first_offset == number
                    return True
            await asyncio.sleep(0.02)
        return False

    async def inject_faults(self) -> None:
        """Inject some faults, one after another."""
        for _ in range(FAULTS):
            await asyncio.sleep(self.random.uniform(0.2, 1.5))
            node = self.random.choice(self.alive())
            fault = self.random.choice(("crash", "stop", "rot", "hold", "cut"))
            if fault == "hold":
                await self._hold(set(self.random.sample("abc", 2)))
            elif fault == "cut":
                node.session.cut = True
                await asyncio.sleep(self.random.uniform(0.2, 3))
                node.session.cut = False
            else:
                await (node.stop() if fault == "stop" else node.crash())
                if fault == "rot":
                    await self._rot(node)
                await asyncio.sleep(self.random.uniform(0, 2))
                await self.scene.start(node.name)
        self.over.set()

    def alive(self) -> list[Replica]:
        return [node for node in self.scene.nodes.values() if not node.stopping.is_set()]

    async def _hold(self, followers: set[str]) -> None:
        for node in self.alive():
            node.gate.shut |= followers
        await asyncio.sleep(self.random.uniform(0.2, 2))
        for node in self.alive():
            node.gate.shut.clear()

    async def _rot(self, node: Replica) -> None:
        """Damage the node if another in-sync node was never damaged.

        A damaged node stays in the in-sync set until it is removed. The damage is inside a written
        batch: bytes after the last batch of a segment are never read, so never repaired.
        """
        stored = node.log()
        if not stored or not (await self.scene.set_record()).in_sync - self.rotted - {node.name}:
            return
        self.rotted.add(node.name)
        name = self.random.choice(sorted(stored))
        content = bytearray(stored[name])
        content[self.random.randrange(len(stored[name].rstrip(b"\0")))] ^= 1
        (node.folder / "log" / name).write_bytes(content)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
async def test_acknowledged_messages_are_there_once_and_in_order(
    etcd_endpoint: str, tmp_path: Path, seed: int
) -> None:
    async with replica_set(etcd_endpoint, secrets.token_hex(8), tmp_path) as scene:
        random = Random(seed)
        scene.settings |= HASTY | {"min_in_sync": random.choice((1, 2))}
        await scene.start("a", "b", "c")
        story = FaultRun(scene, random)
        async with asyncio.TaskGroup() as tasks:
            for queue_id in range(WRITERS):
                tasks.create_task(story.write(queue_id))
            tasks.create_task(story.inject_faults())
        await scene.wait_in_sync("a", "b", "c")
        await scene.wait_equal()
        leader = await scene.leader()
        for queue_id, count in enumerate(story.acked):
            numbers = [body.split()[0] for body in await leader.bodies(queue_id)]
            assert count > 0
            assert numbers[:count] == [b"%d" % number for number in range(count)]
            assert len(numbers) <= count + 1, "the last message may be stored without a receipt"
