"""Goal: whatever storage sends in advances, offsets counts it as delivered, and it flags nothing
else once every advance is settled.

Method: a Hypothesis state machine on one queue of a real table. Deliveries of several nodes record,
send in their advances and settle, with late and repeated calls, lost answers, acks, takeovers,
closes and restarts of offsets. The holder uses the frames of its newest delivery only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batonmq.errors import BatonError, Unacked
from batonmq_server.offsets.core.ranges import RangeSet
from batonmq_server.offsets.core.values import QueueLimits
from tests.offsets.naive_model import members
from tests.offsets.rules_scene import IDLE, SAME_HOLDER, A, B, Scene, offsets

SPAN = 20


@dataclass
class Delivery:
    """A delivery of a node: the advance that it may use, and what it has sent."""

    token: int
    next_offset: int
    advance_id: int = 0
    advance_to: int = 0


class Machine(RuleBasedStateMachine):
    """Runs deliveries on a table; `started` has what the holder of the token has received."""

    def __init__(self) -> None:
        super().__init__()
        self.scene = Scene(QueueLimits(span_max=SPAN))
        self.holders = [A, B]
        self.token, self.ids, self.acked = 1, 100, set[int]()
        self.scene.fence(A, 0)
        self.started: set[int] = set()
        self.newest = Delivery(1, 0)
        self.unsettled: list[Delivery] = []
        self.late: list[Any] = []
        self.is_precise = True
        """Whether no advance was left open by a lost or late call, and no flag is a bound."""

    @property
    def committed(self) -> int:
        return self.scene.queue.committed_offset

    def receive(self, first: int, next_: int) -> None:
        self.started |= set(range(first, next_))

    @rule(size=st.integers(1, 3), ahead=st.integers(0, 12), lost=st.sampled_from([0] * 9 + [1]))
    def record(self, size: int, ahead: int, lost: int) -> None:
        delivery = self.newest
        if not delivery.advance_id:
            self.ids += 1
            delivery.advance_id = self.ids
            self.unsettled.append(delivery)
        first, next_ = delivery.next_offset, delivery.next_offset + size
        call = (self.token, first, next_, 0, (delivery.advance_id, next_ + ahead))
        self.late.append(("record", call))
        permitted = self.scene.record(*call).advance_to
        if lost:
            self.begin_another(delivery.next_offset)
            self.is_precise = False  # what was recorded was not sent
            return
        delivery.next_offset, delivery.advance_to = next_, permitted
        self.receive(first, next_)

    @precondition(lambda self: self.newest.advance_to > self.newest.next_offset)
    @rule(data=st.data())
    def send_in_the_advance(self, data: st.DataObject) -> None:
        delivery = self.newest
        sent = data.draw(st.integers(delivery.next_offset + 1, delivery.advance_to))
        self.receive(delivery.next_offset, sent)
        delivery.next_offset = sent

    @precondition(lambda self: self.unsettled)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        delivery = data.draw(st.sampled_from(self.unsettled))
        self.unsettled.remove(delivery)
        call = (delivery.token, delivery.advance_id, delivery.next_offset)
        self.late.append(("settle", call))
        self.scene.settle(*call)
        delivery.advance_id = delivery.advance_to = 0

    @rule()
    def another_delivery_begins(self) -> None:
        self.begin_another(self.newest.next_offset)

    def begin_another(self, offset: int) -> None:
        self.newest.advance_to = 0
        self.newest = Delivery(self.token, offset)

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def a_call_arrives_again(self, data: st.DataObject) -> None:
        name, call = data.draw(st.sampled_from(self.late[-6:]))
        self.is_precise = False
        if name == "settle":
            self.scene.settle(*call)
            return
        try:
            self.scene.record(*call)
        except BatonError as error:
            assert error.reason in ("FENCED", "DELIVERY_GAP")

    @precondition(lambda self: self.started - self.acked)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        some = sorted(self.started - self.acked)
        handled = set(some[: data.draw(st.integers(1, len(some)))])
        for offset in handled:
            self.scene.commit(self.token, 0, _all([offset]))
        self.acked |= handled

    @rule()
    def a_quiet_owner_is_replaced(self) -> None:
        before = self.scene.queue.maybe_seen
        try:
            grant = self.scene.fence(self.holders[1], self.token)
        except Unacked:
            return
        assert self.started <= self.acked, "V6"
        assert grant.maybe_seen == before, "nothing is flagged"
        self.owned_by_another()

    @rule()
    def an_owner_closes(self) -> None:
        unfinished = sorted(self.started - self.acked)[:2]
        before = members(self.scene.queue.maybe_seen)
        self.scene.close(self.token, 0, unfinished=_all(unfinished))
        grant = self.scene.fence(self.holders[1], self.token)
        assert members(grant.maybe_seen) == before | set(unfinished), "only these are flagged"
        self.owned_by_another()

    @rule()
    def a_silent_owner_is_replaced(self) -> None:
        before, in_flight = members(self.scene.queue.maybe_seen), self.started - self.acked
        self.scene.now_ms += 30_000
        flagged = members(self.scene.fence(self.holders[1], self.token, IDLE).maybe_seen)
        assert in_flight <= flagged, "V7"
        if self.is_precise and not self.unsettled:
            assert flagged == before | in_flight, "nothing else is flagged"
        self.owned_by_another()

    def owned_by_another(self) -> None:
        self.holders.reverse()
        self.token += 1
        self.started, self.is_precise = set(), True
        self.newest.advance_to = 0
        self.newest = Delivery(self.token, self.committed)
        self.unsettled = []

    @rule()
    def the_owner_acquires_again(self) -> None:
        running = self.started - self.acked
        self.scene.fence(self.holders[0], self.token, SAME_HOLDER, resume=_all(running))
        self.token += 1
        self.begin_another(max([self.committed, *(offset + 1 for offset in self.started)]))
        self.unsettled, self.is_precise = [], False

    @rule()
    def offsets_restarts(self) -> None:
        self.scene.restart()
        self.is_precise = False

    @invariant()
    def every_started_offset_counts_as_delivered(self) -> None:
        queue = self.scene.queue
        beyond = {o for o in self.started - self.acked if o >= queue.delivered_offset}
        assert not beyond, "V8"
        assert queue.delivered_offset <= queue.delivered_reserved
        if queue.advance is not None:
            assert queue.advance.end_offset <= max(queue.delivered_known, self.committed + SPAN)

    @invariant()
    def settled_queue_is_exact(self) -> None:
        queue, sent = self.scene.queue, max([0, *(offset + 1 for offset in self.started)])
        if self.is_precise and not self.unsettled:
            assert queue.delivered_offset == max(sent, self.committed)


def _all(some: Iterable[int]) -> RangeSet:
    return offsets(*((offset, offset + 1) for offset in sorted(some)))


TestAdvances = Machine.TestCase
TestAdvances.settings = settings(max_examples=500, stateful_step_count=50, deadline=None)
