"""Traces a message: where it and its copies are stored, and its state for each group.

Storage has the message and its copies in retry and dead-letter topics, offsets has the owners of
the queues and the acknowledgements, and the nameserver has the subscriptions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq._common.aio import without_group
from batonmq._consumer.moved_group import raise_if_moved
from batonmq._core.dead_letters import FORMER_ATTEMPTS, REDRIVE_ID, REDRIVEN_BY, REDRIVEN_FROM
from batonmq._core.message_trace import (
    CurrentProgress,
    MessageState,
    MessageTrace,
    trace_message,
)
from batonmq._core.outputs import DEAD_LETTER_NUMBER, OutputOrigin
from batonmq._core.queues import QueueRef
from batonmq._core.retries import (
    ATTEMPTS,
    CLIENT,
    ERROR,
    REASON,
    Origin,
    dead_letter_topic,
    origin_of,
    retry_topic,
    with_origin_key,
)
from batonmq._core.subscription import parse_filter
from batonmq.admin.admin import Admin
from batonmq.admin.group_reports import Group
from batonmq.admin.holds import queue_holds
from batonmq.admin.message_queries import MessageQueries, StoredMessage
from batonmq.admin.reports import queue_to_pb
from batonmq.errors import (
    BatonError,
    MessageNotFound,
    OffsetOutOfRange,
    Retry,
    TopicNotFound,
    Unreachable,
)

COPIES_MAX = 1_000
QUERIES_PER_CALL = 1_024


@dataclass(frozen=True, slots=True)
class MessageCopy:
    """The message, or a copy of it, in one queue, as one group sees it.

    Attributes:
        kind: original; retry: sent back for another attempt; dead: a dead letter; redriven: sent
            again by an operator.
        reason: Reason of the previous failed attempt, with its `error` text and the `client_id` of
            its consumer; empty for an original.
        attempts: Previous attempts since the message was sent or last redriven.
        former_attempts: Attempts before the last redrive.
        replay_id: Id of the redrive, by the operator `redriven_by`.
        trace: Deliveries of the message in this queue; None if the group has no progress there.
        token: The current fencing token of the queue.
        owner: The current owner of the queue; None if it has none.
    """

    kind: str
    message_id: str
    queue: QueueRef
    offset: int
    store_unix_ms: int
    reason: str
    error: str
    client_id: str
    attempts: int
    former_attempts: int
    replay_id: str
    redriven_by: str
    redriven_from: str
    trace: MessageTrace | None
    token: int | None
    owner: str | None


@dataclass(frozen=True, slots=True)
class GroupTrace:
    """The trace of a message for one group.

    Attributes:
        expression: Filter expression of the group for the topic; None if it does not subscribe.
        passes: Whether the message passes the filter; None without an expression.
        recorded: Whether deliveries of the group are recorded, because its queues are owned.
        copies: The message and its copies, oldest first.
        state: acked: acknowledged; in_flight, maybe_in_flight, waiting: see `MessageState`;
            retry_or_done: acknowledged, and either handled or scheduled for its next attempt,
            which is not visible before its time; dead; filtered; not_subscribed; local: the members
            store their own progress; unknown.
    """

    group: str
    model: str
    recorded: bool
    expression: str | None
    passes: bool | None
    copies: tuple[MessageCopy, ...]
    state: str


@dataclass(frozen=True, slots=True)
class TracedInput:
    """The input from which a transformer has made the message.

    Attributes:
        group: Group of the transformer.
        queue: Queue of the input; its topic is empty if it was deleted.
        offset: Offset of the input.
        number: Number of the message among the outputs of the input, from 0; None for its dead
            letter.
        message_id: Id of the input; None if it is not stored any more.
    """

    group: str
    queue: QueueRef
    offset: int
    number: int | None
    message_id: str | None


@dataclass(frozen=True, slots=True)
class TraceReport:
    """The trace of a message for all groups.

    Attributes:
        message: The original message; if it is no longer stored, the copy that was traced.
        origin: Queue, offset and id of the original message.
        kept: Whether the original message is still stored; None if its broker does not answer, or
            was removed.
        problems: Errors of the parts of the trace that failed.
        made_from: The input from which a transformer has made the message; None if none has.
    """

    message: StoredMessage
    origin: Origin
    kept: bool | None
    groups: tuple[GroupTrace, ...]
    problems: tuple[str, ...]
    made_from: TracedInput | None = None


class MessageTracer:
    """Traces messages. Failures raise classes of `batonmq.errors`.

    Args:
        admin: Client of the cluster; the caller closes it.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin, self._queries = admin, MessageQueries(admin)
        self._problems: list[str] = []

    async def trace(self, message: StoredMessage) -> TraceReport:
        """Trace a message; a copy is traced to its original.

        Raises:
            Unreachable: The nameserver or offsets does not answer.
        """
        self._problems = []
        message, origin, kept = await self._original(message)
        all_topics = await self._admin.list_topics()
        topics = {topic.name for topic in all_topics}
        made_from = None
        if message.made_from is not None:
            names = {topic.topic_id: topic.name for topic in all_topics}
            made_from = await self._input(message.made_from, names)
        groups = await self._admin.list_groups()
        progress_by_queue = await self._progress(groups, [origin.queue])
        related = [
            group
            for group in groups
            if (group.name, origin.queue) in progress_by_queue
            or _expression(group, origin) is not None
        ]
        with without_group():
            async with asyncio.TaskGroup() as tasks:
                calls = [
                    tasks.create_task(self._group(group, message, origin, kept, topics))
                    for group in related
                ]
        traces = tuple(task.result() for task in calls)
        return TraceReport(message, origin, kept, traces, tuple(self._problems), made_from)

    async def _input(self, origin: OutputOrigin, topics: Mapping[int, str]) -> TracedInput:
        """Look up the input of an output."""
        source = origin.source
        queue = QueueRef(topics.get(source.topic_id, ""), source.broker, source.queue_id)
        message_id = None
        if queue.topic:
            try:
                found = await self._queries.at_offset(queue, origin.offset)
                message_id = found.message_id if found.offset == origin.offset else None
            except (MessageNotFound, OffsetOutOfRange):
                message_id = None
            except BatonError as error:
                self._problems.append(f"input {queue}@{origin.offset}: {error.message}")
        number = None if origin.number == DEAD_LETTER_NUMBER else origin.number
        return TracedInput(source.group, queue, origin.offset, number, message_id)

    async def _original(self, message: StoredMessage) -> tuple[StoredMessage, Origin, bool | None]:
        origin_attempts = origin_of(message.properties)
        if origin_attempts is None:
            return message, Origin(message.queue, message.offset, message.message_id), True
        origin, _ = origin_attempts
        try:
            return await self._queries.message(origin.message_id), origin, True
        except MessageNotFound:
            return message, origin, False
        except Unreachable as error:  # the copies are on other brokers, perhaps
            self._problems.append(f"original {origin.message_id}: {error.reason}: {error.message}")
            return message, origin, None

    async def _group(
        self,
        group: Group,
        message: StoredMessage,
        origin: Origin,
        kept: bool | None,
        topics: set[str],
    ) -> GroupTrace:
        copies = await self._copies(group, message, origin, topics)
        if kept:
            copies.append(_copy("original", message))
        copies.sort(key=lambda each: each.store_unix_ms)
        if group.model != "broadcasting":
            queues = [each.queue for each in copies]
            progress_by_queue = await self._progress([group], queues)
            copies = [
                await self._with_deliveries(
                    each, group, progress_by_queue.get((group.name, each.queue))
                )
                for each in copies
            ]
        expression, passes = _expression(group, origin), None
        if expression is not None and kept:
            try:
                passes = parse_filter(expression).accepts(
                    message.tag, message.keys, message.properties
                )
            except BatonError as error:
                self._problems.append(f"group {group.name}: {error.message}")
        reads_retries = retry_topic(group.name) in {each.topic for each in group.subscriptions}
        trace = GroupTrace(
            group=group.name,
            model=group.model,
            recorded=group.model != "broadcasting" and group.ownership == "on",
            expression=expression,
            passes=passes,
            copies=tuple(copies),
            state="",
        )
        return replace(trace, state=_state(trace, reads_retries=reads_retries))

    async def _copies(
        self, group: Group, message: StoredMessage, origin: Origin, topics: set[str]
    ) -> list[MessageCopy]:
        """Return the group's copies of the message: retries, dead letters and redriven copies."""
        kinds = {
            retry_topic(group.name): "retry",
            dead_letter_topic(group.name): "dead",
            origin.queue.topic: "redriven",
        }
        copies = []
        for topic, kind in kinds.items():
            if topic in topics:
                for stored in await self._found(topic, message, origin):
                    redriven = REDRIVE_ID in stored.properties and kind != "dead"
                    again = redriven and stored.properties.get(ATTEMPTS, "0") == "0"
                    if again or kind != "redriven":
                        copies.append(_copy("redriven" if again else kind, stored))
        return copies

    async def _found(
        self, topic: str, message: StoredMessage, origin: Origin
    ) -> list[StoredMessage]:
        """Copies of a message in a topic: they have its id as a key, if there was room for it."""
        wanted = origin.message_id
        has_room = with_origin_key(message.keys, origin)[-1:] == (wanted,)
        key = wanted if has_room else message.keys[0]
        try:
            matches = await self._queries.with_key(topic, key, count_max=COPIES_MAX)
        except TopicNotFound:
            return []
        except BatonError as error:
            self._problems.append(f"{topic}: {error.reason}: {error.message}")
            return []
        if matches.more:
            self._problems.append(f"{topic}: there may be more copies than the newest {COPIES_MAX}")
        return [
            each
            for each in matches.messages
            if each.message_id != wanted and _copied_from(each) == wanted
        ]

    # ---- offsets

    async def _progress(
        self, groups: Iterable[Group], queues: Sequence[QueueRef]
    ) -> dict[tuple[str, QueueRef], CurrentProgress]:
        """Return the progress of groups on queues; without queues that have none."""
        progress_by_key = {}
        for group in groups:
            distinct = list(dict.fromkeys(queues))
            for start in range(0, len(distinct), QUERIES_PER_CALL):
                part = distinct[start : start + QUERIES_PER_CALL]
                for queue, progress in (await self._progress_of(group, part)).items():
                    progress_by_key[group.name, queue] = progress
        return progress_by_key

    async def _progress_of(
        self, group: Group, queues: Sequence[QueueRef]
    ) -> dict[QueueRef, CurrentProgress]:
        request = pb.QueryRequest(queues=[_key(group.name, queue) for queue in queues])

        async def ask(limit_s: float) -> pb.QueryResponse:
            stub = await self._admin.directory.offsets(group.name)
            answer = await stub.Query(request, timeout=limit_s)
            raise_if_moved(answer.outcomes)
            return answer

        outcomes = (await self._admin.ask(ask)).outcomes
        return {
            queue: _current_progress(outcome.progress, owned=group.ownership == "on")
            for queue, outcome in zip(queues, outcomes, strict=True)
            if outcome.HasField("progress")
        }

    async def _with_deliveries(
        self, copy: MessageCopy, group: Group, progress: CurrentProgress | None
    ) -> MessageCopy:
        if progress is None:
            return copy
        try:
            holds = await queue_holds(self._admin, group.name, copy.queue)
        except BatonError as error:
            if error.retry is not Retry.NEVER:
                raise
            self._problems.append(f"holds of {copy.queue}: {error.reason}: {error.message}")
            holds = []
        story = trace_message(holds, progress, copy.offset, copy.store_unix_ms)
        return replace(copy, trace=story, token=progress.token, owner=progress.client_id)


