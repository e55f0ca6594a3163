"""A stranger of a run: writes under the producer ids of others, and makes calls for members.

It may write to the topic and consume for the group, and has every batch that the producer has sent,
every incarnation and every token. With identities, services can distinguish its calls from those of
others. Without them, what it acquires for a member belongs to that member.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc.aio

from baton.common.v1 import queue_pb2
from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._connection.directory import CALL_TIMEOUT_S, Directory
from batonmq._core.queues import GroupQueue, Incarnation
from batonmq._core.records import BatchBuilder, Header, Message, encode_record
from batonmq.errors import BatonError
from batonmq_server.testing.processes import SimulatedProcess
from tests.simulation.cluster import BROKER, NAMESERVERS, TOPIC
from tests.simulation.expected_state import ExpectedQueue
from tests.simulation.run_context import Later, RunContext

Call = Callable[[GroupQueue, queue_pb2.Incarnation, ExpectedQueue], Awaitable[bool]]

EPOCHS = (0, 0, 1, 1_000_000)
"""Added to the epoch of the producer: 0 takes its next sequence, others fence it."""


class SimulatedStranger:
    """Sends one batch at a time under an id of the producer."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._process = SimulatedProcess(context.cluster, "stranger", 0)
        environment = self._process.client_environment()
        self._directory = Directory(NAMESERVERS, environment.random, environment.connect)
        self._count = 0

    def write(self) -> Later:
        """Write a message under the id, and mostly the next sequence, of the producer."""
        batches = self._context.cluster.sent
        if not batches:
            return None
        header = batches[self._context.random.choice(sorted(batches))]
        epoch = header.producer_epoch + self._context.random.choice(EPOCHS)
        self._count += 1
        return self._write(header, epoch, f"x{self._count}.0")

    def steal(self) -> Later:
        """Make a call for a member with its incarnation and token; it must be refused."""
        queues = self._context.cluster.checker.expected.queues
        owned = sorted(key for key, queue in queues.items() if queue.owner is not None)
        if not owned:
            return None
        key = self._context.random.choice(owned)
        calls = (self._commit, self._close, self._pull, self._release, self._leave)
        return self._refused(self._context.random.choice(calls), key)

    def intrude(self) -> Later:
        """Acquire for a member, with the newest generation, a queue of another member."""
        group = self._context.cluster.checker.expected.group
        pairs = [
            (key, member)
            for key, assigned in sorted(group.assigned.items())
            for member in sorted(group.members)
            if assigned.get(member, 0) < group.record
        ]
        return self._acquire(*self._context.random.choice(pairs)) if pairs else None

    async def _acquire(self, key: GroupQueue, member: Incarnation) -> None:
        self._context.note(f"a stranger acquires {key} for {member.client_id}", "intrusions")
        request = lockmgr_pb.AcquireRequest(
            incarnation=queue_pb2.Incarnation(
                client_id=member.client_id, incarnation_id=member.incarnation_id
            ),
            acquire_seq=1,
            generation=self._context.cluster.checker.expected.group.record,
            items=[lockmgr_pb.AcquireItem(queue=queue_to_pb(key))],
        )
        try:
            stub = await self._directory.lockmgr()
            async for response in stub.Acquire(request, timeout=CALL_TIMEOUT_S):
                if response.HasField("grant"):
                    self._context.counts["intruded"] += 1
        except (BatonError, grpc.aio.AioRpcError) as error:
            self._context.cluster.trace.note("stranger", "acquires nothing", error)

    async def _refused(self, call: Call, key: GroupQueue) -> None:
        queue = self._context.cluster.checker.expected.queues[key]
        assert queue.owner is not None
        owner = queue_pb2.Incarnation(
            client_id=queue.owner.client_id, incarnation_id=queue.owner.incarnation_id
        )
        self._context.note(f"a stranger calls {call.__name__} for {owner.client_id}", "stolen")
        try:
            done = await call(key, owner, queue)
        except (BatonError, grpc.aio.AioRpcError):
            return
        if done:
            expected = self._context.cluster.checker.expected
            expected.fail("identity", f"a stranger did {call.__name__} for {owner.client_id}")

    async def _commit(self, key: GroupQueue, _: queue_pb2.Incarnation, q: ExpectedQueue) -> bool:
        item = offsets_pb.CommitItem(
            queue=queue_to_pb(key),
            token=q.etcd_token,
            reset_epoch=_reset_epoch(q),
            committed_offset=q.committed_offset + 1,
        )
        stub = await self._directory.offsets(key.group)
        answer = await stub.Commit(offsets_pb.CommitRequest(items=[item]), timeout=CALL_TIMEOUT_S)
        return not answer.outcomes[0].HasField("error")

    async def _close(self, key: GroupQueue, _: queue_pb2.Incarnation, q: ExpectedQueue) -> bool:
        item = offsets_pb.CloseItem(
            queue=queue_to_pb(key), token=q.etcd_token, reset_epoch=_reset_epoch(q)
        )
        stub = await self._directory.offsets(key.group)
        answer = await stub.Close(offsets_pb.CloseRequest(items=[item]), timeout=CALL_TIMEOUT_S)
        return not answer.outcomes[0].HasField("error")

    async def _pull(self, key: GroupQueue, _: queue_pb2.Incarnation, q: ExpectedQueue) -> bool:
        request = pb.PullRequest(
            queue=queue_to_pb(key),
            offset=q.committed_offset,
            token=q.etcd_token,
            subscription_generation=q.generation_of.get(q.etcd_token, 0),
        )
        stub = await self._directory.storage(BROKER)
        return bool((await stub.Pull(request, timeout=CALL_TIMEOUT_S)).batches)

    async def _release(
        self, key: GroupQueue, owner: queue_pb2.Incarnation, q: ExpectedQueue
    ) -> bool:
        hold = lockmgr_pb.Hold(queue=queue_to_pb(key), token=q.etcd_token)
        request = lockmgr_pb.ReleaseRequest(incarnation=owner, holds=[hold])
        stub = await self._directory.lockmgr()
        return (await stub.Release(request, timeout=CALL_TIMEOUT_S)).released_count > 0

    async def _leave(self, key: GroupQueue, owner: queue_pb2.Incarnation, _: ExpectedQueue) -> bool:
        request = nameserver_pb.LeaveRequest(group=key.group, incarnation=owner)
        stub = self._directory.nameserver()
        return (await stub.Leave(request, timeout=CALL_TIMEOUT_S)).left

    async def _write(self, header: Header, epoch: int, body: str) -> None:
        message = Message(body.encode(), "a")
        builder = BatchBuilder()
        builder.add(message, encode_record(message))
        batch = builder.encode(
            topic=TOPIC,
            queue_id=header.queue_id,
            producer=(header.producer_id, epoch),
            sequence=header.sequence + header.count if epoch == header.producer_epoch else 0,
        )
        self._context.note(f"a stranger writes {body} as producer {header.producer_id}", "forged")
        request = pb.AppendRequest(batches=[batch])
        try:
            stub = await self._directory.storage(BROKER)
            await stub.Append(request, timeout=CALL_TIMEOUT_S)
        except (BatonError, grpc.aio.AioRpcError) as error:
            self._context.cluster.trace.note("stranger", f"{body} may not be stored", error)


def queue_to_pb(key: GroupQueue) -> queue_pb2.GroupQueue:
    """Return the message of a queue."""
    queue = queue_pb2.QueueRef(topic=key.topic, broker=key.broker, queue_id=key.queue_id)
    return queue_pb2.GroupQueue(group=key.group, queue=queue)


def _reset_epoch(queue: ExpectedQueue) -> int:
    return queue.durable.reset_epoch if queue.durable else 0
