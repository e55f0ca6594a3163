"""One queue of one consumer, from asking for it to giving it back (protocol sections 6-11)."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Literal

import grpc.aio
from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.storage.v1 import storage_service_pb2 as storage_pb

from batonmq.common.aio import unless, wait_until
from batonmq.common.errors import (
    BatonError,
    Draining,
    Fenced,
    HandoverPending,
    Held,
    NotReadable,
    OldRequest,
    Retry,
    Unacked,
    UnknownQueue,
    Unreachable,
)
from batonmq.common.rpc import error_from_pb, from_rpc_error
from batonmq.consuming.message import ReceivedMessage
from batonmq.consuming.pulling import pull
from batonmq.consuming.session import (
    CONSUME_FROM,
    OwnershipEvent,
    Session,
    queue_to_pb,
    ranges_from_pb,
    ranges_to_pb,
)
from batonmq.core.inflight import Acks, Closing, QueueProgress, Start
from batonmq.core.route import QueueId
from batonmq.directory import CALL_TIMEOUT_S

log = logging.getLogger(__name__)

DEADLINE_MARGIN_MS = 3_000
"""The owner stops so long before its lease ends at the lock manager (protocol section 8)."""
ACQUIRE_HOLD_MS = 15_000
RESUME_RANGES_MAX = 4_096
"""More are not claimed: what is left out comes again, flagged."""


class QueueRunner:
    """Owns one queue while it is assigned to the consumer.

    `run` acquires, pulls, and on `unassign` drains, closes and releases. Handlers get messages by
    `take` and report with `finish` or `give_up`; both do nothing for messages of an ownership
    that is over.
    """

    def __init__(self, session: Session, queue: QueueId) -> None:
        self.session, self.queue = session, queue
        self.key = session.key(queue)
        self.filter = session.filters[queue.topic]
        self.progress: QueueProgress | None = None
        self.token = 0
        self.asking_seq = 0
        self.arrived = asyncio.Event()
        self.buffer: deque[ReceivedMessage] = deque()
        self.lineage = 0
        self.lease_ms = 30_000
        self._deadline_ms = 0
        self.stopping = asyncio.Event()
        self._unassigned = asyncio.Event()
        self._fenced = False
        self._ended = asyncio.Event()
        self._room = asyncio.Event()

    @property
    def assigned(self) -> bool:
        """Whether the queue is ours by the newest generation."""
        return not self._unassigned.is_set()

    @property
    def draining(self) -> bool:
        """Whether no message is started any more; `stopping` is the event for it."""
        return self.stopping.is_set()

    def unassign(self) -> None:
        """The queue is somebody else's now: start nothing, finish what runs, give it back."""
        if self.assigned:
            self._unassigned.set()
            self.stopping.set()
            if self.progress is not None and not self._fenced:
                self._tell("draining")

    def fence(self) -> None:
        """The token is not valid any more, or may not be: start nothing under it."""
        if self.progress is not None and not self._fenced:
            self._fenced = True
            self.stopping.set()
            self._ended.set()
            self._tell("fenced")

    def renew(self, sent_ms: int, lease_ms: int) -> None:
        """An access that was sent at `sent_ms` was accepted under our token."""
        self._deadline_ms = max(self._deadline_ms, sent_ms + lease_ms - DEADLINE_MARGIN_MS)
        self.lease_ms = lease_ms

    def may_start(self) -> bool:
        """Whether a message may be started now: owned, not draining, deadline not passed."""
        if self.progress is None or self.stopping.is_set():
            return False
        if self.session.clock.monotonic_ms() >= self._deadline_ms:
            log.warning("own deadline passed queue=%s token=%d", self.queue, self.token)
            self.fence()
            return False
        return True

    def take(self) -> ReceivedMessage | None:
        """Start the next message; None if there is none, or none may be started."""
        while self.buffer:
            if not self.may_start():
                break
            message = self.buffer.popleft()
            if self.progress is not None and self.progress.start(message.offset):
                message.attempts += 1
                if 2 * len(self.buffer) <= self.session.settings.buffer_messages_max:
                    self._room.set()
                return message
        self.arrived.clear()
        return None

    def finish(self, message: ReceivedMessage) -> bool:
        """The message is handled; False if that no longer counts."""
        progress = self.progress
        if progress is None or message.lineage != self.lineage:
            return False
        counted = progress.finish(message.offset)
        if 4 * progress.unconfirmed_count >= self.session.settings.span_max:
            self.session.commit_soon.set()
        if self.stopping.is_set() and not progress.running:
            self._ended.set()
        return counted

    def give_up(self, message: ReceivedMessage) -> None:
        """The message was started and will not be handled by this ownership."""
        if self.progress is not None and message.lineage == self.lineage:
            self.progress.give_up(message.offset)
            if not self.progress.running:
                self._ended.set()

    def to_commit(self, now_ms: int) -> Acks | None:
        """Acks worth a commit now: new ones, or any when the deadline is near."""
        progress = self.progress
        if progress is None or self._fenced:
            return None
        near = now_ms + self.lease_ms // 2 >= self._deadline_ms
        return progress.acks() if progress.dirty or near else None

    def committed(self, token: int, acks: Acks, sent_ms: int) -> None:
        """offsets has accepted `acks` under `token`."""
        if self.progress is not None and self.token == token:
            self.progress.confirm(acks)
            self.renew(sent_ms, self.lease_ms)
            self._room.set()

    async def run(self) -> None:
        """Own the queue, again and again, as long as it is assigned."""
        failures = 0
        while self.assigned:
            start = await self._acquire(failures)
            if start is None:
                self.session.keep_alive_soon.set()
                break
            self._begin(start)
            await unless(self.stopping, self._pull_forever())
            self._forget_unstarted()
            if not self._fenced:
                await self._give_back()
                return
            failures += 1
            self.token = 0
        self.progress = None

    def _begin(self, start: Start) -> None:
        carried = self.progress
        same = carried is not None and carried.reset_epoch == start.reset_epoch
        self.progress = carried.renewed(start) if carried is not None else QueueProgress(start)
        if not same:
            self.lineage += 1
        self.token = start.token
        self._fenced = False
        self.stopping.clear()
        self._ended.clear()
        if not self.assigned:
            self.stopping.set()
        self._tell("granted")

    async def _acquire(self, failures: int) -> Start | None:
        """Ask until the queue is ours; None once it is not assigned any more."""
        seq = self.session.next_acquire_seq()
        while self.assigned:
            self.asking_seq, asked_ms = seq, self.session.clock.monotonic_ms()
            try:
                return await unless(self._unassigned, self._ask(seq))
            except BatonError as error:
                log.debug("acquire refused queue=%s error=%s", self.queue, error)
                if not isinstance(error, Unreachable):
                    seq = self.session.next_acquire_seq()
                if isinstance(error, Held | Unacked | Draining | HandoverPending):
                    held_ms = self.session.clock.monotonic_ms() - asked_ms
                    if held_ms >= ACQUIRE_HOLD_MS // 2:
                        continue  # nothing has failed; a pause would miss the release
                if error.retry is Retry.NEVER and not isinstance(error, OldRequest):
                    log.warning("queue not granted queue=%s error=%s", self.queue, error)
                await unless(self._unassigned, self.session.directory.pause(error, failures))
                failures += 1
            finally:
                self.asking_seq = 0
        return None

    async def _ask(self, seq: int) -> Start:
        session, progress = self.session, self.progress
        item = lockmgr_pb.AcquireItem(
            queue=self.key,
            resume=ranges_to_pb(progress.in_hand()[:RESUME_RANGES_MAX] if progress else ()),
            reset_epoch=progress.reset_epoch if progress else 0,
            initial_offset=await self._initial_offset(),
        )
        request = lockmgr_pb.AcquireRequest(
            incarnation=session.incarnation,
            acquire_seq=seq,
            generation=session.generation,
            items=[item],
            hold_ms=ACQUIRE_HOLD_MS,
        )
        stub = await session.directory.lockmgr()
        sent_ms = session.clock.monotonic_ms()
        try:
            async for answer in stub.Acquire(
                request, timeout=ACQUIRE_HOLD_MS / 1000 + CALL_TIMEOUT_S
            ):
                if answer.HasField("error"):
                    raise error_from_pb(answer.error)
                grant = answer.grant
                session.saw_epoch(grant.offsets_epoch)
                self._deadline_ms = 0
                self.renew(sent_ms, grant.lease_ms)
                return Start(
                    grant.token,
                    grant.reset_epoch,
                    grant.committed_offset,
                    ranges_from_pb(grant.acked),
                    ranges_from_pb(grant.maybe_seen),
                )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        raise Unreachable("lockmgr ended an Acquire without an outcome")

    async def _initial_offset(self) -> int:
        """Where to start if the group has no progress on the queue."""
        stub = await self.session.directory.storage(self.queue.broker)
        try:
            answer = await stub.QueryOffsets(
                storage_pb.QueryOffsetsRequest(queues=[queue_to_pb(self.queue)]),
                timeout=CALL_TIMEOUT_S,
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        outcome = answer.outcomes[0]
        if outcome.HasField("error"):
            raise error_from_pb(outcome.error)
        first = CONSUME_FROM[self.session.settings.consume_from]
        if first == nameserver_pb.CONSUME_FROM_FIRST:
            return outcome.offsets.first_offset
        return outcome.offsets.next_offset

    async def _pull_forever(self) -> None:
        """Fill the buffer until stopped; fence on a refused token."""
        failures, unreadable = 0, False
        while self.may_start():
            await self._wait_for_room()
            try:
                await pull(self)
                failures, unreadable = 0, self._tell_unreadable(None, unreadable)
            except (Fenced, UnknownQueue) as error:
                log.info("fenced queue=%s error=%s", self.queue, error)
                self.fence()
            except BatonError as error:
                if error.retry is Retry.NEVER:
                    log.error("queue can't be read queue=%s error=%s", self.queue, error)
                unreadable = self._tell_unreadable(error, unreadable)
                await self.session.directory.pause(error, failures)
                failures += 1

    def _tell_unreadable(self, error: BatonError | None, unreadable: bool) -> bool:
        """Log when the topic stops giving messages, and when it begins again; which it is now."""
        if isinstance(error, NotReadable) and not unreadable:
            log.warning("queue waits, its topic gives no messages queue=%s", self.queue)
        if error is None and unreadable:
            log.info("queue goes on, its topic gives messages again queue=%s", self.queue)
        return isinstance(error, NotReadable) or (unreadable and error is not None)

    async def _wait_for_room(self) -> None:
        settings, progress = self.session.settings, self.progress
        assert progress is not None
        while (
            len(self.buffer) >= settings.buffer_messages_max or progress.span >= settings.span_max
        ):
            if progress.span >= settings.span_max:
                self.session.commit_soon.set()
            self._room.clear()
            await self._room.wait()

    def _forget_unstarted(self) -> None:
        self.buffer.clear()
        self.arrived.clear()

    async def _give_back(self) -> None:
        """Let handlers end, close at offsets, release at lockmgr (protocol section 9)."""
        progress = self.progress
        assert progress is not None
        clock = self.session.clock
        deadline_ms = clock.monotonic_ms() + self.session.settings.drain_timeout_ms
        while (
            progress.running
            and not self._fenced
            and (left_ms := deadline_ms - clock.monotonic_ms()) > 0
        ):
            self._ended.clear()
            await wait_until(self._ended, left_ms)
        if self._fenced:
            self.progress = None
            return
        closing = progress.closing()
        self.progress = None
        self.lineage += 1
        if closing.unfinished:
            log.warning("drained with unfinished queue=%s %s", self.queue, closing.unfinished)
        await self._close(closing)
        await self._release(closing.token)
        self.token = 0
        self._tell("released", closing.token)

    async def _close(self, closing: Closing) -> None:
        """Repeat one frozen Close until it is answered, or the lease must be over."""
        item = offsets_pb.CloseItem(
            queue=self.key,
            token=closing.token,
            reset_epoch=closing.reset_epoch,
            committed_offset=closing.acks.committed,
            acked=ranges_to_pb(closing.acks.ranges),
            unfinished=ranges_to_pb(closing.unfinished),
        )
        failures, clock = 0, self.session.clock
        deadline_ms = clock.monotonic_ms() + 2 * self.lease_ms
        while clock.monotonic_ms() < deadline_ms:
            try:
                stub = await self.session.directory.offsets()
                request = offsets_pb.CloseRequest(
                    offsets_epoch=self.session.offsets_epoch, items=[item]
                )
                answer = await stub.Close(request, timeout=CALL_TIMEOUT_S)
                if answer.outcomes[0].HasField("error"):
                    error = error_from_pb(answer.outcomes[0].error)
                    log.warning("close refused queue=%s error=%s", self.queue, error)
                return
            except grpc.aio.AioRpcError as failure:
                await self.session.directory.pause(from_rpc_error(failure), failures)
            except BatonError as failure:
                await self.session.directory.pause(failure, failures)
            failures += 1

    async def _release(self, token: int) -> None:
        """Tell lockmgr; if it is away for long, the next owner finds the token closed."""
        hold = lockmgr_pb.Hold(queue=self.key, token=token)
        request = lockmgr_pb.ReleaseRequest(incarnation=self.session.incarnation, holds=[hold])
        for failures in range(8):
            try:
                stub = await self.session.directory.lockmgr()
                await stub.Release(request, timeout=CALL_TIMEOUT_S)
                return
            except grpc.aio.AioRpcError as failure:
                await self.session.directory.pause(from_rpc_error(failure), failures)
            except BatonError as failure:
                await self.session.directory.pause(failure, failures)

    def _tell(
        self, kind: Literal["granted", "draining", "released", "fenced"], token: int = 0
    ) -> None:
        self.session.on_ownership(
            OwnershipEvent(kind, self.queue, token or self.token, self.session.clock.monotonic_ms())
        )
