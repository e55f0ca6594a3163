"""Storage and nameservers that leave out a rule; see protocol section 17 for names in brackets."""

from __future__ import annotations

import itertools

import pytest

from batonmq_server.nameserver import group_store
from batonmq_server.nameserver.group_store import GroupStore
from batonmq_server.runtime.group_gates import GroupGates
from batonmq_server.runtime.group_record import HEAD, Parts, changed_parts
from batonmq_server.storage.delivery_recorder import (
    DeliveryRecorder,
    PendingDelivery,
    RecordedDelivery,
)
from tests.simulation.background import in_background


def record_after_sending(patch: pytest.MonkeyPatch) -> None:
    """[deliver_before_record] Storage sends messages before their delivery is recorded."""

    async def record(self: DeliveryRecorder, delivery: PendingDelivery) -> RecordedDelivery:
        in_background(self._batcher.call(delivery))
        return RecordedDelivery((), self._epoch, self._clock.monotonic_ms())

    patch.setattr(DeliveryRecorder, "record", record)


def flip_with_owners(patch: pytest.MonkeyPatch) -> None:
    """A new subscription becomes active while queues still have owners."""

    async def has_owner(*_: object) -> bool:
        return False

    patch.setattr(GroupStore, "_has_owner", has_owner)


def keep_keys_of_former_members(patch: pytest.MonkeyPatch) -> None:
    """A change of a group does not delete the keys of members that left."""

    def changed(before: Parts, after: Parts) -> tuple[dict[str, bytes], list[str]]:
        return changed_parts(before, after)[0], []

    patch.setattr(group_store, "changed_parts", changed)


def write_new_keys_only(patch: pytest.MonkeyPatch) -> None:
    """A change of a group does not write the keys that exist already, except the head."""

    def changed(before: Parts, after: Parts) -> tuple[dict[str, bytes], list[str]]:
        put, delete = changed_parts(before, after)
        return {part: put[part] for part in put if part == HEAD or part not in before}, delete

    patch.setattr(group_store, "changed_parts", changed)


def pause_known_now_and_then(patch: pytest.MonkeyPatch) -> None:
    """Storage checks for a paused group at every second pull only."""
    real, looks = GroupGates.check_running, itertools.count()

    def check_running(self: GroupGates, group: str) -> None:
        if next(looks) % 2:
            real(self, group)

    patch.setattr(GroupGates, "check_running", check_running)
