"""Group gates: what a group allows now, as storage, offsets and lockmgr need it.

The nameserver writes the gate of each group to etcd (`gates/<group>`); the services follow it.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1.stored_gate_pb2 import StoredGate
from batonmq.errors import GroupNotFound, ModeChanged, NotServing, Paused
from batonmq_server.runtime.etcd.mirror import EtcdMirror

GATES_PREFIX = "gates/"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupGate:
    """What a group allows.

    Attributes:
        revision: Revision in etcd; compared when a lock is granted.
        subscription_generation: Generation of the current subscription.
        owned: Whether one member at a time owns a queue; if not, queues have no owners.
        broadcasting: Whether every member gets every message.
        bound: Whether deliveries must be of `subscription_generation`.
        draining: Whether the subscription is being changed: no member gets a queue.
        paused: Identity that has paused the group, and its reason; empty if it is not paused.
    """

    revision: int
    subscription_generation: int
    owned: bool
    broadcasting: bool
    bound: bool
    draining: bool
    paused: tuple[str, str] | tuple[()]


class GroupGates:
    """The gates by group. A group without a gate is unknown, and may do nothing.

    Args:
        mirror: Mirror of `GATES_PREFIX`, which is run elsewhere.
    """

    def __init__(self, mirror: EtcdMirror) -> None:
        self._mirror = mirror
        self._known: dict[str, GroupGate] = {}

    def get(self, group: str) -> GroupGate | None:
        """Return the last known gate of a group; None if the group is unknown."""
        stored = self._mirror.values.get(group)
        if stored is None:
            self._known.pop(group, None)
            return None
        known = self._known.get(group)
        if known is None or known.revision != stored.mod_revision:
            known = self._known[group] = _gate(stored.value, stored.mod_revision)
        return known

    def check_owned(self, group: str) -> None:
        """Return if a call with a fencing token is valid for this group.

        An unknown group passes: the lock manager that granted the token knew it.

        Raises:
            ModeChanged: the queues of the group have no owners.
        """
        gate = self.get(group)
        if gate is not None and not gate.owned:
            raise _mode_changed(group, gate)

    def check_unowned(self, group: str) -> GroupGate:
        """Return the gate of a group without ownership, for a call without a token.

        Raises:
            GroupNotFound: the group is unknown.
            ModeChanged: its queues have owners.
            NotServing: the groups have not been read from etcd yet.
        """
        gate = self.get(group)
        self._check_read()
        if gate is None:
            raise GroupNotFound(f"group {group} is not known", facts={"group": group})
        if gate.owned:
            raise _mode_changed(group, gate)
        return gate

    def check_running(self, group: str) -> None:
        """Return if the group may get deliveries.

        Raises:
            Paused: the group is paused.
            NotServing: the groups have not been read from etcd yet.
        """
        gate = self.get(group)
        self._check_read()
        if gate is not None and gate.paused:
            by, reason = gate.paused
            raise Paused(
                f"group {group} was paused by {by}: {reason}",
                retry_after_ms=1_000,
                facts={"group": group, "by": by, "reason": reason},
            )

    def _check_read(self) -> None:
        if not self._mirror.revision:
            raise NotServing("the groups have not been read from etcd yet", retry_after_ms=500)


def _gate(value: bytes, revision: int) -> GroupGate:
    gate = StoredGate.FromString(value)
    broadcasting = gate.model == pb.MESSAGE_MODEL_BROADCASTING
    return GroupGate(
        revision=revision,
        subscription_generation=gate.subscription_generation,
        owned=not broadcasting and gate.ownership != pb.OWNERSHIP_OFF,
        broadcasting=broadcasting,
        bound=gate.bound,
        draining=gate.draining,
        paused=(gate.pause.by, gate.pause.reason) if gate.HasField("pause") else (),
    )


def _mode_changed(group: str, gate: GroupGate) -> ModeChanged:
    model = "broadcasting" if gate.broadcasting else "clustering"
    ownership = "on" if gate.owned else "off"
    return ModeChanged(
        f"group {group} is {model} with ownership {ownership}",
        facts={"group": group, "model": model, "ownership": ownership},
    )
