"""Deliver: the messages of many queues over one stream, within the credit of the caller.

Each delivery is a task that delivers again and again, as a consumer that pulls in a loop would:
each frame is recorded under its token before it is sent. Frames that become ready in the same turn
of the event loop leave in one response. A frame that an advance covers waits for no call
(protocol 6.8).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import grpc.aio

from baton.common.v1 import queue_pb2
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.aio import STEP_ITEMS, in_steps
from batonmq._common.large_messages import encode_frames, is_large
from batonmq._common.rpc import error_to_pb
from batonmq._core.records import read_header
from batonmq.errors import BatonError, InvalidArgument, NotLeader, Overloaded
from batonmq_server.runtime.access.rules import queue_permissions
from batonmq_server.runtime.call_tasks import CallTasks
from batonmq_server.storage import validation
from batonmq_server.storage.advance_settler import AdvanceSettler
from batonmq_server.storage.deliverer import Delivered, Deliverer, without_progress
from batonmq_server.storage.delivery_advance import DeliveryAdvance
from batonmq_server.storage.long_polls import QueueOwner
from batonmq_server.storage.servicer_parts import StorageServicerParts
from batonmq_server.storage.validation import ParsedCredit, ParsedPull

Context = grpc.aio.ServicerContext[Any, Any]

DELIVERIES_MAX = 10_000
"""Deliveries of one stream, at most."""
RESPONSE_BYTES_MAX = 4 * 1024 * 1024
"""A response with more bytes of batches gets no more frames."""
FRAME_BYTES = 1024
"""What a frame counts beside its batches: more than it has."""
UNSENT_BYTES_MAX = 16 * 1024 * 1024
"""While a stream has read more bytes that its client has not taken, its deliveries wait. If these
are recorded, and could be sent, none of its commands is read."""
SILENCE_MS_MAX = 5_000
"""A stream sends a response at least this often, if need be without frames."""
HOLD_ALIGNMENT_MS = 1_000
"""Deliveries without messages send their frames at multiples of this time, so that they share
responses."""


class LastBatch(NamedTuple):
    """The batch that a delivery has sent last."""

    position: int
    next_offset: int


NO_BATCH = LastBatch(-1, -1)


class DeliveryStreams:
    """Serves the streams of one open data directory.

    Attributes:
        count: Deliveries of all streams.
        tasks: The tasks of all streams; none may raise an error.
    """

    def __init__(self, deliverer: Deliverer, parts: StorageServicerParts) -> None:
        self.deliverer, self.parts = deliverer, parts
        self._open: dict[_DeliveryStream, None] = {}
        self.count = 0
        self.tasks = CallTasks("the node")
        self._settler = AdvanceSettler(parts.deliveries.settle, parts.clock)

    async def run(self) -> None:
        """Run the tasks of all streams until cancelled; run it as one task."""
        async with self.tasks.open():
            await self._settler.run()

    def new_advance(self, owner: QueueOwner) -> DeliveryAdvance:
        """Return the advance of a new delivery."""
        return DeliveryAdvance(owner, self._new_advance_id, self._settler.watch)

    def _new_advance_id(self) -> int:
        return self.parts.random.getrandbits(62) or 1

    async def serve(
        self, requests: AsyncIterator[pb.DeliverRequest], context: Context
    ) -> AsyncIterator[pb.DeliverResponse | bytes]:
        """See Deliver in the proto. A response with many bytes is encoded already."""
        stream = _DeliveryStream(self, context)
        reading = self.tasks.spawn(stream.read(requests))
        self._open[stream] = None
        unsubscribe = stream.access.subscribe(stream.check_access)
        try:
            async for response in stream.responses():
                yield response
        finally:
            reading.cancel()
            unsubscribe()
            del self._open[stream]
            stream.close()

    def end(self, error: BatonError) -> None:
        """End all streams with `error`."""
        for stream in self._open:
            stream.fail(error)


class _Delivery:
    """One queue that is delivered: where it continues, and its credit.

    Args:
        keeps_last_batch: Whether the caller keeps the last batch of a frame that ends within it.

    Attributes:
        led: Whether a leader has sent a frame. The caller counts on it that acks are recorded.
        queue: The queue, for the check of its permission.
        advance: What offsets has recorded in advance.
        credit_number: Number of the credit that the newest record included.
        funded: Set while there is credit.
    """

    def __init__(
        self,
        queue: queue_pb2.GroupQueue,
        pull: ParsedPull,
        credit: ParsedCredit,
        advance: DeliveryAdvance,
        *,
        keeps_last_batch: bool,
    ) -> None:
        self.queue, self._credit, self.advance = queue, credit, advance
        self._keeps_last_batch = keeps_last_batch
        self._last_batch = NO_BATCH
        self._pull, self._offset = pull._replace(advance=advance), pull.spec.offset
        self._stated = self._named = 0
        self.messages_sent = self.bytes_sent = self.credit_number = 0
        self.funded, self.led = asyncio.Event(), False
        self.task: asyncio.Task[None] | None = None
        self._note_credit()

    def raise_credit(self, credit: ParsedCredit) -> None:
        """Replace the credit by a newer one; limits never fall."""
        if credit.number <= self._credit.number:
            raise InvalidArgument(
                f"credit {credit.number} follows credit {self._credit.number}",
                facts={"field": "number"},
            )
        self._credit = credit._replace(
            messages_limit=max(credit.messages_limit, self._credit.messages_limit),
            bytes_limit=max(credit.bytes_limit, self._credit.bytes_limit),
        )
        self._note_credit()

    def next_pull(self, bytes_max: int | None) -> ParsedPull:
        """Return what to deliver next, with the newest statement of the caller.

        Acks are left out once they are recorded.

        Args:
            bytes_max: Limit of the caller's quota; None for none.
        """
        spec, credit = self._pull.spec, self._credit
        self._named = credit.number
        messages_max = min(spec.messages_max, credit.messages_limit - self.messages_sent)
        limit = min(spec.bytes_max, credit.bytes_limit - self.bytes_sent)
        if bytes_max is not None:
            limit = min(limit, bytes_max)
        spec = spec._replace(
            offset=self._offset,
            messages_max=max(1, messages_max),
            bytes_max=max(1, limit),
            kept_position=self._kept_position(),
        )
        return self._pull._replace(
            spec=spec,
            offsets_epoch=credit.offsets_epoch,
            offsets_set=credit.offsets_set,
            progress=credit.progress if credit.number > self._stated else None,
            received_offset=credit.received_offset,
        )

    def at_follower(self, pull: ParsedPull) -> ParsedPull:
        """Return a pull without acks: a follower takes none.

        Raises:
            NotLeader: The node led before, and the credit counts on the acks (protocol 6.7).
        """
        if self.led:
            raise NotLeader("this node is no longer the leader", retry_after_ms=100)
        return without_progress(pull)

    def _kept_position(self) -> int:
        """Return the position of the batch that continues if the caller still has it, else -1."""
        last = self._last_batch
        return last.position if self._keeps_last_batch and self._offset < last.next_offset else -1

    def sent(self, delivered: Delivered, byte_count: int) -> None:
        """Note that a frame is sent."""
        answer, reading = delivered.response, delivered.reading
        if reading is not None:
            self.messages_sent += reading.message_count
            if reading.batches:
                header = read_header(reading.batches[-1])
                self._last_batch = LastBatch(header.position, header.next_offset)
        if delivered.recorded:
            self.credit_number = self._named
            if answer.progress_taken:
                self._stated = self._named
        self.bytes_sent += byte_count
        self._offset = answer.next_offset
        self._note_credit()

    def _note_credit(self) -> None:
        credit = self._credit
        if self.messages_sent < credit.messages_limit and self.bytes_sent < credit.bytes_limit:
            self.funded.set()
        else:
            self.funded.clear()


class _DeliveryStream:
    """One stream: its deliveries, and the frames that are ready to leave.

    Attributes:
        access: What its caller may read, and how fast.
    """

    def __init__(self, owner: DeliveryStreams, context: Context) -> None:
        self._owner, self._parts = owner, owner.parts
        self.access = owner.parts.access_of(context)
        self._deliveries: dict[int, _Delivery] = {}
        self._ready_responses: list[_Response] = []
        self._unsent_bytes = 0
        self._unwaited_count = 0  # frames one after the other that have waited for nothing
        self._taken = asyncio.Event()
        self._taken.set()
        self._ready = asyncio.Event()
        self._error: Exception | None = None
        self._read_all = False

    async def read(self, requests: AsyncIterator[pb.DeliverRequest]) -> None:
        """Carry out the commands of the caller, until it sends no more."""
        try:
            async for request in requests:
                validation.check_commands(len(request.commands))
                async for command in in_steps(request.commands):
                    self._carry_out(command)
                if sum(one.size for one in self._ready_responses) > UNSENT_BYTES_MAX:
                    await self._taken.wait()  # each command may have added an error
            self._read_all = True
            self._ready.set()
        except Exception as error:  # noqa: BLE001  it ends the stream
            self.fail(error)

    async def responses(self) -> AsyncIterator[pb.DeliverResponse | bytes]:
        """Yield the frames that are ready, until the stream ends.

        Raises:
            Exception: the error that ended the stream.
        """
        call_later = asyncio.get_running_loop().call_later
        while True:
            silence = call_later(SILENCE_MS_MAX / 1000, self._ready.set)
            try:
                await self._ready.wait()
            finally:
                silence.cancel()
            self._ready.clear()
            responses, self._ready_responses = self._ready_responses, []
            if not responses and self._error is None and not self._read_all:
                yield pb.DeliverResponse()
                continue
            self._free(sum(response.size for response in responses))
            for response in responses:
                yield response.content()
            if self._error is not None:
                raise self._error
            if self._read_all:
                return

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after the frames that are ready."""
        if self._error is None:
            self._error = error
            self._ready.set()

    def close(self) -> None:
        """End all deliveries."""
        for number in list(self._deliveries):
            self._stop(number)

    def check_access(self) -> None:
        """End the deliveries that the caller may not read any more."""
        for number, delivery in list(self._deliveries.items()):
            try:
                self.access.require(*queue_permissions(delivery.queue))
            except BatonError as error:
                self._stop(number)
                self._put_error(number, error)

    def _carry_out(self, command: pb.DeliveryCommand) -> None:
        number, kind = command.delivery_id, command.WhichOneof("command")
        if kind == "start":
            if number in self._deliveries or len(self._deliveries) >= DELIVERIES_MAX:
                validation.check_limit("deliveries", len(self._deliveries) + 1, DELIVERIES_MAX)
                raise InvalidArgument(
                    f"delivery {number} has begun already", facts={"field": "delivery_id"}
                )
            try:
                self._start(number, command.start)
            except BatonError as error:
                self._put_error(number, error)
            return
        delivery = self._deliveries.get(number)
        if kind == "stop":
            self._stop(number)
        elif kind is None:
            raise InvalidArgument("a command is missing", facts={"field": "command"})
        elif delivery is not None:
            try:
                delivery.raise_credit(validation.parse_credit(command.credit))
            except BatonError as error:
                self._stop(number)
                self._put_error(number, error)

    def _start(self, number: int, start: pb.DeliveryStart) -> None:
        pull = validation.parse_delivery(start, self._parts.broker)
        credit = validation.parse_credit(start.credit)
        self.access.require(*queue_permissions(start.pull.queue))
        if (count := self._owner.count) >= self._parts.deliveries_max:
            raise Overloaded(
                f"{count} deliveries are open already; the limit is {self._parts.deliveries_max}",
                remedy="Read fewer queues in one client, or raise long_polls_max of the storage "
                "service.",
                retry_after_ms=1_000,
                facts={"limit": count},
            )
        self._owner.count += 1
        delivery = self._deliveries[number] = _Delivery(
            start.pull.queue,
            pull,
            credit,
            self._owner.new_advance(pull.owner),
            keeps_last_batch=start.keeps_last_batch,
        )
        delivery.task = self._owner.tasks.spawn(self._run(number, delivery, pull.hold_ms))

    def _stop(self, number: int) -> None:
        delivery = self._deliveries.pop(number, None)
        if delivery is not None:
            self._owner.count -= 1
            if delivery.task is not None:
                delivery.task.cancel()

    async def _run(self, number: int, delivery: _Delivery, hold_ms: int) -> None:
        """Deliver until the delivery ends."""
        try:
            await self._deliver_frames(number, delivery, hold_ms)
        finally:
            delivery.advance.ended = True

    async def _deliver_frames(self, number: int, delivery: _Delivery, hold_ms: int) -> None:
        try:
            while True:
                await delivery.funded.wait()
                await self._wait_for_room()
                if not await self._deliver(number, delivery, hold_ms):
                    break
        except BatonError as error:
            self._put_error(number, error)
        except Exception as error:  # noqa: BLE001  the stream ends with it
            self.fail(error)
        if self._is_open(number, delivery):
            del self._deliveries[number]
            self._owner.count -= 1

    async def _deliver(self, number: int, delivery: _Delivery, hold_ms: int) -> bool:
        """Send one frame; return whether another one may follow."""
        access, deliverer = self.access, self._owner.deliverer
        while wait_ms := access.read_wait_ms():  # noqa: ASYNC110  the limit may be raised
            await asyncio.sleep(wait_ms / 1000)
        bytes_max = access.read_bytes_max()
        end_ms = _aligned(self._parts.clock.monotonic_ms() + hold_ms)
        frames: list[pb.DeliveryFrame] = []
        unsent, waited = 0, False

        def new_answer() -> pb.PullResponse:
            frames.append(self._new_frame(number))
            return frames[0].messages

        async def after_wait(_: ParsedPull) -> ParsedPull:
            nonlocal waited
            waited = True
            await self._wait_for_room()
            return delivery.next_pull(bytes_max)

        def on_read(byte_count: int) -> None:
            nonlocal unsent
            unsent = self._note_unsent(byte_count)

        try:
            delivered = await deliverer.deliver(
                delivery.next_pull(bytes_max),
                end_ms,
                after_wait,
                new_answer,
                delivery.at_follower,
                on_read,
            )
        except BaseException:
            self._free(unsent)
            raise
        (frame,), reading, byte_count = frames, delivered.reading, 0
        if reading is not None:
            byte_count = self._ready_responses[-1].add_batches(reading.batches)
            frame.continues_batch = reading.continues_batch
        else:
            self._note_unsent(0)
        delivery.sent(delivered, byte_count)
        access.charge_read(byte_count)
        frame.credit_number = delivery.credit_number
        frame.messages_sent, frame.bytes_sent = delivery.messages_sent, delivery.bytes_sent
        delivery.led |= not self._parts.role.is_follower
        frame.last = last = deliverer.names_another_node(frame.messages.next_node_id)
        self._unwaited_count = 0 if waited or delivered.recorded else self._unwaited_count + 1
        if not byte_count or self._unwaited_count == STEP_ITEMS:
            self._unwaited_count = 0
            await asyncio.sleep(0)  # nothing else may have been waited for
        return not last

    def _is_open(self, number: int, delivery: _Delivery) -> bool:
        return self._deliveries.get(number) is delivery

    def _put_error(self, number: int, error: BatonError) -> None:
        self._new_frame(number).error.CopyFrom(error_to_pb(error))
        self._note_unsent(0)

    async def _wait_for_room(self) -> None:
        """Wait until the client has taken enough; others may read more when it has."""
        while not self._taken.is_set():
            await self._taken.wait()

    def _note_unsent(self, byte_count: int) -> int:
        """Note that the client has to take one more frame, with `byte_count` bytes of batches.

        Return what it counts.
        """
        self._unsent_bytes += FRAME_BYTES + byte_count
        if self._unsent_bytes > UNSENT_BYTES_MAX:
            self._taken.clear()
        return FRAME_BYTES + byte_count

    def _free(self, byte_count: int) -> None:
        """Note that frames are taken, or will not be sent."""
        self._unsent_bytes -= byte_count
        if self._unsent_bytes <= UNSENT_BYTES_MAX:
            self._taken.set()

    def _new_frame(self, number: int) -> pb.DeliveryFrame:
        """Return a frame of the response that leaves next; fill it in this turn of the loop."""
        if not self._ready_responses or self._ready_responses[-1].size > RESPONSE_BYTES_MAX:
            self._ready_responses.append(_Response())
        self._ready.set()
        return self._ready_responses[-1].new_frame(number)


