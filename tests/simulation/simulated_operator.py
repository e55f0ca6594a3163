"""The operator of a run: resets, forced releases, pauses, moves of the group, and diagnoses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import grpc.aio

from baton.common.v1 import queue_pb2
from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from batonmq._common.rpc import from_rpc_error
from batonmq._connection.directory import CALL_TIMEOUT_S, Directory
from batonmq._core.queues import GroupQueue
from batonmq.errors import BatonError, Retry
from batonmq_server.testing.processes import SimulatedProcess
from tests.simulation.cluster import FAR, GROUP, NAMESERVERS, OFFSETS
from tests.simulation.run_context import Later, RunContext

T = TypeVar("T")
ASK_TIMEOUT_S = 20
"""Timeout of a diagnosis: nameservers sample twice and wait for unavailable services."""


class SimulatedOperator:
    """Repeats each operation until it gets a response; the checker verifies the result."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._process = SimulatedProcess(context.cluster, "operator", 0)
        environment = self._process.client_environment()
        self._directory = Directory(NAMESERVERS, environment.random, environment.connect)
        self._number = 0
        self._begun: dict[asyncio.Task[None], None] = {}

    @property
    def busy(self) -> bool:
        """Whether an operation is in progress."""
        return bool(self._begun)

    async def prepare(self) -> None:
        """Set the policy of the group before the first member joins."""
        policy = pb.SubscriptionPolicy.Value(f"SUBSCRIPTION_POLICY_{self._context.options.policy}")
        await self._update(pb.UpdateGroupRequest(group=GROUP, policy=policy))

    def reset(self) -> None:
        """Reset some owned queues back or forth; sometimes undo the reset."""
        queues = self._context.cluster.checker.expected.queues
        keys = sorted(key for key, queue in queues.items() if queue.durable is not None)
        if not keys:
            return
        random = self._context.random
        chosen = random.sample(keys, random.randint(1, len(keys)))
        items = []
        for key in chosen:
            queue = queues[key]
            started_end = max((offset + 1 for offset in queue.starts), default=0)
            to_offset = random.randint(0, max(started_end, queue.committed_offset))
            items.append(offsets_pb.ResetItem(queue=_queue(key), to_offset=to_offset))
        op_id = self._op_id("reset")
        self._context.note(
            f"{op_id}: {[(str(i.queue.queue.queue_id), i.to_offset) for i in items]}"
        )
        self._begin(self._reset(op_id, items, undone=random.random() < 0.3))

    def force(self) -> None:
        """Force the release of a queue."""
        queues = self._context.cluster.checker.expected.queues
        owned = sorted(key for key, queue in queues.items() if queue.owner is not None)
        if owned:
            key = self._context.random.choice(owned)
            op_id = self._op_id("force")
            self._context.note(f"{op_id}: {key}", "forces")
            self._begin(self._force(key, op_id))

    def pause(self) -> Later:
        """Pause the group for a while."""
        reason = self._op_id("pause")
        self._context.note(f"the group is to stop: {reason}", "group pauses")
        return self._pause(reason, self._context.time_s())

    def move(self) -> None:
        """Move the group to the other set of offsets."""
        to_set = self._context.random.choice([OFFSETS, FAR])
        self._context.note(f"the group is to move to {to_set}")
        self._begin(self._move(to_set))

    def drain(self, service: str, node_id: str, restart: Callable[[str], Later]) -> None:
        """Drain a node, perhaps restart it, and undrain it later.

        Args:
            restart: Starts the restart of a node.
        """
        self._context.note(f"{node_id} is to be drained")
        self._begin(self._maintain(service, node_id, restart))

    def ask(self) -> None:
        """Request the diagnosis of all queues from a nameserver, and check it."""
        self._context.counts["questions"] += 1
        self._begin(self._ask())

    async def settle(self) -> None:
        """Resume the group and undrain all nodes until cancelled.

        A late copy of an old call may pause it, or drain one, again.
        """
        while True:
            for service, node_id in self._drained():
                await self._undrain(service, node_id)
            if self._context.cluster.checker.expected.group.paused:
                await self._update(_paused(False, "faults have ceased"))
            await asyncio.sleep(5)

    async def _reset(self, op_id: str, items: list[offsets_pb.ResetItem], *, undone: bool) -> None:
        request = offsets_pb.ResetRequest(op_id=op_id, by="operator", reason="a test", items=items)
        await self._carry_out_reset(request)
        if undone:
            await asyncio.sleep(8 * self._context.random.random())
            op_id, undo_op_id = self._op_id("undo"), op_id
            self._context.note(f"{op_id} of {undo_op_id}", "undos")
            await self._carry_out_reset(
                offsets_pb.ResetRequest(
                    op_id=op_id,
                    by="operator",
                    reason="a test",
                    undo_group=GROUP,
                    undo_op_id=undo_op_id,
                )
            )

    async def _carry_out_reset(self, request: offsets_pb.ResetRequest) -> None:
        async def call() -> offsets_pb.ResetResponse:
            stub = await self._directory.offsets(GROUP)
            return await stub.Reset(request, timeout=CALL_TIMEOUT_S)

        await self._until_answered(call)

    async def _force(self, key: GroupQueue, op_id: str) -> None:
        request = lockmgr_pb.ForceReleaseRequest(
            queue=_queue(key), op_id=op_id, by="operator", reason="a test"
        )

        async def call() -> lockmgr_pb.ForceReleaseResponse:
            stub = await self._directory.lockmgr()
            return await stub.ForceRelease(request, timeout=CALL_TIMEOUT_S)

        await self._until_answered(call)

    async def _move(self, to_set: str) -> None:
        async def call() -> pb.MoveGroupResponse:
            request = pb.MoveGroupRequest(group=GROUP, to_set=to_set)
            return await self._directory.nameserver().MoveGroup(request, timeout=CALL_TIMEOUT_S)

        answer = await self._until_answered(call)
        if isinstance(answer, pb.MoveGroupResponse) and answer.before != answer.placement:
            self._context.note(f"move {answer.placement.move} to {to_set}", "moves")

    async def _maintain(self, service: str, node_id: str, restart: Callable[[str], Later]) -> None:
        kind = pb.ServiceKind.Value(f"SERVICE_KIND_{service.upper()}")
        request = pb.DrainNodeRequest(service=kind, node_id=node_id, execute=True, by="operator")

        async def call() -> pb.DrainNodeResponse:
            return await self._directory.nameserver().DrainNode(request, timeout=CALL_TIMEOUT_S)

        answer = await self._until_answered(call)
        if answer is None:
            self._context.counts["refused drains"] += 1
            return
        self._context.note(f"{node_id} is drained", "drained nodes")
        self._context.counts["drained leaders"] += answer.leader
        await asyncio.sleep(self._context.random.uniform(0, 4))
        if self._context.random.random() < 0.5 and (later := restart(node_id)) is not None:
            await later
        await asyncio.sleep(self._context.random.uniform(0, 8))
        await self._undrain(service, node_id)

    async def _undrain(self, service: str, node_id: str) -> None:
        kind = pb.ServiceKind.Value(f"SERVICE_KIND_{service.upper()}")
        request = pb.UndrainNodeRequest(service=kind, node_id=node_id, execute=True)

        async def call() -> pb.UndrainNodeResponse:
            return await self._directory.nameserver().UndrainNode(request, timeout=CALL_TIMEOUT_S)

        await self._until_answered(call)
        self._context.note(f"{node_id} is undrained")

    def _drained(self) -> list[tuple[str, str]]:
        """Return service and node id of each node that etcd excludes from elections."""
        entries, _ = self._context.cluster.etcd.get_prefix("elections/")
        parts = [stored.key.split("/") for stored in entries]
        return [(each[1], each[-1]) for each in parts if each[-2] == "drained"]

    async def _pause(self, reason: str, time_s: float) -> None:
        self._begin(self._update(_paused(True, reason)))
        await asyncio.sleep(time_s)
        self._begin(self._update(_paused(False, reason)))

    async def _update(self, request: pb.UpdateGroupRequest) -> None:
        async def call() -> pb.UpdateGroupResponse:
            return await self._directory.nameserver().UpdateGroup(request, timeout=CALL_TIMEOUT_S)

        await self._until_answered(call)

    async def _ask(self) -> None:
        checker = self._context.cluster.checker
        before, asked_ms = checker.backlogs(), self._context.cluster.now_ms()
        self._directory.next_nameserver()
        request = pb.WhyStuckRequest(group=GROUP)
        try:
            answer = await self._directory.nameserver().WhyStuck(request, timeout=ASK_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return
        clocks_agree = not self._context.options.jumps
        checker.explained(before, asked_ms, answer.queues, clocks_agree=clocks_agree)

    async def _until_answered(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """Return the response; None if the call can never succeed."""
        failures = 0
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as failure:
                self._directory.next_nameserver()
                error = from_rpc_error(failure)
            except BatonError as refusal:
                error = refusal
            if error.retry is Retry.NEVER:
                self._context.cluster.trace.note("operator", "is refused", error)
                return None
            await self._directory.pause(error, failures)
            failures += 1

    def _op_id(self, kind: str) -> str:
        self._number += 1
        return f"{kind} {self._number}".replace(" ", "-")

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._process.host.spawn(work)
        self._begun[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._begun[task]
        if not task.cancelled() and task.exception() is not None:
            self._context.cluster.checker.expected.fail(
                "unexpected", f"operator: {task.exception()!r}"
            )


def _paused(paused: bool, reason: str) -> pb.UpdateGroupRequest:
    return pb.UpdateGroupRequest(group=GROUP, paused=paused, by="operator", reason=reason)


def _queue(key: GroupQueue) -> queue_pb2.GroupQueue:
    inner = queue_pb2.QueueRef(topic=key.topic, broker=key.broker, queue_id=key.queue_id)
    return queue_pb2.GroupQueue(group=key.group, queue=inner)
