"""What each node of the cluster tells of itself: settings, version, clock, descriptors, TLS."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baton.settings.v1 import settings_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq.admin.admin import Admin
from batonmq.admin.effective_settings import NodeSetting, describe_process, settings_from_pb
from batonmq.admin.reports import Node
from batonmq.errors import BatonError

NODE_TIMEOUT_S = 3.0
"""Timeout of the call to one node; short, because a node that hangs is part of the report."""
_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class ProcessState:
    """State of a process.

    Attributes:
        version: Version of the package of the services; empty if it is not known.
        clock_skew_ms: Distance of its wall clock from that of this machine, at least; 0 if the
            clocks agree as far as the time of the call can tell.
        open_descriptors: Open file descriptors; 0 if the system does not tell.
        access_on: Whether the process checks permissions.
        certificates: Expiry times by certificate, in Unix milliseconds; None for one that can't be
            read.
    """

    version: str
    clock_skew_ms: int
    open_descriptors: int
    descriptors_max: int
    access_on: bool
    certificates: Mapping[str, int | None]


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node, and what it tells of itself.

    Attributes:
        state: None if the node did not answer, or is of an earlier version without this report.
        problem: Why the node did not answer; empty if it did.
    """

    node: Node
    settings: tuple[NodeSetting, ...]
    state: ProcessState | None
    problem: str

    @property
    def name(self) -> str:
        """Service and node id."""
        return f"{self.node.service}/{self.node.node_id}"


async def node_reports(admin: Admin, nodes: Iterable[Node]) -> tuple[NodeReport, ...]:
    """Return a report of each node, in their order. Needs the role admin on the cluster."""
    here, turns = Clock(), asyncio.Semaphore(_AT_ONCE)

    async def report(node: Node) -> NodeReport:
        async with turns:
            begin_unix_ms = here.unix_ms()
            try:
                answer = await describe_process(admin, node, timeout_s=NODE_TIMEOUT_S)
            except BatonError as error:
                return NodeReport(node, (), None, f"{error.reason}: {error.message}")
            state = (
                _state_from_pb(answer.process, (begin_unix_ms, here.unix_ms()))
                if answer.HasField("process")
                else None
            )
            return NodeReport(node, settings_from_pb(answer), state, "")

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(report(node)) for node in nodes]
    return tuple(task.result() for task in running)


def clock_skew_ms(there_unix_ms: int, call: tuple[int, int]) -> int:
    """Return the least distance of two clocks; positive if the other one is ahead.

    Args:
        there_unix_ms: Reading of the other clock during a call.
        call: Begin and end of the call, by the clock here.
    """
    begin_unix_ms, end_unix_ms = call
    return there_unix_ms - min(max(there_unix_ms, begin_unix_ms), end_unix_ms)


def _state_from_pb(state: pb.ProcessState, call: tuple[int, int]) -> ProcessState:
    return ProcessState(
        version=state.version,
        clock_skew_ms=clock_skew_ms(state.unix_ms, call),
        open_descriptors=state.open_descriptors,
        descriptors_max=state.descriptors_max,
        access_on=state.access_on,
        certificates={
            one.certificate: one.expire_unix_ms if one.HasField("expire_unix_ms") else None
            for one in state.certificates
        },
    )
