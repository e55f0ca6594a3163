"""Storage and nameservers that leave out a rule; see protocol section 17 for names in brackets."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from baton.storage.v1 import storage_service_pb2 as pb
from batonmq_server.nameserver import group_store
from batonmq_server.nameserver.group_store import GroupStore
from batonmq_server.runtime.group_gates import GroupGates
from batonmq_server.runtime.group_record import HEAD, Parts, changed_parts
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.deliverer import Delivered, Deliverer, without_progress
from batonmq_server.storage.delivery_advance import DeliveryAdvance
from batonmq_server.storage.delivery_recorder import (
    DeliveryRecorder,
    PendingDelivery,
    RecordedDelivery,
    Settlement,
)
from batonmq_server.storage.delivery_streams import _Delivery, _DeliveryStream
from batonmq_server.storage.long_polls import QueueOwner
from batonmq_server.storage.validation import ParsedPull
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


def stream_outlives_its_token(patch: pytest.MonkeyPatch) -> None:
    """Storage records only the first frame that it delivers under a token."""
    real, recorded = Deliverer._record, dict[QueueOwner, RecordedDelivery]()

    async def record(
        self: Deliverer, key: QueueKey, pull: ParsedPull, range_: tuple[int, int]
    ) -> RecordedDelivery:
        if pull.owner not in recorded:
            recorded[pull.owner] = await real(self, key, pull, range_)
        return recorded[pull.owner]

    patch.setattr(Deliverer, "_record", record)


def acks_confirmed_without_a_record(patch: pytest.MonkeyPatch) -> None:
    """A frame of an advance leaves without a call though there are acks, and confirms them."""
    covering, sent = Deliverer._covering, _Delivery.sent

    def without_acks(
        self: Deliverer, key: QueueKey, pull: ParsedPull, range_: tuple[int, int]
    ) -> RecordedDelivery | None:
        return covering(self, key, without_progress(pull), range_)

    def confirming(self: _Delivery, delivered: Delivered, byte_count: int) -> None:
        if delivered.reading is not None:
            delivered.response.progress_taken = True
            delivered = delivered._replace(recorded=True)
        sent(self, delivered, byte_count)

    patch.setattr(Deliverer, "_covering", without_acks)
    patch.setattr(_Delivery, "sent", confirming)


def credit_of_an_earlier_delivery(patch: pytest.MonkeyPatch) -> None:
    """Storage adds the credit of earlier deliveries of a queue to that of a new one."""
    start, given = _DeliveryStream._start, dict[tuple[str, str, int], int]()

    def begin(self: _DeliveryStream, number: int, delivery: pb.DeliveryStart) -> None:
        queue = delivery.pull.queue
        key = queue.group, queue.queue.topic, queue.queue.queue_id
        delivery.credit.messages_limit += given.get(key, 0)
        given[key] = delivery.credit.messages_limit
        start(self, number, delivery)

    patch.setattr(_DeliveryStream, "_start", begin)


def settle_at_the_last_record(patch: pytest.MonkeyPatch) -> None:
    """An advance is settled without the frames that needed no call."""
    real = DeliveryAdvance.settle

    def settle(self: DeliveryAdvance) -> Settlement:
        return replace(real(self), sent_offset=self._call_offset)

    patch.setattr(DeliveryAdvance, "settle", settle)


def deliver_after_the_settlement(patch: pytest.MonkeyPatch) -> None:
    """Storage goes on to use an advance that it has settled."""
    real = DeliveryAdvance.settle

    def settle(self: DeliveryAdvance) -> Settlement:
        record = self._record
        settlement = real(self)
        if record is not None:
            self._record = replace(record, sent_ms=record.sent_ms + 5_000)
        return settlement

    patch.setattr(DeliveryAdvance, "settle", settle)
