"""Asks producers what became of their transactions, and ends those that reach a limit.

Runs on the leader. A check is written to the log, and safe, before it is sent; so another leader
does not ask again within the interval. A group without a live producer is not asked, and no check
is counted. A transaction without an answer is discarded after the last check, or at the age limit:
its message moves to the topic of unresolved messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal
from zlib import crc32

from baton.storage.v1 import transaction_service_pb2 as pb
from batonmq._core.names import UNRESOLVED_TOPIC
from batonmq._core.records import read_header
from batonmq.errors import (
    BadBatch,
    BatonError,
    DataLoss,
    LimitExceeded,
    NoQuorum,
    NotLeader,
    NotServing,
)
from batonmq_server.storage.appender import Appender
from batonmq_server.storage.blocked_retention import REWRITE_INTERVAL_MS, blocked_segment_end
from batonmq_server.storage.core.check_streams import CheckStream, CheckStreams
from batonmq_server.storage.core.checks import CheckedBatch, LocalTopic
from batonmq_server.storage.core.open_transactions import OpenTransaction
from batonmq_server.storage.core.producers import StoreReceipt
from batonmq_server.storage.core.transactions import (
    CheckMark,
    HalfMessage,
    Mark,
    damaged_batch,
    discard_batch,
    encode_half,
    encode_marks,
    read_half_head,
)
from batonmq_server.storage.schedule_server import SYSTEM_TOPICS, checked
from batonmq_server.storage.topic_cache import TopicCache
from batonmq_server.storage.transaction_server import (
    encode_id,
    read_by_position,
    seconds_after,
)

log = logging.getLogger(__name__)

ROUND_MAX = 256
"""Maximum number of transactions that one round checks."""
ROUND_INTERVAL_MS = 500
AGE_INTERVAL_MS = 10_000
"""Interval at which the oldest transactions are compared with the age limit."""
NO_QUEUE_WAIT_MS = 2_000
"""How long a transaction waits for a queue of the topic of unresolved messages, or for a leader
that can read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionLimits:
    """When transactions are checked, and when they are discarded.

    Attributes:
        check_interval_ms: Interval between two checks of a transaction.
        checks_max: Number of checks without an answer, after which a transaction is discarded.
        age_ms_max: Age at which a transaction is discarded.
        retention_ms: Retention time of messages; 0 for unlimited.
    """

    check_interval_ms: int
    checks_max: int
    age_ms_max: int
    retention_ms: int


