"""Checks writes to etcd: locks, and the group's record with its gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.lockmgr.v1 import stored_lock_pb2
from baton.nameserver.v1.stored_gate_pb2 import StoredGate
from baton.nameserver.v1.stored_group_pb2 import StoredGroup
from batonmq._core.queues import GroupQueue, Incarnation
from batonmq._core.subscription import TagFilter
from batonmq.errors import Internal
from batonmq_server.runtime.etcd.session import KeyValue
from batonmq_server.runtime.group_record import (
    GROUPS_PREFIX,
    HEAD,
    read_record,
    record_key,
    split_key,
)
from tests.simulation.expected_state import (
    ExpectedQueue,
    ExpectedState,
    holder_of,
    key_of,
    token_of,
)


class EtcdChecks:
    """Checks each write of a key, in etcd's order."""

    def __init__(self, expected: ExpectedState, topic: str) -> None:
        self._expected, self._topic = expected, topic

    def written(self, stored: KeyValue) -> None:
        """Check a new value of a key."""
        kind, _, rest = stored.key.partition("/")
        if kind == "locks":
            self._lock_written(stored_lock_pb2.StoredLock.FromString(stored.value))
        elif kind == "gates" and rest == self._expected.name:
            self._gate_written(StoredGate.FromString(stored.value))

    def changed(self, get_tree: Callable[[str], Sequence[KeyValue]], keys: frozenset[str]) -> None:
        """Check the record of the group after a transaction that has changed `keys`."""
        head = record_key(self._expected.name, HEAD)
        if not any(key == head or key.startswith(f"{head}/") for key in keys):
            return
        entries = get_tree(head)
        parts = {split_key(one.key.removeprefix(GROUPS_PREFIX))[1]: one.value for one in entries}
        if not parts:
            return
        try:
            self._group_written(read_record(self._expected.name, parts).group)
        except Internal as error:
            self._expected.fail("record", error.message)

    def _lock_written(self, lock: stored_lock_pb2.StoredLock) -> None:
        expected, key = self._expected, key_of(lock.queue)
        queue = expected.queues[key]
        owner = holder_of(lock.owner) if lock.HasField("owner") else None
        expected.trace.note("etcd", f"{key} is {owner.client_id if owner else 'free'} {lock.token}")
        if lock.token < queue.etcd_token:
            expected.fail(
                "V1", f"{key}: token in etcd fell from {queue.etcd_token} to {lock.token}"
            )
        if owner is not None and owner == queue.owner and lock.acquire_seq < queue.acquire_seq:
            expected.fail("story 8", f"{key}: request {lock.acquire_seq} after {queue.acquire_seq}")
        former = queue.owner
        queue.etcd_token, queue.owner, queue.acquire_seq = lock.token, owner, lock.acquire_seq
        self._check_issued(key, queue, owner, lock.token)
        if owner is None:
            return
        queue.persisted[lock.token] = owner
        group = expected.group
        if not owner.matches(former) and not group.may_take(key, owner, lock.generation):
            expected.fail("section 7", f"{key} goes to {owner}, to which it is not assigned")
        if group.draining:
            expected.fail("section 14", f"{key} goes to {owner} while the subscription is changed")
        if group.bound and lock.subscription_generation != group.generation:
            expected.fail(
                "section 14",
                f"{key} goes to {owner} for generation {lock.subscription_generation} of the "
                f"subscription; it is {group.generation}",
            )

    def _check_issued(
        self, key: GroupQueue, queue: ExpectedQueue, owner: Incarnation | None, token: int
    ) -> None:
        """V1: each token in etcd was durably issued by offsets to the same incarnation."""
        if token not in queue.fenced or token > token_of(queue.durable):
            self._expected.fail("V1", f"{key}: etcd has token {token}, never issued")
        elif owner is not None and queue.fenced[token] != owner:
            issued = queue.fenced[token]
            self._expected.fail("V1", f"{key}: etcd gives {token} to {owner}, issued to {issued}")

    def _gate_written(self, gate: StoredGate) -> None:
        expected, group = self._expected, self._expected.group
        paused = gate.pause.reason if gate.HasField("pause") else ""
        if paused != group.paused:
            group.paused, group.pause_known_ms = paused, {}
        if gate.draining and not group.draining:
            expected.counts["drains"] += 1
        group.bound, group.draining = gate.bound, gate.draining
        expected.trace.note("etcd", "gate", gate)
        if gate.subscription_generation == group.generation:
            return
        group.generation = gate.subscription_generation
        for key, queue in expected.queues.items():
            if gate.bound and queue.owner is not None:
                expected.fail(
                    "section 14",
                    f"generation {group.generation} of the subscription counts, and {key} is "
                    f"still {queue.owner.client_id}'s",
                )

    def _group_written(self, group: StoredGroup) -> None:
        expected = self._expected.group
        members = frozenset(holder_of(member.incarnation) for member in group.members)
        for left in expected.members - members:
            expected.left_ms[left] = self._expected.now_ms()
        for member in members:
            expected.left_ms.pop(member, None)
        expected.members, expected.record = members, group.generation
        self._note_assigned(group)
        expression = {s.topic: s.expression for s in group.subscriptions}.get(self._topic)
        if expression is None:
            return
        parsed = TagFilter.parse(expression)
        recorded = self._expected.group.filters.setdefault(group.subscription_generation, parsed)
        if recorded != parsed:
            self._expected.fail(
                "section 14",
                f"generation {group.subscription_generation} of the subscription was {recorded}, "
                f"now it is {parsed}",
            )

    def _note_assigned(self, group: StoredGroup) -> None:
        for topic in group.assignments:
            for part in topic.brokers:
                for queue_id, position in enumerate(part.member_numbers):
                    if position:
                        key = GroupQueue(group.name, topic.topic, part.broker, queue_id)
                        member = holder_of(group.members[position - 1].incarnation)
                        self._expected.group.assigned[key][member] = group.generation