class _Response:
    """A response that is about to leave."""

    def __init__(self) -> None:
        self._frames, self._batches = pb.DeliverResponse(), list[Sequence[bytes]]()
        self._batches_bytes = 0

    @property
    def size(self) -> int:
        """Bytes of the frames, at most."""
        return FRAME_BYTES * len(self._batches) + self._batches_bytes

    def new_frame(self, number: int) -> pb.DeliveryFrame:
        """Add a frame, and return it."""
        self._batches.append(())
        return self._frames.frames.add(delivery_id=number)

    def add_batches(self, batches: Sequence[bytes]) -> int:
        """Add batches to the newest frame; return their size."""
        self._batches[-1] = batches
        size = sum(map(len, batches))
        self._batches_bytes += size
        return size

    def content(self) -> pb.DeliverResponse | bytes:
        """Return the response; encoded if it is large."""
        if is_large(self._batches_bytes, sum(map(len, self._batches))):
            return encode_frames(zip(self._frames.frames, self._batches, strict=True))
        for frame, batches in zip(self._frames.frames, self._batches, strict=True):
            if batches:
                frame.messages.batches.extend(batches)
        return self._frames


def _aligned(time_ms: int) -> int:
    """Return the next multiple of HOLD_ALIGNMENT_MS at or after a time."""
    return -(-time_ms // HOLD_ALIGNMENT_MS) * HOLD_ALIGNMENT_MS
