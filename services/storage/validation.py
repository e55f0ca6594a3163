"""Parses requests: checks names and limits as the proto states them, and fills in defaults."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.storage.v1 import query_service_pb2 as query_pb
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.topic_epochs import UNKNOWN_EPOCH
from batonmq._core.names import check_broker, check_group, check_offsets_set, check_topic
from batonmq._core.subscription import SqlFilter, parse_filter
from batonmq.errors import InvalidArgument, LimitExceeded, WrongBroker
from batonmq_server.storage.core.queue_reader import ReadSpec
from batonmq_server.storage.core.tag_filter import HashFilter
from batonmq_server.storage.delivery_advance import DeliveryAdvance
from batonmq_server.storage.long_polls import QueueOwner

APPEND_BATCHES_MAX = 1_024
APPEND_BYTES_MAX = 32 * 1024 * 1024
PULL_BYTES_MAX = 4 * 1024 * 1024
PULL_BYTES_DEFAULT = 1024 * 1024
PULL_MESSAGES_MAX = 65_535
PULL_MESSAGES_DEFAULT = 1_000
HOLD_MS_MAX = 30_000
DELIVERY_HOLD_MS = 15_000
COMMANDS_MAX = 10_000
QUERY_QUEUES_MAX = 10_000
QUERY_COUNTS_MAX = 100_000
QUEUE_ID_MAX = 65_535


class ParsedPull(NamedTuple):
    """A pull request with valid fields.

    Attributes:
        progress: Acknowledgements for offsets, which checks them; None for none.
        client_id: Client id as the caller states it: for events only, not verified.
        received_offset: Position of the caller, stated under `offsets_epoch`; None for none.
        advance: Advance of the delivery by stream; None for a pull.
    """

    owner: QueueOwner
    spec: ReadSpec
    hold_ms: int
    offsets_epoch: int
    subscription_generation: int
    progress: offsets_pb.Acks | None
    offsets_set: str
    client_id: str = ""
    received_offset: int | None = None
    advance: DeliveryAdvance | None = None


class ParsedCredit(NamedTuple):
    """What a delivery may send since its start, and what its caller states.

    Attributes:
        progress, offsets_epoch, offsets_set, received_offset: As in `ParsedPull`.
    """

    number: int
    messages_limit: int
    bytes_limit: int
    progress: offsets_pb.Acks | None
    offsets_epoch: int
    offsets_set: str
    received_offset: int | None


def parse_batches(request: pb.AppendRequest, *, replicated: bool = False) -> list[bytes]:
    """Return the batches of a request; each of them is still to be checked.

    Raises:
        InvalidArgument: there is no batch, or this node can't reach the requested durability.
        LimitExceeded: too many batches, or too many bytes.
    """
    batches = list(request.batches)
    check_batches(batches)
    if request.durability not in (
        pb.DURABILITY_UNSPECIFIED,
        pb.DURABILITY_MEMORY,
        pb.DURABILITY_FSYNCED,
        pb.DURABILITY_REPLICATED if replicated else pb.DURABILITY_UNSPECIFIED,
    ):
        raise InvalidArgument(
            f"a node without replicas can't reach durability {request.durability}",
            facts={"field": "durability"},
        )
    return batches


def parse_topic_epochs(request: pb.AppendRequest) -> Sequence[int | None]:
    """Return the epoch of the topic of each batch; None if the sender does not say it.

    Raises:
        InvalidArgument: there is another number of epochs than of batches.
    """
    epochs, count = request.topic_epochs, len(request.batches)
    if not epochs:
        return (None,) * count
    if len(epochs) != count:
        raise InvalidArgument(
            f"topic_epochs must have one epoch per batch or none, got {len(epochs)} for {count}",
            facts={"field": "topic_epochs"},
        )
    return [None if epoch == UNKNOWN_EPOCH else epoch for epoch in epochs]


def check_batches(batches: Sequence[bytes]) -> None:
    """Check the number of batches of a request and their total length.

    Raises:
        InvalidArgument: there is no batch.
        LimitExceeded: too many batches, or too many bytes.
    """
    if not batches:
        raise InvalidArgument("batches must have at least one batch", facts={"field": "batches"})
    check_limit("batches", len(batches), APPEND_BATCHES_MAX)
    check_limit("bytes", sum(map(len, batches)), APPEND_BYTES_MAX)


def parse_pull(request: pb.PullRequest, broker: str) -> ParsedPull:
    """Parse a pull request; the state of topic, queue and group is not checked here.

    Raises:
        InvalidArgument, InvalidName, LimitExceeded, BadExpression, WrongBroker: a field is invalid.
    """
    if not request.HasField("queue"):
        raise InvalidArgument("queue is required", facts={"field": "queue"})
    check_group(request.queue.group)
    queue = check_queue_name(request.queue.queue, broker)
    _check_least("token", request.token, 0)
    _check_least("offsets_epoch", request.offsets_epoch, 0)
    _check_least("subscription_generation", request.subscription_generation, 0)
    check_limit("hold_ms", request.hold_ms, HOLD_MS_MAX)
    return ParsedPull(
        QueueOwner(
            request.queue.group, queue.topic, broker, queue.queue_id, request.token, request.caller
        ),
        parse_read(request),
        request.hold_ms,
        request.offsets_epoch,
        request.subscription_generation,
        request.progress if request.HasField("progress") else None,
        check_offsets_set(request.offsets_set) if request.offsets_set else "",
        request.client_id,
        _received_offset(request),
    )


def parse_delivery(start: pb.DeliveryStart, broker: str) -> ParsedPull:
    """Parse the start of a delivery, without its credit.

    Raises:
        BatonError: as `parse_pull`.
    """
    pull = parse_pull(start.pull, broker)
    return pull._replace(hold_ms=pull.hold_ms or DELIVERY_HOLD_MS, progress=None)


def parse_credit(credit: pb.DeliveryCredit) -> ParsedCredit:
    """Parse a credit; offsets checks the acks.

    Raises:
        InvalidArgument, InvalidName: a field is invalid.
    """
    _check_least("number", credit.number, 1)
    _check_least("offsets_epoch", credit.offsets_epoch, 0)
    return ParsedCredit(
        credit.number,
        credit.messages_limit,
        credit.bytes_limit,
        credit.progress if credit.HasField("progress") else None,
        credit.offsets_epoch,
        check_offsets_set(credit.offsets_set) if credit.offsets_set else "",
        _received_offset(credit),
    )


def check_commands(count: int) -> None:
    """Check the number of commands of a request.

    Raises:
        InvalidArgument: there is no command.
        LimitExceeded: too many commands.
    """
    if not count:
        raise InvalidArgument(
            "commands must have at least one command", facts={"field": "commands"}
        )
    check_limit("commands", count, COMMANDS_MAX)


def _received_offset(request: pb.PullRequest | pb.DeliveryCredit) -> int | None:
    if not request.HasField("received_offset"):
        return None
    _check_least("received_offset", request.received_offset, 0)
    return request.received_offset


def parse_read(request: pb.PullRequest | query_pb.ReadRequest) -> ReadSpec:
    """Parse what a request reads: offset, limits and filter, with defaults.

    Raises:
        InvalidArgument, LimitExceeded, BadExpression: a field is invalid.
    """
    _check_least("offset", request.offset, 0)
    check_limit("bytes_max", request.bytes_max, PULL_BYTES_MAX)
    check_limit("messages_max", request.messages_max, PULL_MESSAGES_MAX)
    return ReadSpec(
        request.offset,
        request.bytes_max or PULL_BYTES_DEFAULT,
        request.messages_max or PULL_MESSAGES_DEFAULT,
        filter_of(request.expression),
    )


def parse_queues(request: pb.QueryOffsetsRequest) -> list[queue_pb2.QueueRef]:
    """Return the queues of a request; each of them is still to be checked.

    Raises:
        InvalidArgument: there is no queue.
        LimitExceeded: too many queues, or offsets to count from.
    """
    queues = list(request.queues)
    if not queues:
        raise InvalidArgument("queues must have at least one queue", facts={"field": "queues"})
    check_limit("queues", len(queues), QUERY_QUEUES_MAX)
    check_limit("counts", len(request.counts), QUERY_COUNTS_MAX)
    return queues


def check_queue_name(queue: queue_pb2.QueueRef, broker: str) -> queue_pb2.QueueRef:
    """Return `queue` if its fields are valid and it names this broker.

    Raises:
        InvalidName, LimitExceeded: a field is invalid.
        WrongBroker: it names another broker.
    """
    check_topic(queue.topic)
    check_broker(queue.broker)
    check_limit("queue_id", queue.queue_id, QUEUE_ID_MAX)
    if queue.broker != broker:
        raise WrongBroker(
            f"the request is for broker {queue.broker}, this is broker {broker}",
            facts={"asked": queue.broker, "actual": broker},
        )
    return queue


@lru_cache(maxsize=1_024)
def filter_of(expression: str) -> HashFilter | SqlFilter:
    """Return the filter for `expression`.

    Raises:
        BadExpression, LimitExceeded: the expression is invalid or too long.
    """
    parsed = parse_filter(expression)
    return parsed if isinstance(parsed, SqlFilter) else HashFilter(parsed.hashes)


def check_limit(field: str, actual: int, most: int) -> None:
    """Check that a field is at most `most`.

    Raises:
        LimitExceeded: it is larger.
    """
    if actual > most:
        raise LimitExceeded(
            f"{field} is {actual}; the limit is {most}",
            facts={"field": field, "limit": most, "actual": actual},
        )


def _check_least(field: str, actual: int, least: int) -> None:
    if actual < least:
        raise InvalidArgument(
            f"{field} must be at least {least}, got {actual}", facts={"field": field}
        )
