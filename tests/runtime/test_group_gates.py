"""Goal: a service that has not read the groups from etcd yet allows nothing that it can't check."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1.stored_gate_pb2 import StoredGate
from batonmq._common.clock import Clock
from batonmq.errors import GroupNotFound, ModeChanged, NotServing, Paused
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import EtcdSession, KeyValue
from batonmq_server.runtime.group_gates import GATES_PREFIX, GroupGates

GROUP = "readers"
Check = Callable[[GroupGates], object]
CHECKS: dict[str, Check] = {
    "running": lambda gates: gates.check_running(GROUP),
    "unowned": lambda gates: gates.check_unowned(GROUP),
}


def _mirror(*, revision: int, gate: StoredGate | None = None) -> EtcdMirror:
    mirror = EtcdMirror(EtcdSession("127.0.0.1:1", "unused", Clock()), GATES_PREFIX)
    mirror.revision = revision
    if gate is not None:
        mirror.values[GROUP] = KeyValue(GROUP, gate.SerializeToString(), 1, revision, 0)
    return mirror


@pytest.mark.parametrize("name", CHECKS)
def test_nothing_is_allowed_before_the_groups_are_read(name: str) -> None:
    with pytest.raises(NotServing):
        CHECKS[name](GroupGates(_mirror(revision=0)))


def test_unknown_group() -> None:
    gates = GroupGates(_mirror(revision=7))
    gates.check_owned(GROUP)
    gates.check_running(GROUP)
    with pytest.raises(GroupNotFound):
        gates.check_unowned(GROUP)


def test_paused_group_without_ownership() -> None:
    stored = StoredGate(ownership=pb.OWNERSHIP_OFF)
    stored.pause.by, stored.pause.reason = "operator", "a test"
    gates = GroupGates(_mirror(revision=7, gate=stored))
    assert not gates.check_unowned(GROUP).owned
    with pytest.raises(ModeChanged):
        gates.check_owned(GROUP)
    with pytest.raises(Paused, match="operator"):
        gates.check_running(GROUP)