def _state(trace: GroupTrace, *, reads_retries: bool) -> str:
    """Return the state of the message for a group, from its newest copy."""
    if trace.model == "broadcasting":
        return "local"
    last = trace.copies[-1] if trace.copies else None
    if last is not None and last.kind == "dead":
        return "dead"
    if trace.passes is False and (last is None or last.kind == "original"):
        return "filtered"
    if last is None or last.trace is None:
        return "not_subscribed" if trace.expression is None else "waiting"
    if last.trace.state is MessageState.ACKED and reads_retries:
        return "retry_or_done"
    return last.trace.state.value


def _copied_from(message: StoredMessage) -> str | None:
    """Return the id of the original of a copy; None if the message is not a copy."""
    origin_attempts = origin_of(message.properties)
    if origin_attempts is not None:
        return origin_attempts[0].message_id
    return message.keys[-1] if REDRIVEN_FROM in message.properties and message.keys else None


def _copy(kind: str, message: StoredMessage) -> MessageCopy:
    added = message.properties if kind != "original" else {}
    return MessageCopy(
        kind=kind,
        message_id=message.message_id,
        queue=message.queue,
        offset=message.offset,
        store_unix_ms=message.store_unix_ms,
        reason=added.get(REASON, ""),
        error=added.get(ERROR, ""),
        client_id=added.get(CLIENT, ""),
        attempts=_number(added.get(ATTEMPTS, "")),
        former_attempts=_number(added.get(FORMER_ATTEMPTS, "")),
        replay_id=added.get(REDRIVE_ID, ""),
        redriven_by=added.get(REDRIVEN_BY, ""),
        redriven_from=added.get(REDRIVEN_FROM, ""),
        trace=None,
        token=None,
        owner=None,
    )


def _expression(group: Group, origin: Origin) -> str | None:
    topic = origin.queue.topic
    return next((each.expression for each in group.subscriptions if each.topic == topic), None)


def _current_progress(progress: pb.Progress, *, owned: bool) -> CurrentProgress:
    acked = [(each.first_offset, each.next_offset) for each in progress.acked]
    held = progress.HasField("holder") and not progress.closed
    return CurrentProgress(
        committed_offset=progress.committed_offset,
        acked=acked,
        acked_complete=progress.acked_range_count <= len(acked),
        client_id=progress.holder.client_id if held else None,
        token=progress.token,
        owned=owned,
    )


def _key(group: str, queue: QueueRef) -> queue_pb2.GroupQueue:
    return queue_pb2.GroupQueue(group=group, queue=queue_to_pb(queue))


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and text.isascii() else 0
