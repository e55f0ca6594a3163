"""The servicer of QueryService: looks up messages by offset, time, key and id."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio

from baton.storage.v1 import query_service_pb2 as pb
from baton.storage.v1 import query_service_pb2_grpc as pb_grpc
from batonmq._core.names import check_broker, check_topic
from batonmq._core.records import KEYS_BYTES_MAX
from batonmq.errors import (
    DataLoss,
    InvalidArgument,
    LimitExceeded,
    MessageNotFound,
    NotLeader,
    OffsetAheadOfLog,
    OffsetOutOfRange,
    TopicNotFound,
    WrongBroker,
)
from batonmq_server.runtime.access.guard import PermissionCheck
from batonmq_server.runtime.access.permissions import consume
from batonmq_server.storage import validation
from batonmq_server.storage.core.checks import check_queue, check_readable
from batonmq_server.storage.core.keyindex import DamagedRun, RunExtent
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.query import (
    KeyMatches,
    MessageMatch,
    MessageQueries,
    SearchProbe,
    TimeWindow,
)
from batonmq_server.storage.core.queue_reader import ReadResult, ReadSpec
from batonmq_server.storage.core.store import MessageStore, check_covered
from batonmq_server.storage.damage_tracker import DamageTracker
from batonmq_server.storage.node_role import NodeRole, StandaloneRole
from batonmq_server.storage.tier_reader import LocalReads, RemoteReads
from batonmq_server.storage.topic_cache import TopicCache

FOUND_MAX = 1_000
FOUND_DEFAULT = 64
FOUND_BYTES_MAX = 4 * 1024 * 1024
POSITION_MAX = (1 << 63) - 1
_UNBOUNDED_MS = 1 << 62

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class MessageId:
    """The place of a message, as its id says: broker, position of its batch, index."""

    broker: str
    position: int
    index: int

    @classmethod
    def parse(cls, text: str) -> MessageId:
        """Parse a message id, as a producer's receipt shows it.

        Raises:
            InvalidArgument: `text` is not a message id.
        """
        broker, *numbers = text.rsplit("-", 2)
        try:
            check_broker(broker)
            position, index = (_hex(number) for number in numbers)
        except ValueError as error:
            raise InvalidArgument(
                f"{text[:140]!r} is not a message id",
                remedy="Use the id of a producer's receipt: broker-position-index.",
                facts={"field": "message_id"},
            ) from error
        return cls(broker, position, index)


async def _no_repair(_: QueueKey, __: int, error: DataLoss) -> None:
    raise error


async def _no_key_repair(_: RunExtent) -> bool:
    return False


class QueryServicer(pb_grpc.QueryServiceServicer):
    """Serves QueryService; see the proto.

    Args:
        broker: Broker name: the replica set, or a node without replicas.
        role: Role of this node: a follower may lag behind the leader.
        require: Raises unless the caller may read the topic of a message that it names by its id;
            None if authorization is off.
        repair: Rebuilds the index that a failed read at an offset uses; raises an error if that is
            not possible.
        repair_keys: Rebuilds a damaged run of the key index; returns whether it could.
        tier: Reads segments that are only in the object store.
    """

    def __init__(  # noqa: PLR0913  the parts of a node
        self,
        broker: str,
        store: MessageStore,
        topics: TopicCache,
        damage: DamageTracker,
        role: NodeRole | None = None,
        *,
        require: PermissionCheck | None = None,
        repair: Callable[[QueueKey, int, DataLoss], Awaitable[None]] = _no_repair,
        repair_keys: Callable[[RunExtent], Awaitable[bool]] = _no_key_repair,
        tier: RemoteReads | None = None,
    ) -> None:
        self._broker, self._store, self._topics, self._damage = broker, store, topics, damage
        self._role, self._require = role or StandaloneRole(store), require
        self._repair, self._repair_keys = repair, repair_keys
        self._tier = tier or LocalReads()
        self._queries = MessageQueries(store)

    async def SearchOffset(
        self, request: pb.SearchOffsetRequest, context: Context
    ) -> pb.SearchOffsetResponse:
        """See the proto."""
        key = await self._queue(request, readable=False)
        probe = SearchProbe()
        while True:
            try:
                offset = await self._tier.reading(
                    lambda: self._queries.search_offset(key, request.unix_ms, probe)
                )
            except DataLoss as error:
                await self._rebuild(key, probe.offset, error)
            else:
                return pb.SearchOffsetResponse(offset=offset)

    async def Read(self, request: pb.ReadRequest, context: Context) -> pb.ReadResponse:
        """See the proto."""
        spec = validation.parse_read(request)
        key = await self._queue(request, readable=True)
        if self._role.is_follower:
            topic = await self._topics.find(request.queue.topic)
            whole = self._role.has_confirmed
            check_covered(self._store, topic, key, spec.offset, has_confirmed=whole)
        reading = await self._read(key, spec)
        if reading is None and (outdated := self._role.outdated()) is not None:
            raise outdated
        visible = self._store.offsets(key)
        return pb.ReadResponse(
            batches=reading.batches if reading else (),
            next_offset=reading.next_offset if reading else request.offset,
            queue_first_offset=visible.first_offset,
            queue_next_offset=visible.next_offset,
            next_node_id="" if reading else self._role.next_read_node(0),
        )

    async def FindByKey(
        self, request: pb.FindByKeyRequest, context: Context
    ) -> pb.FindByKeyResponse:
        """See the proto."""
        check_topic(request.topic)
        _check_key(request.key)
        validation.check_limit("messages_max", request.messages_max, FOUND_MAX)
        topic = await self._topics.find(request.topic)
        window = TimeWindow(request.from_unix_ms, request.to_unix_ms or _UNBOUNDED_MS)
        matches = await self._find(topic.topic_id, request.key, window, request.messages_max)
        return pb.FindByKeyResponse(messages=map(_message, matches.messages), more=matches.more)

    async def GetMessage(
        self, request: pb.GetMessageRequest, context: Context
    ) -> pb.GetMessageResponse:
        """See the proto."""
        spec = MessageId.parse(request.message_id)
        if spec.broker != self._broker:
            raise WrongBroker(
                f"the request is for broker {spec.broker}, this is broker {self._broker}",
                facts={"asked": spec.broker, "actual": self._broker},
            )
        with self._reporting_damage():
            header = await self._tier.reading(
                lambda: self._queries.header(spec.position, spec.index)
            )
        if self._require is not None:
            self._require(context, consume(header.topic))
        try:
            topic = await self._topics.find(header.topic)
        except TopicNotFound:
            topic = None
        if topic is None or topic.topic_id != header.topic_id:
            raise MessageNotFound(
                f"topic {header.topic} of message {request.message_id} was deleted"
            )
        with self._reporting_damage():
            message = await self._tier.reading(lambda: self._queries.message(header, spec.index))
        return pb.GetMessageResponse(message=_message(message))

    @contextmanager
    def _reporting_damage(self) -> Iterator[None]:
        try:
            yield
        except DataLoss as error:
            self._damage.report_error(error)
            raise

    async def _queue(
        self, request: pb.SearchOffsetRequest | pb.ReadRequest, *, readable: bool
    ) -> QueueKey:
        if not request.HasField("queue"):
            raise InvalidArgument("queue is required", facts={"field": "queue"})
        queue = validation.check_queue_name(request.queue, self._broker)
        topic = await self._topics.find(queue.topic)
        if readable:
            check_readable(queue.topic, topic)
        return check_queue(queue.topic, topic, queue.queue_id)

    async def _read(self, key: QueueKey, spec: ReadSpec) -> ReadResult | None:
        while True:
            try:
                return await self._tier.reading(lambda: self._store.read(key, spec))
            except OffsetAheadOfLog as error:
                if self._role.is_follower:
                    raise NotLeader(
                        f"this follower lags behind the leader: {error.message}",
                        retry_after_ms=100,
                    ) from error
                raise OffsetOutOfRange(error.message, facts=error.facts) from error
            except DataLoss as error:
                await self._rebuild(key, spec.offset, error)

    async def _rebuild(self, key: QueueKey, offset: int, error: DataLoss) -> None:
        """Rebuild the index that a failed read uses, so that the read may be repeated.

        Raises:
            DataLoss: that is not possible.
        """
        with self._reporting_damage():
            await self._repair(key, offset, error)

    async def _find(
        self, topic_id: int, key: str, window: TimeWindow, messages_max: int
    ) -> KeyMatches:
        rebuilt = set[RunExtent]()
        while True:
            try:
                return await self._tier.reading(
                    lambda: self._queries.find(
                        topic_id,
                        key,
                        window,
                        messages_max=messages_max or FOUND_DEFAULT,
                        bytes_max=FOUND_BYTES_MAX,
                    )
                )
            except DamagedRun as error:
                if error.extent not in rebuilt and await self._repair_keys(error.extent):
                    rebuilt.add(error.extent)
                    continue
                lost = DataLoss(
                    f"{error}, and can't be rebuilt from the log",
                    remedy="Stop the node and run: baton fsck DIR --repair.",
                )
                self._damage.report_error(lost)
                raise lost from error
            except DataLoss as error:
                self._damage.report_error(error)
                raise


def _message(match: MessageMatch) -> pb.StoredMessage:
    return pb.StoredMessage(batch=match.batch, index=match.index)


def _check_key(key: str) -> None:
    raw = key.encode()
    if len(raw) > KEYS_BYTES_MAX:
        raise LimitExceeded(
            f"key has {len(raw)} bytes; the limit is {KEYS_BYTES_MAX}",
            facts={"field": "key", "limit": KEYS_BYTES_MAX, "actual": len(raw)},
        )
    if raw.split() != [raw]:  # a producer splits keys at white space
        raise InvalidArgument(
            f"key must have at least one character and no white space, got {key!r}",
            facts={"field": "key"},
        )


def _hex(text: str) -> int:
    """Parse a number as a receipt shows it: lower case hex without a sign or leading zeros.

    Raises:
        ValueError: it is not such a number, or too large.
    """
    number = int(text, 16)
    if f"{number:x}" != text or number > POSITION_MAX:
        raise ValueError(text)
    return number