class TransactionChecker:
    """Checks the open transactions of a store.

    Args:
        streams: The streams of checks, which the servicer opens and sends.
        ensure_unresolved: Asks for a queue of the topic of unresolved messages on this broker.
    """

    def __init__(
        self,
        appender: Appender,
        topics: TopicCache,
        streams: CheckStreams[pb.TransactionCheck],
        limits: TransactionLimits,
        ensure_unresolved: Callable[[], Awaitable[None]],
    ) -> None:
        self._appender, self._topics = appender, topics
        self._streams, self._limits = streams, limits
        self._ensure_unresolved = ensure_unresolved
        self._store, self._clock = appender.store, appender.clock
        self._open = appender.store.transactions.open
        self._changed = asyncio.Event()
        self._rewrite_ms = self._age_ms = 0
        self._oldest: tuple[int, int] | None = None
        appender.stream.transactions.open_count = lambda: len(self._open)
        appender.metrics.open_transactions.set_function(lambda: len(self._open))
        appender.metrics.check_streams.set_function(lambda: len(streams))
        appender.metrics.oldest_transaction_age_seconds.set_function(self._oldest_age_s)

    def wake(self) -> None:
        """Tell the loop that a transaction has begun or a stream was opened."""
        self._changed.set()

    async def run(self) -> None:
        """Check until cancelled; run it as one task."""
        try:
            while True:
                try:
                    if await self.check() or await self.discard_old() or await self.rewrite_old():
                        continue
                except (NotServing, NotLeader, NoQuorum) as error:  # or the leader is unknown
                    log.warning("checks of transactions delayed error=%s", error)
                if not len(self._open):
                    self._oldest = None
                    self._changed.clear()
                    await self._changed.wait()
                await asyncio.sleep(ROUND_INTERVAL_MS / 1000)
        finally:
            self._oldest = None

    async def check(self) -> bool:
        """Run one round of checks; return whether a transaction was due."""
        self._note_oldest()
        if self._appender.retention.rejection() is not None:
            return False
        now_unix_ms = self._clock.unix_ms()
        due = self._due(now_unix_ms)
        if not due:
            return False
        halves = read_by_position(self._appender, due)
        due = [one for one in due if one.transaction_id in halves]  # others in the next round
        exhausted = [one for one in due if one.checks >= self._limits.checks_max]
        asked = [one for one in due if one.checks < self._limits.checks_max]
        if exhausted:
            reason = f"no answer to {self._limits.checks_max} checks"
            await self._discard(exhausted, halves, reason)
        await self._ask(asked, halves)
        return True

    async def discard_old(self) -> bool:
        """Discard transactions at the age limit; return whether there may be more."""
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._age_ms or self._appender.retention.rejection() is not None:
            return False
        limit_unix_ms = self._clock.unix_ms() - self._limits.age_ms_max
        old = [
            one
            for one in self._open.page(-1, ROUND_MAX)
            if (self._begin_unix_ms(one) or 0) <= limit_unix_ms
        ]
        halves = read_by_position(self._appender, old)
        read = [one for one in old if one.transaction_id in halves]
        if read:
            reason = f"no end within {self._limits.age_ms_max // 1_000} s"
            await self._discard(read, halves, reason)
        more = len(old) == ROUND_MAX or len(read) < len(old)
        if more and not any(one.transaction_id in self._open for one in read):
            return True
        self._age_ms = now_ms + AGE_INTERVAL_MS
        return False

    async def rewrite_old(self) -> bool:
        """Write half messages that block retention again; return whether there may be more."""
        now_ms = self._clock.monotonic_ms()
        oldest = self._open.oldest_position() if now_ms >= self._rewrite_ms else None
        end = blocked_segment_end(self._appender, oldest, age_ms_max=self._limits.retention_ms)
        if end is None:
            self._rewrite_ms = max(self._rewrite_ms, now_ms + REWRITE_INTERVAL_MS)
            return False
        old = self._open.before(end, ROUND_MAX)
        halves = read_by_position(self._appender, old)
        batches, damaged = [], []
        for one in old:
            half = halves.get(one.transaction_id)
            if half is None:
                continue  # in the next round
            if isinstance(half, DataLoss):
                damaged.append(one)
                continue
            moved = replace(
                half,
                transaction_id=one.transaction_id,
                check_unix_s=one.check_unix_s,
                checks=one.checks,
            )
            batches.append(checked(encode_half(moved)))
        outcomes = self._appender.append(batches, SYSTEM_TOPICS)
        stored = [one.next_position for one in outcomes if isinstance(one, StoreReceipt)]
        position = max(stored, default=0)
        await self._appender.flusher.wait_until_safe(position)
        if damaged:
            await self._discard(damaged, halves, "")
        return bool(position)

    def _due(self, now_unix_ms: int) -> list[OpenTransaction]:
        groups = self._streams.with_room()
        ids = self._open.due(
            now_unix_ms // 1_000, groups, ROUND_MAX, checks_max=self._limits.checks_max
        )
        return [one for id_ in ids if (one := self._open.get(id_)) is not None]

    async def _ask(
        self, due: Sequence[OpenTransaction], halves: dict[int, HalfMessage | DataLoss]
    ) -> None:
        """Record checks of transactions, and send them once they are safe."""
        check_unix_s = seconds_after(self._clock.unix_ms(), self._limits.check_interval_ms)
        checks: list[tuple[OpenTransaction, HalfMessage, str]] = []
        damaged: list[OpenTransaction] = []
        able = self._able_streams()
        for one in due:
            half = halves[one.transaction_id]
            if isinstance(half, DataLoss):
                damaged.append(one)
                continue
            topic = read_header(half.batch).topic
            if not able(one.group, topic):
                # Nothing is recorded: this only saves the next rounds from looking at it.
                self._open.checked(one.transaction_id, check_unix_s, one.checks)
                log.warning(
                    "no live producer of the group may produce to the topic group=%s topic=%s",
                    one.group,
                    topic,
                )
                continue
            checks.append((one, half, topic))
        if damaged:
            await self._discard(damaged, halves, "")
        marks = [
            CheckMark(one.transaction_id, check_unix_s, one.checks + 1)
            for one, _, _ in checks
            if one.transaction_id in self._open
        ]
        if marks:
            await self._appender.flusher.wait_until_safe(self._write(marks))
        else:
            await asyncio.sleep(0)  # the round may have waited for nothing
        able = self._able_streams()
        for one, half, topic in checks:
            if one.transaction_id not in self._open:
                continue
            check = pb.TransactionCheck(
                transaction_id=encode_id(one.transaction_id, self._appender.broker),
                batch=half.batch,
                begin_unix_ms=half.begin_unix_ms,
                check=one.checks + 1,
            )
            turn, size = _turn(one.transaction_id, check.check), len(half.batch)
            if self._streams.put(able(one.group, topic), topic, check, turn, size):
                self._appender.metrics.transaction_checks.inc()
                self._appender.stream.transactions.add("checked", one.group, topic)

    def _able_streams(self) -> Callable[[str, str], list[CheckStream[pb.TransactionCheck]]]:
        """Return `CheckStreams.able`, which looks once at each group and topic, until an await."""
        return cache(self._streams.able)

    async def _discard(
        self,
        transactions: Sequence[OpenTransaction],
        halves: dict[int, HalfMessage | DataLoss],
        reason: str,
    ) -> None:
        """Move the messages of transactions to the topic of unresolved messages.

        Instead of a message that can't be read, that topic gets one that says so. But if another
        replica has the message, the transaction stays open, and the next leader continues with it.

        Args:
            reason: Why the readable messages are moved.
        """
        topics = await self._topics.find_all([UNRESOLVED_TOPIC])
        topic = topics[UNRESOLVED_TOPIC]
        later_s = seconds_after(self._clock.unix_ms(), NO_QUEUE_WAIT_MS)
        open_ones = []
        for one in transactions:
            lost = halves[one.transaction_id]
            if isinstance(lost, DataLoss) and self._appender.role.leaves_to_others(lost):
                self._open.checked(one.transaction_id, later_s, one.checks)
            elif one.transaction_id in self._open:
                open_ones.append(one)
        if not open_ones:
            return
        if isinstance(topic, BatonError) or not topic.queue_count:
            try:
                await self._ensure_unresolved()
            except BatonError as error:
                log.warning("transactions not discarded error=%s", error)
            for one in open_ones:
                self._open.checked(one.transaction_id, later_s, one.checks)
            return
        position = 0
        for one in open_ones:
            half = halves[one.transaction_id]
            position = max(position, self._discard_one(one, half, topic, reason))
        await self._appender.flusher.wait_until_safe(position)

    def _discard_one(
        self, one: OpenTransaction, half: HalfMessage | DataLoss, topic: LocalTopic, reason: str
    ) -> int:
        """Discard a transaction; return the position up to which the log must be safe.

        Raises:
            NotServing: nothing can be written now.
        """
        name = encode_id(one.transaction_id, self._appender.broker)
        queue_id = one.transaction_id % topic.queue_count
        outcome: Literal["discarded", "damaged"] = "discarded"
        origin = ""
        try:
            if isinstance(half, DataLoss):
                raise half
            origin = read_header(half.batch).topic
            batch = discard_batch(one.transaction_id, half, queue_id, name=name, reason=reason)
        except (BadBatch, DataLoss, LimitExceeded) as error:
            outcome, reason = "damaged", f"the half message is damaged: {error.message}"
            batch = damaged_batch(
                one.transaction_id,
                queue_id,
                group=one.group,
                name=name,
                reason=reason,
                now_unix_ms=self._clock.unix_ms(),
            )
        stored = [CheckedBatch(read_header(batch), batch)]
        open_topic = {UNRESOLVED_TOPIC: replace(topic, writable=True, write_queue_count=None)}
        receipts = self._appender.append(stored, open_topic)
        self._appender.count_appended(stored, receipts)
        (receipt,) = receipts
        if isinstance(receipt, BatonError):
            raise NotServing(f"transaction {name} not discarded: {receipt.message}") from receipt
        self._appender.metrics.ended_transactions.labels(outcome).inc()
        self._appender.stream.transactions.add(outcome, one.group, origin)
        log.error(
            "transaction discarded transaction_id=%s group=%s topic=%s checks=%d reason=%r",
            name,
            one.group,
            origin,
            one.checks,
            reason,
        )
        return receipt.next_position

    def _write(self, marks: Sequence[Mark]) -> int:
        """Write marks; return the position up to which the log must be safe, 0 for nothing.

        Raises:
            NotServing: nothing can be written now.
        """
        if not marks:
            return 0
        (outcome,) = self._appender.append([checked(encode_marks(marks))], SYSTEM_TOPICS)
        if isinstance(outcome, BatonError):
            raise NotServing(f"marks of transactions not written: {outcome.message}") from outcome
        return outcome.next_position

    def _note_oldest(self) -> None:
        """Find out when the oldest open transaction began, if that is not known."""
        head = self._open.page(-1, 1)
        if not head:
            self._oldest = None
        elif self._oldest is None or self._oldest[0] != head[0].transaction_id:
            begin_unix_ms = self._begin_unix_ms(head[0])
            if begin_unix_ms is None:
                begin_unix_ms = self._clock.unix_ms()
            self._oldest = head[0].transaction_id, begin_unix_ms

    def _begin_unix_ms(self, one: OpenTransaction) -> int | None:
        """Return when a transaction began; None if its half message is damaged there."""
        try:
            return read_half_head(self._store.log, one.position)[1]
        except DataLoss:
            return None

    def _oldest_age_s(self) -> float:
        if self._oldest is None or self._oldest[0] not in self._open:
            return 0.0
        return max(0, self._clock.unix_ms() - self._oldest[1]) / 1000


def _turn(transaction_id: int, check: int) -> int:
    """Return the turn of a check: the next number for each check of a transaction."""
    return crc32(transaction_id.to_bytes(8, "little")) + check
