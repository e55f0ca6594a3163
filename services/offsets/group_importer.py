"""Groups come from another replica set, as etcd says: the leader of the new set fetches them.

    1  ARRIVING is written: nothing about the group is answered yet
    2  the old set seals it and hands it over, part by part; each is written
    3  HERE is written, with what has to change on the way; from now on it is answered here
    4  the old set forgets what it has handed over
    5  etcd notes that the move is finished, so that another one may follow

Each step may be repeated, and is, from the first one that was not done: by this leader, or the
next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.offsets.v1 import offsets_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc
from batonmq._common.aio import wait_until
from batonmq._common.clock import Clock
from batonmq._common.rpc import answered
from batonmq._core.queues import GroupQueue
from batonmq.errors import BatonError, NoQuorum
from batonmq_server.offsets.codec import (
    META,
    decode_key,
    decode_progress,
    decode_reset,
    seal,
    unseal,
)
from batonmq_server.offsets.core.change_log import Entry
from batonmq_server.offsets.core.local_placements import LocalPlacement, PlacementState
from batonmq_server.offsets.core.progress import Progress
from batonmq_server.offsets.core.resets import RecordedReset
from batonmq_server.offsets.core.values import Instant, Tombstone
from batonmq_server.offsets.group_exporter import EpochState
from batonmq_server.offsets.persistence import (
    RESET,
    PlacementKey,
    RawEntries,
    entries_of_group,
    placement_entry,
    tombstone_entries,
)
from batonmq_server.runtime.etcd import Compare, EtcdSession, Put
from batonmq_server.runtime.mirror import Mirror
from batonmq_server.runtime.places import PREFIX, Place, place_of

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
RETRY_MS = 200
AT_ONCE_MAX = 8


@dataclass(frozen=True, slots=True)
class PlacementDirectory:
    """Where groups come from, and who has to be told.

    Attributes:
        offsets_set: Name of this replica set.
        places: Mirror of the places, run by somebody else.
        stub: Of the leader of a set; raises `Unreachable` if there is none.
    """

    offsets_set: str
    etcd: EtcdSession
    places: Mirror
    stub: Callable[[str], pb_grpc.OffsetsServiceAsyncStub]


class GroupImporter:
    """Fetches groups for one epoch."""

    def __init__(self, state: EpochState, directory: PlacementDirectory, clock: Clock) -> None:
        self._table, self._records = state.table, state.records
        self._commits, self._disk, self._placement_lock = (
            state.commits,
            state.disk,
            state.placement_lock,
        )
        self._directory, self._clock = directory, clock
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Fetch for ever what is to be here; to be run as one task."""
        places = self._directory.places
        told = self._tell
        places.on_change.append(told)
        try:
            await places.ready()
            await self._place_what_is_here()
            while True:
                self._changed.clear()
                waiting = self._waiting()
                turns = asyncio.Semaphore(AT_ONCE_MAX)
                async with asyncio.TaskGroup() as tasks:
                    for group, place in waiting.items():
                        tasks.create_task(self._try(group, place, turns))
                if waiting:
                    await wait_until(self._changed, RETRY_MS)
                else:
                    await self._changed.wait()
        finally:
            places.on_change.remove(told)

    async def _place_what_is_here(self) -> None:
        """Groups that began here and have no place get it, before another set is given them."""
        groups = {key.group for key, _ in self._table.items()}
        here = Place(self._directory.offsets_set).encode()
        for group in sorted(groups - self._directory.places.values.keys()):
            while self._table.placements.get(group) is None:
                key = PREFIX + group
                try:
                    await self._directory.etcd.txn(
                        compare=[Compare(key, create_revision=0)], put=[Put(key, here)]
                    )
                    break
                except NoQuorum as error:
                    log.info("group has no place yet group=%s why=%s", group, error)
                    await asyncio.sleep(RETRY_MS / 1000)

    def _tell(self, _: frozenset[str]) -> None:
        self._changed.set()

    def _waiting(self) -> dict[str, Place]:
        """Groups that are to be here, and whose move is not finished."""
        found = {group: place_of(stored) for group, stored in self._directory.places.values.items()}
        return {
            group: place
            for group, place in found.items()
            if place.offsets_set == self._directory.offsets_set and place.from_set
        }

    async def _try(self, group: str, place: Place, turns: asyncio.Semaphore) -> None:
        try:
            async with turns:
                await self._move(group, place)
        except BatonError as error:
            log.info("group has not arrived yet group=%s move=%d why=%s", group, place.move, error)

    async def _move(self, group: str, place: Place) -> None:
        placement = self._table.placements.get(group)
        if placement is not None and placement.move > place.move:
            return  # what is known here of etcd is old
        if (
            placement is None
            or placement.move < place.move
            or placement.state is PlacementState.ARRIVING
        ):
            await self._fetch(group, place)
        forget = pb.ForgetGroupRequest(group=group, move=place.move)
        stub = self._directory.stub(place.from_set)
        await answered(stub.ForgetGroup(forget, timeout=CALL_TIMEOUT_S))
        key = PREFIX + group
        finished = Place(place.offsets_set, place.move)
        done = await self._directory.etcd.txn(
            compare=[Compare(key, mod_revision=place.revision)], put=[Put(key, finished.encode())]
        )
        if done:
            log.info("group moved group=%s move=%d from=%s", group, place.move, place.from_set)

    async def _fetch(self, group: str, place: Place) -> None:
        async with self._placement_lock:
            self._table.placements.put(group, LocalPlacement(place.move, PlacementState.ARRIVING))
            await self._written(PlacementKey(group))
        request = pb.HandOverRequest(
            group=group, move=place.move, to_set=self._directory.offsets_set
        )
        while True:
            stub = self._directory.stub(place.from_set)
            answer = await answered(stub.HandOver(request, timeout=CALL_TIMEOUT_S))
            entries = [(entry.key, entry.value) for entry in answer.entries]
            for key, value in entries:
                unseal(key, value)
            async with self._placement_lock:
                await self._written(RawEntries(entries))
            if answer.last:
                break
            request.after_key = answer.entries[-1].key
        await self._open(group, place, answer.term, answer.topic_ids)

    async def _open(
        self, group: str, place: Place, term: int, topic_ids: Mapping[str, int]
    ) -> None:
        """All of the group is written here: begin to answer.

        A topic whose progress was deleted here, and not before the group left its old set, is
        deleted of the group too. Ids that this set has not heard of yet are noted with the group,
        so that what is deleted for them later leaves alone what the group has begun since.
        """
        async with self._placement_lock:
            now = Instant(self._clock.monotonic_ms(), self._clock.unix_ms())
            own_ids = self._table.topic_ids
            ahead = {topic: one for topic, one in topic_ids.items() if one > own_ids.get(topic, 0)}
            placement = LocalPlacement(place.move, PlacementState.HERE, topic_ids=ahead)
            queues, operations = _decoded(await entries_of_group(self._disk, group))
            at, value = placement_entry(group, placement)
            changes: list[Entry] = [(at, seal(at, value))]
            for key, state in queues.items():
                deleted = own_ids.get(key.topic, 0) > topic_ids.get(key.topic, 0)
                if deleted and not isinstance(state, Tombstone):
                    ended = Tombstone(state.token + 1, state.reset_epoch + 1, now.unix_ms)
                    changes += tombstone_entries(key, ended)
                    queues[key] = ended
            if term > self._table.term:
                self._table.announce(term)
                self._commits.mark_changed(None)
            await self._written(RawEntries(changes))
            for key, state in queues.items():
                self._table.restore(key, state, now)
            for operation in operations:
                self._records.put(group, operation)
            self._table.placements.put(group, placement)
        log.info("group is here group=%s move=%d queues=%d", group, place.move, len(queues))

    async def _written(self, key: PlacementKey | RawEntries) -> None:
        self._commits.check_room()
        self._commits.mark_changed(key)
        await self._commits.wait_all_durable()


def _decoded(
    entries: list[tuple[bytes, bytes]],
) -> tuple[dict[GroupQueue, Progress | Tombstone], list[RecordedReset]]:
    queues: dict[GroupQueue, Progress | Tombstone] = {}
    operations = []
    for key, sealed in entries:
        value = unseal(key, sealed)
        if key.startswith(RESET):
            operations.append(decode_reset(value))
        elif not key.startswith(META):
            queue = decode_key(key)
            queues[queue] = decode_progress(queue, value)
    return queues, operations
