"""Checks responses when a server sends them: what a response claims is durable by then."""

from __future__ import annotations

from typing import Any

from baton.common.v1 import queue_pb2
from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.storage.v1 import storage_service_pb2 as storage_pb
from batonmq._common.rpc import error_from_pb
from batonmq._core.queues import Incarnation
from batonmq.errors import BatonError, Internal, Paused
from batonmq_server.lockmgr.core.lock_entry import LockPolicy
from batonmq_server.offsets.core.ranges import RangeSet
from tests.simulation.expected_state import ExpectedState, done, holder_of, key_of

RECORD_MS = 2_500
"""For this long storage may still record deliveries that it read before it learned of a pause."""

SPAN_MAX = 40
"""Messages of a queue that a simulated member may have in flight."""

_OF_OFFSETS = (
    offsets_pb.FenceResponse
    | offsets_pb.CommitResponse
    | offsets_pb.CloseResponse
    | offsets_pb.RecordDeliveredResponse
    | offsets_pb.ResetResponse
)


class AnswerChecks:
    """Checks every call when its client sends it, and every response when its server sends it."""

    def __init__(self, expected: ExpectedState) -> None:
        self._expected = expected

    def called(self, node: str, request: Any) -> None:
        """Check a call: storage records no delivery once it has seen the pause."""
        if not isinstance(request, offsets_pb.RecordDeliveredRequest):
            return
        for item in request.items:
            self._check_span(node, item)
        if request.items:
            self._check_pause(node, request)

    def _check_pause(self, node: str, delivery: Any) -> None:
        """Check that storage records and sends no delivery once it has seen the pause."""
        group = self._expected.group
        if node not in group.pause_known_ms:
            return
        known_ms = self._expected.now_ms() - group.pause_known_ms[node]
        if known_ms > RECORD_MS:
            self._expected.fail("pause", f"{node} delivers {known_ms} ms after it knew: {delivery}")

    def _check_span(self, node: str, item: offsets_pb.DeliveryItem) -> None:
        """Check that a member gets no more messages than may be delivered again after a crash.

        Acks in the same record are taken before the messages, or both are refused.
        """
        key = key_of(item.queue)
        queue = self._expected.queues[key]
        passes = self._expected.group.filters.get(item.subscription_generation)
        durable = queue.durable
        if durable is None or durable.token != item.token or passes is None:
            return
        committed_offset = durable.committed_offset
        if item.HasField("progress") and item.progress.reset_epoch == durable.reset_epoch:
            committed_offset = max(committed_offset, item.progress.committed_offset)
        offsets = range(committed_offset, item.next_offset)
        tags = [queue.stored[offset][1] for offset in offsets if offset in queue.stored]
        count = sum(map(passes.accepts, tags))
        if count > SPAN_MAX:
            self._expected.fail(
                "span", f"{key}: {node} delivers up to {item.next_offset}; that is {count} messages"
            )

    def answered(self, node: str, request: Any, answer: Any) -> None:
        """Check a response of a server."""
        if isinstance(answer, BatonError):
            if isinstance(answer, Internal):
                self._expected.fail("unexpected", f"{node} failed with {answer.message}: {request}")
            if isinstance(answer, Paused) and isinstance(request, storage_pb.PullRequest):
                self._paused(node, answer)
            return
        if isinstance(answer, storage_pb.DeliverResponse):
            for frame in answer.frames:
                if isinstance(error := error_from_pb(frame.error), Paused):
                    self._paused(node, error)
                elif frame.messages.batches:
                    self._check_pause(node, frame)
            return
        if isinstance(answer, lockmgr_pb.AcquireResponse | lockmgr_pb.KeepAliveResponse):
            self._lock_answered(node, request, answer)
        elif isinstance(answer, _OF_OFFSETS):
            items = request.items or answer.outcomes  # an undo names no items
            for item, outcome in zip(items, answer.outcomes, strict=True):
                if not outcome.HasField("error"):
                    self._offsets_answered(item, outcome)

    def _offsets_answered(self, item: Any, outcome: Any) -> None:
        match outcome:
            case offsets_pb.FenceOutcome():
                self._fence_answered(item, outcome.fenced)
            case offsets_pb.CommitOutcome() | offsets_pb.CloseOutcome():
                self._acks_answered(item, item)
            case offsets_pb.DeliveryOutcome() if outcome.delivered.HasField("progress"):
                self._acks_answered(item, item.progress)
            case offsets_pb.ResetOutcome():
                self._reset_answered(outcome.step)

    def _paused(self, node: str, refusal: Paused) -> None:
        group = self._expected.group
        if refusal.facts.get("reason") == group.paused and node not in group.pause_known_ms:
            self._expected.counts["pauses known"] += 1
            group.pause_known_ms[node] = self._expected.now_ms()

    def _granted(
        self, node: str, owner: queue_pb2.Incarnation, answer: lockmgr_pb.AcquireResponse
    ) -> None:
        key, token = key_of(answer.queue), answer.grant.token
        if self._expected.queues[key].persisted.get(token) != holder_of(owner):
            self._expected.fail("V11", f"{key}: {node} grants token {token}, not persisted")

    def _lock_answered(
        self,
        node: str,
        request: Any,
        answer: lockmgr_pb.AcquireResponse | lockmgr_pb.KeepAliveResponse,
    ) -> None:
        if isinstance(answer, lockmgr_pb.AcquireResponse):
            for one in (answer, *answer.others):
                if one.HasField("grant"):
                    self._granted(node, request.incarnation, one)
            return
        for hold, report in zip(request.holds, answer.reports, strict=False):
            if report.state == lockmgr_pb.HOLD_STATE_NOT_OWNER:
                self._disowned(node, holder_of(request.incarnation), hold)
            elif report.state in (lockmgr_pb.HOLD_STATE_OK, lockmgr_pb.HOLD_STATE_WANTED):
                self._renewed(node, hold)

    def _renewed(self, node: str, hold: lockmgr_pb.Hold) -> None:
        """Check that no token is renewed that is fenced or being fenced (stories 6, 7 and 12).

        A reset is not sent to the lock manager: the owner gets an error from its next call.
        """
        key = key_of(hold.queue)
        queue = self._expected.queues[key]
        in_force = self._expected.in_force(key, queue.durable) if queue.durable is not None else 0
        if in_force != hold.token and queue.revoked.get(hold.token) != "reset":
            self._expected.fail(
                "section 5", f"{key}: {node} renews {hold.token}; in force is {in_force}"
            )

    def _disowned(self, node: str, owner: Incarnation, hold: lockmgr_pb.Hold) -> None:
        """Check that no lock manager loses a lock, also after a failover (section 12).

        An owner that has left its group is renewed only for a while (section 5).
        """
        key = key_of(hold.queue)
        queue = self._expected.queues[key]
        if queue.durable is None or queue.owner != owner or queue.etcd_token != hold.token:
            return
        now_ms = self._expected.now_ms()
        left_ms = now_ms - self._expected.group.left_ms.get(owner, now_ms)
        overdue = left_ms > LockPolicy().evicted_renewal_ms
        if self._expected.in_force(key, queue.durable) == hold.token and not overdue:
            self._expected.fail(
                "section 12", f"{key}: {node} tells {owner} that it does not own {hold.token}"
            )

    def _fence_answered(self, item: offsets_pb.FenceItem, fenced: offsets_pb.Fenced) -> None:
        key = key_of(item.queue)
        durable = self._expected.queues[key].durable
        if durable is None or durable.token < fenced.token:
            self._expected.fail("V8", f"{key}: token {fenced.token} is answered and not durable")

    def _acks_answered(
        self,
        item: offsets_pb.CommitItem | offsets_pb.CloseItem | offsets_pb.DeliveryItem,
        acks: offsets_pb.CommitItem | offsets_pb.CloseItem | offsets_pb.Acks,
    ) -> None:
        key = key_of(item.queue)
        durable = self._expected.queues[key].durable
        if durable is not None and durable.reset_epoch > acks.reset_epoch:
            return
        acked = RangeSet.merged((r.first_offset, r.next_offset) for r in acks.acked)
        if acks.committed_offset:
            acked = acked.union(RangeSet.of(0, acks.committed_offset))
        if durable is None or acked.difference(done(durable)):
            self._expected.fail("V9", f"{key}: acks {acked} are answered and not durable")

    def _reset_answered(self, step: offsets_pb.ResetStep) -> None:
        key = key_of(step.queue)
        durable = self._expected.queues[key].durable
        if durable is None or durable.reset_epoch < step.reset_epoch:
            self._expected.fail(
                "V8", f"{key}: a reset to {step.to_offset} is answered, not durable"
            )
