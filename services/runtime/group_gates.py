"""What storage, offsets and lockmgr know of a group: a live copy of the gates in etcd."""

from __future__ import annotations

from dataclasses import dataclass

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1.stored_gate_pb2 import StoredGate
from batonmq.errors import GroupNotFound, ModeChanged, Paused
from batonmq_server.runtime.etcd.mirror import EtcdMirror

GATES_PREFIX = "gates/"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupGate:
    """What a group allows.

    Attributes:
        revision: In etcd; to be compared when a grant is persisted.
        subscription_generation: Of what the group subscribes to now.
        owned: Whether one member at a time owns a queue; else nobody does.
        broadcasting: Whether every member gets every message.
        bound: Whether deliveries have to be of `subscription_generation`.
        draining: Whether the subscription is being changed: nobody gets a queue.
        paused: Who has paused the group, and why; empty if nobody has.
    """

    revision: int
    subscription_generation: int
    owned: bool
    broadcasting: bool
    bound: bool
    draining: bool
    paused: tuple[str, str] | tuple[()]


class GroupGates:
    """The gates by group. A group that is not in etcd has none, and nothing is allowed to it.

    Args:
        mirror: Of `GATES_PREFIX`, run by somebody else.
    """

    def __init__(self, mirror: EtcdMirror) -> None:
        self._mirror = mirror
        self._known: dict[str, GroupGate] = {}

    def get(self, group: str) -> GroupGate | None:
        """The gate as it is here; None if the group is not known."""
        stored = self._mirror.values.get(group)
        if stored is None:
            self._known.pop(group, None)
            return None
        known = self._known.get(group)
        if known is None or known.revision != stored.mod_revision:
            known = self._known[group] = _gate(stored.value, stored.mod_revision)
        return known

    def check_owned(self, group: str) -> None:
        """Refuse a call under a token for a group whose queues nobody owns.

        A group that is not known here passes: the token was given by somebody who knew it.

        Raises:
            ModeChanged: it is one.
        """
        gate = self.get(group)
        if gate is not None and not gate.owned:
            raise _mode_changed(group, gate)

    def check_unowned(self, group: str) -> GroupGate:
        """Refuse a call without token unless nobody owns the group's queues.

        Raises:
            GroupNotFound: the group is not known.
            ModeChanged: its queues are owned.
        """
        gate = self.get(group)
        if gate is None:
            raise GroupNotFound(f"group {group} is not known", facts={"group": group})
        if gate.owned:
            raise _mode_changed(group, gate)
        return gate

    def check_running(self, group: str) -> None:
        """Refuse deliveries to a group that is paused.

        Raises:
            Paused: it is.
        """
        gate = self.get(group)
        if gate is not None and gate.paused:
            by, reason = gate.paused
            raise Paused(
                f"group {group} was paused by {by}: {reason}",
                retry_after_ms=1_000,
                facts={"group": group, "by": by, "reason": reason},
            )


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
