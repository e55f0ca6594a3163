"""The servicer of TransactionService: stores half messages, ends and lists transactions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

import grpc.aio

from baton.storage.v1 import transaction_service_pb2 as pb
from baton.storage.v1 import transaction_service_pb2_grpc as pb_grpc
from batonmq._common.aio import in_steps, wait_until
from batonmq._common.rpc import error_to_pb
from batonmq._core.names import check_group
from batonmq._core.records import decode_records, read_header
from batonmq.errors import (
    BatonError,
    DataLoss,
    InvalidArgument,
    TransactionEnded,
    TransactionNotFound,
    WrongBroker,
)
from batonmq_server.runtime.access.guard import PermissionCheck
from batonmq_server.runtime.access.owner import owner_of
from batonmq_server.runtime.access.permissions import produce
from batonmq_server.storage import validation
from batonmq_server.storage.appender import Appender
from batonmq_server.storage.core.check_streams import CheckStreams
from batonmq_server.storage.core.checks import (
    CheckedBatch,
    LocalTopic,
    check,
    check_no_outputs,
    check_queue,
    check_takes,
)
from batonmq_server.storage.core.open_transactions import OpenTransaction
from batonmq_server.storage.core.producers import QueueKey, StoreReceipt
from batonmq_server.storage.core.scan import HEAD_BYTES_MAX
from batonmq_server.storage.core.tier import NotCached
from batonmq_server.storage.core.transactions import (
    FIRST,
    EndedTransaction,
    HalfMessage,
    Outcome,
    RollbackMark,
    commit_batch,
    encode_half,
    encode_marks,
    read_half_head,
    read_halves,
)
from batonmq_server.storage.schedule_server import SYSTEM_TOPICS, checked
from batonmq_server.storage.scheduled_deliverer import open_queue
from batonmq_server.storage.tier_reader import LocalReads, RemoteReads
from batonmq_server.storage.topic_cache import TopicCache

ENDS_MAX = 1_024
CHECK_AFTER_MS_MAX = 86_400_000
LISTED_MAX, LISTED_DEFAULT = 1_000, 100
READ_BYTES_MAX = 16 * 1024 * 1024
"""Half messages that are read together have this many bytes at most, and those of one more."""
SILENCE_MS_MAX = 5_000
"""A stream sends a response at least this often, if need be without checks."""
RESPONSE_BYTES_MAX = 4 * 1024 * 1024
"""A response has no more checks once it has this many bytes."""
_ID = re.compile(r"([a-z0-9-]{1,63})-([0-9a-f]{1,16})")
_OUTCOMES = {
    pb.TRANSACTION_STATE_COMMITTED: Outcome.COMMITTED,
    pb.TRANSACTION_STATE_ROLLED_BACK: Outcome.ROLLED_BACK,
}

Context = grpc.aio.ServicerContext[Any, Any]
_Topics = Mapping[str, LocalTopic | BatonError]
_Place = tuple[str, int, int, int]
"""Of a batch that was an end: topic, queue, first offset and next position."""


class TransactionServicer(pb_grpc.TransactionServiceServicer):
    """Serves TransactionService; see the proto.

    Args:
        check_first_ms: Age of a transaction at its first check.
        streams: The streams of checks, which `TransactionChecker` fills.
        changed: Called after a transaction has begun.
        require: Raises unless the caller may write to the topic of a transaction; None if
            authorization is off.
        tier: Fetches what the log has only in the object store; None without a store.
    """

    def __init__(  # noqa: PLR0913  the parts of a node
        self,
        appender: Appender,
        topics: TopicCache,
        streams: CheckStreams[pb.TransactionCheck],
        changed: Callable[[], None],
        *,
        check_first_ms: int,
        require: PermissionCheck | None = None,
        identity_of: Callable[[Context], str] = lambda _: "",
        tier: RemoteReads | None = None,
    ) -> None:
        self._tier = tier or LocalReads()
        self._appender, self._topics, self._changed = appender, topics, changed
        self._check_first_ms, self._streams = check_first_ms, streams
        self._require, self._identity_of = require, identity_of
        self._store, self._broker = appender.store, appender.broker
        self._open = appender.store.transactions.open
        self._ending: BatonError | None = None
        self._ending_number = 0

    async def Begin(self, request: pb.BeginRequest, context: Context) -> pb.BeginResponse:
        """See the proto."""
        validation.check_batches([item.batch for item in request.items])
        self._appender.flusher.check()
        owner = owner_of(self._identity_of(context))
        items = [_begin_item(item, owner) async for item in in_steps(request.items)]
        names = {item.checked.header.topic for item in items if isinstance(item, _BeginItem)}
        topics = await self._topics.find_all(names)
        outcomes = self._begin(items, self._topics.with_changes(topics))
        for item, outcome in zip(items, outcomes, strict=True):
            if isinstance(item, _BeginItem) and _is_new(outcome):
                self._appender.stream.transactions.add(
                    "opened", item.group, item.checked.header.topic
                )
        if stored := [one for one in outcomes if isinstance(one, StoreReceipt)]:
            self._changed()
            await self._appender.flusher.wait_until_safe(max(one.next_position for one in stored))
        return pb.BeginResponse(outcomes=[self._begun(one) for one in outcomes])

    async def End(self, request: pb.EndRequest, context: Context) -> pb.EndResponse:
        """See the proto."""
        if not request.items:
            raise InvalidArgument("items must have at least one item", facts={"field": "items"})
        validation.check_limit("items", len(request.items), ENDS_MAX)
        self._appender.flusher.check()
        items = [self._end_item(item) for item in request.items]
        run = _EndRun(await self._places(one for one in items if isinstance(one, _EndItem)))
        begin = 0
        while begin < len(items):
            if begin:
                await asyncio.sleep(0)
            begin = await self._end_some(begin, items, run, context)
        await self._appender.flusher.wait_until_safe(run.next_position)
        return pb.EndResponse(outcomes=[_ended(run.outcomes[i]) for i in range(len(items))])

    async def WatchChecks(
        self, request: pb.WatchChecksRequest, context: Context
    ) -> AsyncIterator[pb.WatchChecksResponse]:
        """See the proto."""
        check_group(request.group)
        arrived = asyncio.Event()
        stream = self._streams.open(request.group, partial(self._may_ask, context), arrived.set)
        ending_number = self._ending_number
        self._changed()
        try:
            yield pb.WatchChecksResponse()
            while True:
                await wait_until(arrived, SILENCE_MS_MAX)
                arrived.clear()
                if self._ending is not None and self._ending_number != ending_number:
                    raise self._ending
                for response in _responses(stream.take()):
                    yield response
        finally:
            self._streams.close(stream)

    async def ListTransactions(
        self, request: pb.ListTransactionsRequest, context: Context
    ) -> pb.ListTransactionsResponse:
        """See the proto."""
        validation.check_limit("transactions_max", request.transactions_max, LISTED_MAX)
        count_max = request.transactions_max or LISTED_DEFAULT
        if count_max < 1:
            raise InvalidArgument(
                f"transactions_max must not be negative, got {count_max}",
                facts={"field": "transactions_max"},
            )
        after_id = decode_id(request.after_id, self._broker) if request.after_id else -1
        if request.group:
            check_group(request.group)
        page = self._open.page(after_id, count_max, request.group)
        halves = read_first(self._appender, page)
        more = len(page) == count_max or len(halves) < len(page)
        page = page[: len(halves)]
        listed = [(one, halves[one.transaction_id]) for one in page]
        return pb.ListTransactionsResponse(
            transactions=[self._listed(*each) for each in listed if self._may_list(context, *each)],
            next_after_id=encode_id(page[-1].transaction_id, self._broker) if more else "",
            open_count=len(self._open),
        )

    def end_streams(self, error: BatonError) -> None:
        """End the present streams of checks with `error`; new ones are accepted."""
        self._ending = error
        self._ending_number += 1
        self._streams.end_all()

    def _may_ask(self, context: Context, topic: str) -> bool:
        if self._require is None:
            return True
        try:
            self._require(context, produce(topic))
        except BatonError:
            return False
        return True

    def _may_list(self, context: Context, _: OpenTransaction, half: HalfMessage | DataLoss) -> bool:
        if isinstance(half, DataLoss):
            return self._require is None
        return self._may_ask(context, read_header(half.batch).topic)

    # ---- begin

    def _begin(
        self, items: Sequence[_BeginItem | BatonError], topics: _Topics
    ) -> list[StoreReceipt | BatonError]:
        outcomes: dict[int, StoreReceipt | BatonError] = {}
        run = _BeginRun()
        for index, item in enumerate(items):
            try:
                if isinstance(item, BatonError):
                    raise item
                header = item.checked.header
                topic = topics[header.topic]
                if isinstance(topic, BatonError):
                    raise topic
                queue = check_queue(header.topic, topic, header.queue_id)
                if header.producer_id in run.producers:
                    outcomes |= self._write_halves(run)
                    run = _BeginRun()
                earlier = self._store.transactions.earlier(header, queue)
                if earlier is None:
                    check_takes(item.checked, topic)
                    self._open.check_group(item.group, run.new_groups)
                    run.add(index, item, self._half(item, queue))
                else:
                    outcomes[index] = earlier
            except BatonError as error:
                outcomes[index] = error
        outcomes |= self._write_halves(run)
        return [outcomes[index] for index in range(len(items))]

    def _half(self, item: _BeginItem, queue: QueueKey) -> HalfMessage:
        now_unix_ms = self._appender.clock.unix_ms()
        check_after_ms = item.check_after_ms or self._check_first_ms
        check_unix_s = seconds_after(now_unix_ms, check_after_ms)
        return HalfMessage(
            queue[0], FIRST, now_unix_ms, check_unix_s, 0, item.group, item.checked.batch
        )

    def _write_halves(self, run: _BeginRun) -> dict[int, StoreReceipt | BatonError]:
        results = self._appender.append([batch for _, batch in run.admitted], SYSTEM_TOPICS)
        return {index: one for (index, _), one in zip(run.admitted, results, strict=True)}

    def _begun(self, outcome: StoreReceipt | BatonError) -> pb.BeginOutcome:
        if isinstance(outcome, BatonError):
            self._appender.metrics.refused_batches.labels(outcome.reason).inc()
            return pb.BeginOutcome(error=error_to_pb(outcome))
        if outcome.duplicate:
            self._appender.metrics.duplicate_batches.inc()
        transaction_id = encode_id(outcome.position, self._broker)
        return pb.BeginOutcome(
            receipt=pb.BeginReceipt(transaction_id=transaction_id, duplicate=outcome.duplicate)
        )

    # ---- end

    def _end_item(self, item: pb.EndItem) -> _EndItem | BatonError:
        try:
            transaction_id = decode_id(item.transaction_id, self._broker)
        except BatonError as error:
            return error
        if item.state == pb.TRANSACTION_STATE_UNKNOWN:
            return _EndItem(transaction_id, item.transaction_id, None, item.topic)
        if item.state not in _OUTCOMES:
            return InvalidArgument(
                "state must be COMMITTED, ROLLED_BACK or UNKNOWN", facts={"field": "state"}
            )
        return _EndItem(transaction_id, item.transaction_id, _OUTCOMES[item.state], item.topic)

    async def _end_some(
        self, begin: int, items: Sequence[_EndItem | BatonError], run: _EndRun, context: Context
    ) -> int:
        """End transactions from item `begin` on; return the first item that is left.

        Their half messages are read together, so their size is bounded.
        """
        ids = (one.transaction_id for one in items[begin:] if isinstance(one, _EndItem))
        opened = {id_: one for id_ in ids if (one := self._open.get(id_)) is not None}
        run.halves = read_first(self._appender, list(opened.values()))
        left = opened.keys() - run.halves.keys()
        readable = [half for half in run.halves.values() if isinstance(half, HalfMessage)]
        topics = await self._topics.find_all({read_header(half.batch).topic for half in readable})
        # There is no await from here to the last write: nothing else ends these transactions.
        run.topics = self._topics.with_changes(topics)
        for index in range(begin, len(items)):
            item = items[index]
            if isinstance(item, BatonError):
                run.outcomes[index] = item
                continue
            if item.transaction_id in left:
                break
            if item.transaction_id in run.written:
                self._write_ends(run)
            try:
                self._end(index, item, run, context)
            except BatonError as error:
                run.outcomes[index] = error
        else:
            index = len(items)
        self._write_ends(run)
        return index

    def _end(self, index: int, item: _EndItem, run: _EndRun, context: Context) -> None:
        """End one transaction, or find its end.

        Raises:
            BatonError: nothing was changed.
        """
        half = run.halves.get(item.transaction_id)
        if half is None or item.transaction_id not in self._open:
            run.outcomes[index] = self._find_end(item, run, context)
            return
        if item.topic and read_header(_readable(half).batch).topic != item.topic:
            raise _not_found(item, f"of topic {item.topic}")
        if self._require is not None:
            self._require(context, produce(read_header(_readable(half).batch).topic))
        if item.outcome is None:
            self._appender.metrics.transaction_answers.labels("unknown").inc()
            run.outcomes[index] = pb.EndReceipt(state=pb.TRANSACTION_STATE_UNKNOWN)
        elif item.outcome is Outcome.COMMITTED:
            readable = _readable(half)
            run.commits.append((index, readable, self._commit(item, readable, run.topics)))
            run.written.add(item.transaction_id)
        else:
            run.rollbacks.append((index, RollbackMark(item.transaction_id)))
            run.written.add(item.transaction_id)

    def _commit(self, item: _EndItem, half: HalfMessage, topics: _Topics) -> CheckedBatch:
        header = read_header(half.batch)
        queue_id = open_queue(header, half.topic_id, topics[header.topic])
        batch = commit_batch(item.transaction_id, half, queue_id)
        return CheckedBatch(read_header(batch), batch)

    def _find_end(self, item: _EndItem, run: _EndRun, context: Context) -> pb.EndReceipt:
        """Return the receipt of an earlier end with the same outcome.

        Raises:
            TransactionEnded: it has another outcome.
            TransactionNotFound: its outcome is not known.
            PermissionDenied: the caller may not write to its topic, where that is known.
        """
        ended = self._store.transactions.ended.get(item.transaction_id)
        if ended is None:
            raise _not_found(item, "that is open; if it ended, its outcome is forgotten")
        place = run.places.get(item.transaction_id)
        if isinstance(place, BatonError):
            raise place
        topic, queue_id, first_offset, next_position = place or self._place_of(
            item.transaction_id, ended
        )
        if item.topic and topic not in ("", item.topic):
            raise _not_found(item, f"of topic {item.topic}")
        if topic and self._require is not None:
            self._require(context, produce(topic))
        run.next_position = max(run.next_position, next_position)
        if ended.outcome is not item.outcome:
            name = ended.outcome.name.lower()
            raise TransactionEnded(
                f"transaction {item.name} has ended: it was {name.replace('_', ' ')}",
                facts={"transaction_id": item.name, "outcome": name},
            )
        if ended.outcome is Outcome.ROLLED_BACK:
            return pb.EndReceipt(state=pb.TRANSACTION_STATE_ROLLED_BACK, duplicate=True)
        return pb.EndReceipt(
            state=pb.TRANSACTION_STATE_COMMITTED,
            queue_id=queue_id,
            first_offset=first_offset,
            duplicate=True,
        )

    async def _places(self, items: Iterable[_EndItem]) -> dict[int, _Place | BatonError]:
        """Return the places of the ends that are only in the object store, or why not."""
        places: dict[int, _Place | BatonError] = {}
        for id_ in {one.transaction_id for one in items}:
            ended = self._store.transactions.ended.get(id_)
            if ended is None or self._store.log.stored(ended.position) is None:
                continue
            try:
                places[id_] = await self._tier.reading(partial(self._place_of, id_, ended))
            except BatonError as error:
                places[id_] = error
        return places

    def _place_of(self, transaction_id: int, ended: EndedTransaction) -> _Place:
        """Return topic, queue, first offset and next position of the batch that was an end.

        The topic is empty, the queue 0 and the offset -1 if the log no longer has the batch. The
        topic is that of the message. If the batch is not the message, it is read from where the
        half message was stored first, and is empty if the disk no longer has that.
        """
        log = self._store.log
        if ended.position < log.first_position or log.is_purged(ended.position):
            return "", 0, -1, 0
        try:
            header = read_header(log.read(ended.position, HEAD_BYTES_MAX))
        except NotCached:
            raise
        except BatonError:
            return "", 0, -1, 0
        topic = header.topic
        if ended.outcome is not Outcome.COMMITTED:
            try:
                topic, _ = read_half_head(log, transaction_id)
            except DataLoss:
                topic = ""
        return topic, header.queue_id, header.first_offset, ended.position + header.length

    def _write_ends(self, run: _EndRun) -> None:
        """Write the commits and rollbacks of a run, and set their outcomes."""
        commits, rollbacks, run.commits, run.rollbacks = run.commits, run.rollbacks, [], []
        run.written.clear()
        topics = {
            name: topic if isinstance(topic, BatonError) else topic.for_deliveries()
            for name, topic in run.topics.items()
        }
        batches = [batch for _, _, batch in commits]
        stored = self._appender.append(batches, topics)
        self._appender.count_appended(batches, stored)
        for (index, half, batch), outcome in zip(commits, stored, strict=True):
            if isinstance(outcome, StoreReceipt):
                run.next_position = max(run.next_position, outcome.next_position)
                self._appender.metrics.ended_transactions.labels("committed").inc()
                self._appender.stream.transactions.add("committed", half.group, batch.header.topic)
                run.outcomes[index] = pb.EndReceipt(
                    state=pb.TRANSACTION_STATE_COMMITTED,
                    queue_id=batch.header.queue_id,
                    first_offset=outcome.first_offset,
                )
            else:
                run.outcomes[index] = outcome
        if not rollbacks:
            return
        marks = checked(encode_marks([mark for _, mark in rollbacks]))
        (outcome,) = self._appender.append([marks], SYSTEM_TOPICS)
        if isinstance(outcome, StoreReceipt):
            run.next_position = max(run.next_position, outcome.next_position)
            self._appender.metrics.ended_transactions.labels("rolled_back").inc(len(rollbacks))
            for _, mark in rollbacks:
                group, topic = _names(run.halves[mark.transaction_id])
                self._appender.stream.transactions.add("rolled_back", group, topic)
        for index, _ in rollbacks:
            run.outcomes[index] = (
                pb.EndReceipt(state=pb.TRANSACTION_STATE_ROLLED_BACK)
                if isinstance(outcome, StoreReceipt)
                else outcome
            )

    def _listed(self, one: OpenTransaction, half: HalfMessage | DataLoss) -> pb.OpenTransaction:
        listed = pb.OpenTransaction(
            transaction_id=encode_id(one.transaction_id, self._broker),
            group=one.group,
            checks=one.checks,
            next_check_unix_ms=one.check_unix_s * 1_000,
            live_producers=self._streams.count(one.group),
        )
        try:
            readable = _readable(half)
            header = read_header(readable.batch)
            (record,) = decode_records(readable.batch, header, range(1))
        except BatonError as error:
            listed.problem = error.message
            return listed
        listed.topic, listed.queue_id = header.topic, header.queue_id
        listed.keys.extend(record.keys)
        listed.begin_unix_ms = readable.begin_unix_ms
        return listed


def encode_id(transaction_id: int, broker: str) -> str:
    """Return the id of a transaction as clients know it: the broker, and the position in hex."""
    return f"{broker}-{transaction_id:x}"


def decode_id(transaction_id: str, broker: str) -> int:
    """Inverse of `encode_id`.

    Raises:
        InvalidArgument: it is not the id of a transaction.
        WrongBroker: it is the id of a transaction of another broker.
    """
    found = _ID.fullmatch(transaction_id)
    if found is None or (number := int(found[2], 16)) >= 1 << 63:
        raise InvalidArgument(
            f"{transaction_id[:100]!r} is not the id of a transaction",
            remedy="Use the id of the transaction unchanged.",
            facts={"field": "transaction_id"},
        )
    if found[1] != broker:
        raise WrongBroker(
            f"the request is for broker {found[1]}, this is broker {broker}",
            facts={"asked": found[1], "actual": broker},
        )
    return number


def seconds_after(now_unix_ms: int, wait_ms: int) -> int:
    """Return a time in Unix seconds that is at least `wait_ms` after now."""
    return -(-(now_unix_ms + wait_ms) // 1_000)


def read_by_position(
    appender: Appender, transactions: Sequence[OpenTransaction]
) -> dict[int, HalfMessage | DataLoss]:
    """Read half messages of transactions in the order of the log; return them by id.

    Those that are left once READ_BYTES_MAX bytes are read are not among them.
    """
    ordered = sorted(transactions, key=lambda one: one.position)
    halves = read_halves(appender.store.log, [one.position for one in ordered])
    found: dict[int, HalfMessage | DataLoss] = {}
    size = 0
    for one, half in zip(ordered, halves, strict=False):
        found[one.transaction_id] = half
        size += len(half.batch) if isinstance(half, HalfMessage) else 0
        if size > READ_BYTES_MAX:
            break
    return found


def read_first(
    appender: Appender, transactions: Sequence[OpenTransaction]
) -> dict[int, HalfMessage | DataLoss]:
    """As `read_by_position`, but return those of the first transactions only; at least of one."""
    count = len(transactions)
    while count:
        halves = read_by_position(appender, transactions[:count])
        first = list(takewhile(halves.__contains__, (one.transaction_id for one in transactions)))
        if first:
            return {id_: halves[id_] for id_ in first}
        count = min(count // 2, len(halves))  # the first one is behind others in the log
    return {}


@dataclass(frozen=True, slots=True)
class _BeginItem:
    """A transaction to begin; with `check_after_ms` 0 its first check is that of the node."""

    group: str
    checked: CheckedBatch
    check_after_ms: int


@dataclass(slots=True)
class _BeginRun:
    """Half messages that are written together: at most one of each producer.

    Attributes:
        new_groups: Their producer groups that have no open transaction.
    """

    admitted: list[tuple[int, CheckedBatch]] = field(default_factory=list)
    producers: set[int] = field(default_factory=set)
    new_groups: set[str] = field(default_factory=set)

    def add(self, index: int, item: _BeginItem, half: HalfMessage) -> None:
        header = item.checked.header
        self.admitted.append((index, checked(encode_half(half), header.owner)))
        if header.producer_id:
            self.producers.add(header.producer_id)


@dataclass(frozen=True, slots=True)
class _EndItem:
    """An end; without an outcome it only says that the producer does not know yet."""

    transaction_id: int
    name: str
    outcome: Outcome | None
    topic: str


@dataclass(slots=True)
class _EndRun:
    """Ends of one request.

    Attributes:
        places: Where the ends are that are only in the object store.
        halves, topics: Those of the transactions that are ended together.
        written: Transactions of `commits` and `rollbacks`, which are not written yet.
        next_position: Position up to which the log must be safe before the response.
    """

    places: Mapping[int, _Place | BatonError]
    halves: Mapping[int, HalfMessage | DataLoss] = field(default_factory=dict)
    topics: _Topics = field(default_factory=dict)
    commits: list[tuple[int, HalfMessage, CheckedBatch]] = field(default_factory=list)
    rollbacks: list[tuple[int, RollbackMark]] = field(default_factory=list)
    written: set[int] = field(default_factory=set)
    outcomes: dict[int, pb.EndReceipt | BatonError] = field(default_factory=dict)
    next_position: int = 0


def _begin_item(item: pb.BeginItem, owner: int) -> _BeginItem | BatonError:
    try:
        group = check_group(item.group)
        checked_batch = check_no_outputs(check(item.batch, owner))
        if not 0 <= item.check_after_ms <= CHECK_AFTER_MS_MAX:
            raise InvalidArgument(
                f"check_after_ms must be 0 to {CHECK_AFTER_MS_MAX}, got {item.check_after_ms}",
                facts={"field": "check_after_ms", "limit": CHECK_AFTER_MS_MAX},
            )
        return _BeginItem(group, checked_batch, item.check_after_ms)
    except BatonError as error:
        return error


def _names(half: HalfMessage | DataLoss) -> tuple[str, str]:
    """Return producer group and topic of a half message; empty if it can't be read."""
    if isinstance(half, DataLoss):
        return "", ""
    return half.group, read_header(half.batch).topic


def _is_new(outcome: StoreReceipt | BatonError) -> bool:
    return isinstance(outcome, StoreReceipt) and not outcome.duplicate


def _not_found(item: _EndItem, what: str) -> TransactionNotFound:
    return TransactionNotFound(
        f"there is no transaction {item.name} {what}", facts={"transaction_id": item.name}
    )


def _readable(half: HalfMessage | DataLoss) -> HalfMessage:
    if isinstance(half, DataLoss):
        raise half
    return half


def _ended(outcome: pb.EndReceipt | BatonError) -> pb.EndOutcome:
    if isinstance(outcome, BatonError):
        return pb.EndOutcome(error=error_to_pb(outcome))
    return pb.EndOutcome(receipt=outcome)


def _responses(checks: Sequence[pb.TransactionCheck]) -> list[pb.WatchChecksResponse]:
    """Return the responses with these checks; one without checks if there are none."""
    responses = [pb.WatchChecksResponse()]
    size = 0
    for one in checks:
        if size and size + len(one.batch) > RESPONSE_BYTES_MAX:
            responses.append(pb.WatchChecksResponse())
            size = 0
        responses[-1].checks.append(one)
        size += len(one.batch)
    return responses
