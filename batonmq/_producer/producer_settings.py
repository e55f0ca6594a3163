"""Settings of a producer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, Protocol

from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._connection.security import Security
from batonmq._core.compression import Compression, RecordCompressor
from batonmq._core.records import BATCH_BYTES_MAX, RECORDS_MAX
from batonmq._core.setting_checks import check_positive
from batonmq.errors import InvalidArgument


class Durability(Enum):
    """Durability of a message when its receipt is returned."""

    MEMORY = pb.DURABILITY_MEMORY
    """In the page cache of one node: survives kill -9, but not a power failure."""
    FSYNCED = pb.DURABILITY_FSYNCED
    """On the disk of one node."""
    REPLICATED = pb.DURABILITY_REPLICATED
    """On the disks of the leader and of the in-sync set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings:
    """Settings of a producer.

    Attributes:
        durability: The durability that a message must have before its receipt is returned.
        linger_ms: Time that a batch waits for more messages before it is sent. With 0 it is sent
            at once, unless a request is in flight: then a request below 16 KiB waits for its
            answer, at most 2 ms.
        batch_bytes_max: Largest size of a batch, in bytes. A batch is for one queue. A value of
            8 MiB or more counts as a little less: storage accepts no larger batch.
        batch_messages_max: Maximum number of messages in a batch. A greater value counts as 65,535.
        in_flight_requests_max: Maximum number of requests in flight to one broker.
        in_flight_bytes_max: Maximum bytes of messages that are buffered or in flight; `send` waits
            at this limit.
        delivery_timeout_ms: A batch fails if it has no outcome this long after its first message
            was passed to the producer.
        request_timeout_ms: Timeout of one request.
        compression: Compression of a batch: `none`, `lz4` for speed or `zstd` for size. Consumers
            need no setting. Size limits of messages apply before compression.
        compression_bytes_min: A batch with fewer bytes of messages is not compressed, nor is a
            batch that compression would not make smaller.
        metrics_stream: Publish counts and latencies of sends once a second to the topic
            BATON_SYS_METRICS.
        security: TLS and credentials; None for a connection without TLS.

    Raises:
        InvalidArgument: A limit or a timeout is less than 1.
    """

    durability: Durability = Durability.FSYNCED
    linger_ms: int = 0
    batch_bytes_max: int = 512 * 1024
    batch_messages_max: int = 2_000
    in_flight_requests_max: int = 4
    in_flight_bytes_max: int = 64 * 1024 * 1024
    delivery_timeout_ms: int = 120_000
    request_timeout_ms: int = 10_000
    compression: Literal["none", "lz4", "zstd"] = "none"
    compression_bytes_min: int = 1_024
    metrics_stream: bool = False
    security: Security | None = None

    def __post_init__(self) -> None:
        """Check the limits."""
        check_positive(
            self,
            "batch_bytes_max",
            "batch_messages_max",
            "in_flight_requests_max",
            "in_flight_bytes_max",
            "delivery_timeout_ms",
            "request_timeout_ms",
        )


class BatchLimits(NamedTuple):
    """Limits of the batches that a producer fills: bytes, and messages."""

    bytes_max: int
    messages_max: int


_BATCH_ROOM_BYTES = 8 * 1024
"""Room for the header of a batch, and for the columns of the message that fills it."""


def batch_limits_of(settings: ProducerSettings) -> BatchLimits:
    """Return the limits that the settings mean, none above those of storage."""
    return BatchLimits(
        min(settings.batch_bytes_max, BATCH_BYTES_MAX - _BATCH_ROOM_BYTES),
        min(settings.batch_messages_max, RECORDS_MAX),
    )


class CompressionSettings(Protocol):
    """The part of `ProducerSettings` that says how batches are compressed."""

    @property
    def compression(self) -> str:
        """See `ProducerSettings`."""
        ...

    @property
    def compression_bytes_min(self) -> int:
        """See `ProducerSettings`."""
        ...


def compressor_of(settings: CompressionSettings) -> RecordCompressor:
    """Return the compressor of batches.

    Raises:
        InvalidArgument: `compression` is not a known compression.
    """
    try:
        compression = Compression[settings.compression.upper()]
    except KeyError:
        raise InvalidArgument(
            f"unknown compression {settings.compression!r}",
            remedy="Use none, lz4 or zstd.",
            facts={"field": "compression"},
        ) from None
    return RecordCompressor(compression, settings.compression_bytes_min)


METRICS_PRODUCER = ProducerSettings(compression="zstd", delivery_timeout_ms=10_000)
"""Settings of the producer that publishes events to the metrics topic."""
