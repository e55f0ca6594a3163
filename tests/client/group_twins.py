"""Simulated services for one consumer group, in this process, behind real gRPC servers.

They keep their state in dictionaries, record all calls, and do what the test says. They obey the
contracts that a consumer can observe: they check tokens, reset epochs, subscription generations and
the group's mode, and keep acks as sets. They do not check time or fence conditions.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import Message as ProtoMessage

from baton.common.v1 import queue_pb2
from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.lockmgr.v1 import lockmgr_service_pb2_grpc as lockmgr_grpc
from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.nameserver.v1 import nameserver_service_pb2_grpc as nameserver_grpc
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from baton.storage.v1 import storage_service_pb2 as storage_pb
from baton.storage.v1 import storage_service_pb2_grpc as storage_grpc
from batonmq._common.rpc import error_to_pb
from batonmq._core.ranges import of_sorted
from batonmq._core.records import BatchBuilder, Message, encode_record, stamped_head
from batonmq._core.subscription import TagFilter
from batonmq.errors import (
    BatonError,
    FenceCause,
    Fenced,
    FencedDetail,
    ModeChanged,
    NotServing,
    Paused,
    UnknownQueue,
)
from tests.support.grpc_server import serving_at

GROUP, TOPIC, BROKER = "g", "t", "broker-a"
Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T", bound=ProtoMessage)
Key = int
"""A queue id: there is one group, one topic and one broker."""


@dataclass
class Progress:
    """One queue at offsets; `handled` holds C and A."""

    token: int = 0
    reset_epoch: int = 0
    closed: bool = True
    handled: set[int] = field(default_factory=set)
    bound: int = 0
    why: FenceCause = FenceCause.TAKEN

    @property
    def committed(self) -> int:
        offset = 0
        while offset in self.handled:
            offset += 1
        return offset

    @property
    def acked(self) -> list[queue_pb2.OffsetRange]:
        above = sorted(offset for offset in self.handled if offset > self.committed)
        return [queue_pb2.OffsetRange(first_offset=a, next_offset=b) for a, b in of_sorted(above)]


class GroupTwin(nameserver_grpc.NameserverServiceServicer):
    """The nameserver of one group; the test assigns the queues.

    Attributes:
        group: The record.
        owners: Client id of the assigned member by queue id.
        heartbeats: All requests.
        sessions: Incarnation of each WatchGroup.
        verdict: The answer to a heartbeat, without the group.
        leaves: Requests to leave, which are answered once `may_leave` is set.
    """

    def __init__(self, queue_count: int) -> None:
        self.queue_count = queue_count
        self.group = nameserver_pb.Group(name=GROUP, generation=100, subscription_generation=1)
        self.owners: dict[int, str] = {}
        self.heartbeats: list[nameserver_pb.HeartbeatRequest] = []
        self.sessions: list[queue_pb2.Incarnation] = []
        self.verdict = nameserver_pb.HeartbeatResponse(
            verdict=nameserver_pb.SUBSCRIPTION_VERDICT_ACCEPTED
        )
        self.address = ""
        self.leaves: list[nameserver_pb.LeaveRequest] = []
        self.may_leave = asyncio.Event()
        self.may_leave.set()
        self._changed = asyncio.Event()
        self._broken = asyncio.Event()

    def change(self, edit: Callable[[nameserver_pb.Group], object] = lambda _: None) -> None:
        """Edit the record, assign by `owners`, raise the generation and push it."""
        edit(self.group)
        self.group.generation += 1
        member_numbers = {m.incarnation.client_id: n for n, m in enumerate(self.group.members, 1)}
        numbers = [member_numbers.get(self.owners.get(q, ""), 0) for q in range(self.queue_count)]
        assignment = nameserver_pb.BrokerAssignment(broker=BROKER, member_numbers=numbers)
        del self.group.assignments[:]
        self.group.assignments.add(topic=TOPIC, brokers=[assignment])
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def change_without_push(self) -> None:
        """Change the record without a push; the next heartbeat returns it."""
        changed, self._changed = self._changed, asyncio.Event()
        self.change()
        self._changed = changed

    def assign(self, client_id: str, queues: Iterable[int]) -> None:
        """Assign these queues to a client."""
        self.owners |= dict.fromkeys(queues, client_id)
        self.change()

    def subscribe(self, expression: str) -> None:
        """Give the group another subscription."""

        def edit(group: nameserver_pb.Group) -> None:
            del group.subscriptions[:]
            group.subscriptions.add(topic=TOPIC, expression=expression)
            group.subscription_generation += 1

        self.change(edit)

    def pause(self, by: str) -> None:
        """Pause the group; resume it if `by` is empty."""

        def edit(group: nameserver_pb.Group) -> None:
            group.ClearField("pause")
            if by:
                group.pause.by = by

        self.change(edit)

    def break_sessions(self) -> None:
        """End every WatchGroup stream."""
        broken, self._broken = self._broken, asyncio.Event()
        broken.set()

    async def Heartbeat(
        self, request: nameserver_pb.HeartbeatRequest, context: Context
    ) -> nameserver_pb.HeartbeatResponse:
        self.heartbeats.append(request)
        if not self.group.subscriptions:
            self.group.subscriptions.extend(request.subscriptions)
        if all(member.incarnation != request.incarnation for member in self.group.members):
            self.group.members.add(incarnation=request.incarnation)
            self.change()
        answer = nameserver_pb.HeartbeatResponse(group=self.group, interval_ms=60_000)
        answer.MergeFrom(self.verdict)
        return answer

    async def Leave(
        self, request: nameserver_pb.LeaveRequest, context: Context
    ) -> nameserver_pb.LeaveResponse:
        self.leaves.append(request)
        await self.may_leave.wait()
        return nameserver_pb.LeaveResponse(left=True)

    async def WatchGroup(
        self, request: nameserver_pb.WatchGroupRequest, context: Context
    ) -> AsyncIterator[nameserver_pb.WatchGroupResponse]:
        self.sessions.append(request.incarnation)
        broken = self._broken
        while not broken.is_set():
            changed = self._changed
            yield nameserver_pb.WatchGroupResponse(group=self.group)
            await _first_of(changed, broken)
        raise NotServing("the session is broken by the test")

    async def WatchRoute(
        self, request: nameserver_pb.WatchRouteRequest, context: Context
    ) -> AsyncIterator[nameserver_pb.WatchRouteResponse]:
        yield nameserver_pb.WatchRouteResponse(
            route=nameserver_pb.Route(topic=nameserver_pb.Topic(name=TOPIC), generation=1)
        )
        await asyncio.Event().wait()

    async def DescribeCluster(
        self, request: nameserver_pb.DescribeClusterRequest, context: Context
    ) -> nameserver_pb.DescribeClusterResponse:
        kinds = {
            nameserver_pb.SERVICE_KIND_STORAGE: BROKER,
            nameserver_pb.SERVICE_KIND_OFFSETS: "offsets",
            nameserver_pb.SERVICE_KIND_LOCKMGR: "lockmgr",
        }
        nodes = [
            nameserver_pb.Node(service=kind, node_id=name, address=self.address, leader=True)
            for kind, name in kinds.items()
        ]
        return nameserver_pb.DescribeClusterResponse(nodes=nodes)


class OffsetsTwin(offsets_grpc.OffsetsServiceServicer):
    """Offsets with the progress by queue.

    Attributes:
        owned: Whether the group has ownership; calls of the other mode are refused.
        commits: Every item that was committed.
        closes: Every item that was closed.
    """

    def __init__(self) -> None:
        self.queues: dict[Key, Progress] = {}
        self.owned = True
        self.commits: list[offsets_pb.CommitItem] = []
        self.closes: list[offsets_pb.CloseItem] = []

    def reset(self, queue_id: Key, to: int) -> None:
        """Reset a queue as an operator does."""
        progress = self.queues[queue_id]
        progress.token += 1 if self.owned else 0
        progress.reset_epoch += 1
        progress.closed, progress.handled, progress.why = True, set(range(to)), FenceCause.RESET

    def check(self, queue_id: Key, token: int, reset_epoch: int | None = None) -> Progress:
        """Return the progress if the token is valid.

        Raises:
            ModeChanged, UnknownQueue, Fenced: the token is not valid.
        """
        if self.owned != bool(token):
            raise ModeChanged("the group is in the other mode")
        progress = self.queues.get(queue_id)
        if progress is None:
            raise UnknownQueue(f"no progress on {queue_id}")
        if reset_epoch not in (None, progress.reset_epoch):
            detail = FencedDetail(reset_epoch=progress.reset_epoch, why=FenceCause.RESET)
            raise Fenced("another reset epoch", detail=detail)
        if self.owned and (token != progress.token or progress.closed):
            detail = FencedDetail(reset_epoch=progress.reset_epoch, why=progress.why)
            raise Fenced(f"token {token} of {progress.token}", detail=detail)
        return progress

    def ack(
        self, progress: Progress, committed: int, ranges: Iterable[queue_pb2.OffsetRange]
    ) -> None:
        progress.handled |= set(range(committed))
        for run in ranges:
            progress.handled |= set(range(run.first_offset, run.next_offset))

    async def Commit(
        self, request: offsets_pb.CommitRequest, context: Context
    ) -> offsets_pb.CommitResponse:
        outcomes = []
        for item in request.items:
            self.commits.append(item)
            queue_id = item.queue.queue.queue_id
            if not (item.token or self.owned):
                self.queues.setdefault(queue_id, Progress())
            try:
                progress = self.check(queue_id, item.token, item.reset_epoch)
            except BatonError as error:
                outcomes.append(offsets_pb.CommitOutcome(error=error_to_pb(error)))
                continue
            self.ack(progress, item.committed_offset, item.acked)
            committed = offsets_pb.Committed(committed_offset=progress.committed)
            outcomes.append(offsets_pb.CommitOutcome(committed=committed))
        return offsets_pb.CommitResponse(offsets_epoch=1, outcomes=outcomes)

    async def Close(
        self, request: offsets_pb.CloseRequest, context: Context
    ) -> offsets_pb.CloseResponse:
        outcomes = []
        for item in request.items:
            self.closes.append(item)
            try:
                progress = self.check(item.queue.queue.queue_id, item.token, item.reset_epoch)
            except BatonError as error:
                outcomes.append(offsets_pb.CloseOutcome(error=error_to_pb(error)))
                continue
            self.ack(progress, item.committed_offset, item.acked)
            progress.closed = True
            outcomes.append(offsets_pb.CloseOutcome(closed=offsets_pb.Committed()))
        return offsets_pb.CloseResponse(offsets_epoch=1, outcomes=outcomes)

    async def Query(
        self, request: offsets_pb.QueryRequest, context: Context
    ) -> offsets_pb.QueryResponse:
        outcomes = []
        for key in request.queues:
            progress = self.queues.get(key.queue.queue_id)
            if progress is None:
                error = error_to_pb(UnknownQueue("no progress"))
                outcomes.append(offsets_pb.QueryOutcome(error=error))
                continue
            progress_pb = offsets_pb.Progress(
                queue=key,
                token=progress.token,
                committed_offset=progress.committed,
                acked=progress.acked,
                reset_epoch=progress.reset_epoch,
            )
            outcomes.append(offsets_pb.QueryOutcome(progress=progress_pb))
        return offsets_pb.QueryResponse(offsets_epoch=1, outcomes=outcomes)


class LockmgrTwin(lockmgr_grpc.LockmgrServiceServicer):
    """A lock manager that grants every request, unless the test has set a refusal.

    Attributes:
        refusals: Refusals of the next Acquires of a queue, one after the other.
        acquires: Queue id and `acquire_seq` of all requests.
        kept: Holds of every keep-alive.
        releases: Queue ids in the order of their release.
        states: Reports of keep-alives by queue; a queue without one is renewed.
        watchers: Number of Watch streams so far.
    """

    def __init__(self, offsets: OffsetsTwin) -> None:
        self._offsets = offsets
        self.refusals: defaultdict[Key, list[BatonError]] = defaultdict(list)
        self.acquires: list[tuple[Key, lockmgr_pb.AcquireItem]] = []
        self.kept: list[list[lockmgr_pb.Hold]] = []
        self.releases: list[Key] = []
        self.states: dict[Key, lockmgr_pb.HoldReport] = {}
        self.bound = 0
        self.watchers = 0
        self._streams: set[asyncio.Queue[lockmgr_pb.WatchResponse | None]] = set()

    def push(self, event: lockmgr_pb.WatchResponse | None) -> None:
        """Push to all streams; None ends them."""
        for stream in self._streams:
            stream.put_nowait(event)

    def push_wanted(self, queue_id: Key, reason: lockmgr_pb.WantedReason.ValueType) -> None:
        """Push to its owner that a queue is wanted."""
        token = self._offsets.queues[queue_id].token
        wanted = lockmgr_pb.Wanted(queue=_key(queue_id), token=token, reason=reason)
        self.push(lockmgr_pb.WatchResponse(wanted=wanted))

    def push_free(self, queue_id: Key) -> None:
        """Push that a queue is free."""
        freed = lockmgr_pb.Freed(queue=_key(queue_id))
        self.push(lockmgr_pb.WatchResponse(freed=freed))

    async def Acquire(
        self, request: lockmgr_pb.AcquireRequest, context: Context
    ) -> AsyncIterator[lockmgr_pb.AcquireResponse]:
        for item in request.items:
            queue_id = item.queue.queue.queue_id
            self.acquires.append((queue_id, item))
            refusal = self.refusals[queue_id].pop(0) if self.refusals[queue_id] else None
            if not self._offsets.owned:
                refusal = ModeChanged("queues of the group are not owned")
            if refusal is not None:
                yield lockmgr_pb.AcquireResponse(queue=item.queue, error=error_to_pb(refusal))
                continue
            fresh = Progress(handled=set(range(item.initial_offset)))
            progress = self._offsets.queues.setdefault(queue_id, fresh)
            progress.token += 1
            progress.closed, progress.bound, progress.why = False, self.bound, FenceCause.TAKEN
            grant = lockmgr_pb.Grant(
                token=progress.token,
                committed_offset=progress.committed,
                acked=progress.acked,
                reset_epoch=progress.reset_epoch,
                lease_ms=30_000,
                offsets_epoch=1,
                subscription_generation=self.bound,
            )
            yield lockmgr_pb.AcquireResponse(queue=item.queue, grant=grant)

    async def KeepAlive(
        self, request: lockmgr_pb.KeepAliveRequest, context: Context
    ) -> lockmgr_pb.KeepAliveResponse:
        self.kept.append(list(request.holds))
        reports = []
        for hold in request.holds:
            report = lockmgr_pb.HoldReport(state=lockmgr_pb.HOLD_STATE_OK)
            report.MergeFrom(self.states.get(hold.queue.queue.queue_id, report))
            report.queue.CopyFrom(hold.queue)
            report.token = hold.token
            reports.append(report)
        return lockmgr_pb.KeepAliveResponse(reports=reports, lease_ms=30_000)

    async def Release(
        self, request: lockmgr_pb.ReleaseRequest, context: Context
    ) -> lockmgr_pb.ReleaseResponse:
        self.releases += [hold.queue.queue.queue_id for hold in request.holds]
        return lockmgr_pb.ReleaseResponse()

    async def Watch(
        self, request: lockmgr_pb.WatchRequest, context: Context
    ) -> AsyncIterator[lockmgr_pb.WatchResponse]:
        self.watchers += 1
        stream: asyncio.Queue[lockmgr_pb.WatchResponse | None] = asyncio.Queue(100)
        self._streams.add(stream)
        try:
            while (event := await stream.get()) is not None:
                yield event
        finally:
            self._streams.discard(stream)


class StorageTwin(storage_grpc.StorageServiceServicer):
    """Storage whose queues are lists of messages.

    Attributes:
        pulls: Every request, and what each delivery reads next, as a pull.
        credits: Every credit of a delivery.
        paused: Whether pulls are refused with PAUSED.
        held_pulls: Ids of the queues whose pulls are held now.
    """

    def __init__(self, offsets: OffsetsTwin) -> None:
        self._offsets = offsets
        self.pulls: list[storage_pb.PullRequest] = []
        self.credits: list[storage_pb.DeliveryCredit] = []
        self.paused = False
        self.held_pulls: list[Key] = []
        self._queues: defaultdict[Key, list[Message]] = defaultdict(list)
        self._arrived = asyncio.Event()

    def send(self, queue_id: Key, *bodies: str) -> None:
        """Store messages; the text before a colon is the tag."""
        for body in bodies:
            tag = body.partition(":")[0] if ":" in body else ""
            self._queues[queue_id].append(Message(body.encode(), tag))
        self.wake()

    def wake(self) -> None:
        """Wake the held pulls, as an append or the check of their tokens does."""
        arrived, self._arrived = self._arrived, asyncio.Event()
        arrived.set()

    def pulls_of(self, queue_id: Key) -> list[storage_pb.PullRequest]:
        return [pull for pull in self.pulls if pull.queue.queue.queue_id == queue_id]

    async def Pull(
        self, request: storage_pb.PullRequest, context: Context
    ) -> storage_pb.PullResponse:
        self.pulls.append(request)
        queue_id = request.queue.queue.queue_id
        while True:
            arrived = self._arrived
            if self.paused:
                raise Paused("the group is paused", retry_after_ms=10)
            progress = self._offsets.check(queue_id, request.token)
            if progress.bound not in (0, request.subscription_generation):
                detail = FencedDetail(why=FenceCause.SUBSCRIPTION)
                raise Fenced("another subscription", detail=detail)
            end = min(len(self._queues[queue_id]), request.offset + request.messages_max)
            if end > request.offset:
                return self._answer(request, progress, end)
            self.held_pulls.append(queue_id)
            try:
                await arrived.wait()
            finally:
                self.held_pulls.remove(queue_id)

    def _answer(
        self, request: storage_pb.PullRequest, progress: Progress, end: int
    ) -> storage_pb.PullResponse:
        queue_id = request.queue.queue.queue_id
        taken = request.HasField("progress")
        if taken:
            acks = request.progress
            self._offsets.check(queue_id, request.token, acks.reset_epoch)
            self._offsets.ack(progress, acks.committed_offset, acks.acked)
        wanted = TagFilter.parse(request.expression)
        records = [
            _batch(queue_id, offset, message)
            for offset, message in enumerate(self._queues[queue_id][:end])
            if offset >= request.offset and wanted.accepts(message.tag)
        ]
        return storage_pb.PullResponse(
            pull_id=request.pull_id,
            batches=records,
            next_offset=end,
            queue_next_offset=len(self._queues[queue_id]),
            offsets_epoch=1 if request.token else 0,
            offsets_set="offsets" if request.token else "",
            progress_taken=taken,
        )

    async def Deliver(
        self, requests: AsyncIterator[storage_pb.DeliverRequest], context: Context
    ) -> AsyncIterator[storage_pb.DeliverResponse]:
        stream = _DeliveryStreamTwin(self, context)
        reading = asyncio.create_task(stream.read(requests))  # noqa: TID251  a generator can't own a group
        try:
            while True:
                yield storage_pb.DeliverResponse(frames=[await stream.frames.get()])
        finally:
            reading.cancel()
            stream.close()

    async def QueryOffsets(
        self, request: storage_pb.QueryOffsetsRequest, context: Context
    ) -> storage_pb.QueryOffsetsResponse:
        return storage_pb.QueryOffsetsResponse(
            outcomes=[
                storage_pb.QueryOffsetsOutcome(
                    offsets=storage_pb.QueueOffsets(next_offset=len(self._queues[queue.queue_id]))
                )
                for queue in request.queues
            ]
        )


class _DeliveryTwin:
    """A delivery: the pull that is under way, and the credit that is left."""

    def __init__(self, start: storage_pb.DeliveryStart) -> None:
        self.pull, self.credit = start.pull, start.credit
        self.sent = 0
        self.funded = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def raise_credit(self, credit: storage_pb.DeliveryCredit) -> None:
        """Use a newer credit, also for the pull that is under way."""
        self.credit = credit
        self.state()
        self.funded.set()

    def state(self) -> None:
        """Write what the caller states into the pull."""
        pull, credit = self.pull, self.credit
        pull.offsets_epoch, pull.offsets_set = credit.offsets_epoch, credit.offsets_set
        pull.ClearField("progress")
        if credit.HasField("progress"):
            pull.progress.CopyFrom(credit.progress)
        if credit.HasField("received_offset"):
            pull.received_offset = credit.received_offset


class _DeliveryStreamTwin:
    """The deliveries of one stream; each pulls in a loop."""

    def __init__(self, storage: StorageTwin, context: Context) -> None:
        self._storage, self._context = storage, context
        self._deliveries: dict[int, _DeliveryTwin] = {}
        self.frames: asyncio.Queue[storage_pb.DeliveryFrame] = asyncio.Queue()

    async def read(self, requests: AsyncIterator[storage_pb.DeliverRequest]) -> None:
        """Carry out commands."""
        async for request in requests:
            for command in request.commands:
                number = command.delivery_id
                if command.HasField("start"):
                    self._storage.credits.append(_copy(command.start.credit))
                    delivery = self._deliveries[number] = _DeliveryTwin(command.start)
                    delivery.task = asyncio.create_task(self._run(number, delivery))  # noqa: TID251
                elif (running := self._deliveries.get(number)) is None:
                    continue
                elif command.HasField("credit"):
                    self._storage.credits.append(_copy(command.credit))
                    running.raise_credit(command.credit)
                else:
                    self._stop(self._deliveries.pop(number))

    def close(self) -> None:
        """End all deliveries."""
        for delivery in self._deliveries.values():
            self._stop(delivery)

    @staticmethod
    def _stop(delivery: _DeliveryTwin) -> None:
        assert delivery.task is not None
        delivery.task.cancel()

    async def _run(self, number: int, delivery: _DeliveryTwin) -> None:
        bytes_sent, messages_max = 0, delivery.pull.messages_max
        try:
            while True:
                left = delivery.credit.messages_limit - delivery.sent
                if left <= 0 or bytes_sent >= delivery.credit.bytes_limit:
                    delivery.funded.clear()
                    await delivery.funded.wait()
                    continue
                delivery.pull.messages_max = min(messages_max, left)
                delivery.state()
                answer = await self._storage.Pull(delivery.pull, self._context)
                delivery.sent += len(answer.batches)
                bytes_sent += sum(map(len, answer.batches))
                frame = storage_pb.DeliveryFrame(
                    delivery_id=number,
                    messages=answer,
                    credit_number=delivery.credit.number,
                    messages_sent=delivery.sent,
                    bytes_sent=bytes_sent,
                )
                self.frames.put_nowait(frame)
                delivery.pull = _copy(delivery.pull)
                delivery.pull.offset = answer.next_offset
                delivery.credit.ClearField("progress")  # it was taken
        except BatonError as error:
            frame = storage_pb.DeliveryFrame(delivery_id=number, error=error_to_pb(error))
            self.frames.put_nowait(frame)
            del self._deliveries[number]


def _copy(message: T) -> T:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


@dataclass(frozen=True, slots=True)
class Twins:
    """The simulated services, and their address."""

    nameserver: GroupTwin
    lockmgr: LockmgrTwin
    offsets: OffsetsTwin
    storage: StorageTwin
    address: str

    def set_owned(self, *, owned: bool) -> None:
        """Switch ownership on or off, and push the record."""
        self.offsets.owned = owned
        mode = nameserver_pb.OWNERSHIP_ON if owned else nameserver_pb.OWNERSHIP_OFF
        self.nameserver.change(lambda group: setattr(group, "ownership", mode))

    def committed(self, queue_id: Key) -> int:
        return self.offsets.queues[queue_id].committed


@asynccontextmanager
async def twins(queue_count: int, *, owned: bool = True) -> AsyncIterator[Twins]:
    """Run the services until the block ends."""
    offsets = OffsetsTwin()  # type: ignore[abstract]
    nameserver = GroupTwin(queue_count)  # type: ignore[abstract]
    lockmgr = LockmgrTwin(offsets)  # type: ignore[abstract]
    storage = StorageTwin(offsets)  # type: ignore[abstract]
    add: Any = partial
    async with AsyncExitStack() as servers:
        nameserver.address = await servers.enter_async_context(
            serving_at(
                add(offsets_grpc.add_OffsetsServiceServicer_to_server, offsets),
                add(lockmgr_grpc.add_LockmgrServiceServicer_to_server, lockmgr),
                add(storage_grpc.add_StorageServiceServicer_to_server, storage),
                add(nameserver_grpc.add_NameserverServiceServicer_to_server, nameserver),
            )
        )
        made = Twins(nameserver, lockmgr, offsets, storage, nameserver.address)
        made.set_owned(owned=owned)
        yield made


def _key(queue_id: Key) -> queue_pb2.GroupQueue:
    queue = queue_pb2.QueueRef(topic=TOPIC, broker=BROKER, queue_id=queue_id)
    return queue_pb2.GroupQueue(group=GROUP, queue=queue)


def _batch(queue_id: Key, offset: int, message: Message) -> bytes:
    builder = BatchBuilder()
    builder.add(message, encode_record(message))
    raw = builder.encode(topic=TOPIC, queue_id=queue_id)
    head = stamped_head(raw, position=0, first_offset=offset, store_unix_ms=1, topic_id=1, epoch=1)
    return head + raw[len(head) :]


async def _first_of(*events: asyncio.Event) -> None:
    async with asyncio.TaskGroup() as tasks:
        waiting = {tasks.create_task(event.wait()) for event in events}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for each in waiting:
            each.cancel()
