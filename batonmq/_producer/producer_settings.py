"""How a producer behaves."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._connection.security import Security
from batonmq._core.compression import Compression, RecordCompressor
from batonmq.errors import InvalidArgument


class Durability(Enum):
    """How safe a message is when its receipt is given."""

    MEMORY = pb.DURABILITY_MEMORY
    """In the page cache of one node: survives kill -9, not a power cut."""
    FSYNCED = pb.DURABILITY_FSYNCED
    """On the disk of one node."""
    REPLICATED = pb.DURABILITY_REPLICATED
    """On the disk of the in-sync set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings:
    """How a producer behaves.

    Attributes:
        durability: What a receipt has to mean.
        linger_ms: Wait so long for more messages before a batch leaves; 0 sends at once, and
            what arrives while a request is under way still travels together.
        batch_bytes_max: A batch of one queue takes no more than this.
        batch_messages_max: Nor more messages than this, up to 65,535.
        in_flight_requests_max: Requests under way to one broker.
        in_flight_bytes_max: Messages that wait or travel; beyond, `send` waits.
        delivery_timeout_ms: A batch without an outcome for so long after its first message was
            handed over fails.
        request_timeout_ms: Bound of one request.
        compression: Of the messages of a batch together, `lz4` for speed or `zstd` for size;
            consumers need no setting. Limits hold for messages before it.
        metrics_stream: Tell the cluster what is sent and how long it takes, once a second, through
            the topic BATON_SYS_METRICS.
        compression_bytes_min: Batches with fewer bytes of messages are not compressed; neither
            are those that would not get smaller.
        security: How to use TLS; None for none.
    """

    durability: Durability = Durability.FSYNCED
    linger_ms: int = 0
    batch_bytes_max: int = 512 * 1024
    batch_messages_max: int = 1_000
    in_flight_requests_max: int = 4
    in_flight_bytes_max: int = 64 * 1024 * 1024
    delivery_timeout_ms: int = 120_000
    request_timeout_ms: int = 10_000
    compression: Literal["none", "lz4", "zstd"] = "none"
    compression_bytes_min: int = 1_024
    metrics_stream: bool = False
    security: Security | None = None

    @property
    def packing(self) -> RecordCompressor:
        """How batches are packed.

        Raises:
            InvalidArgument: there is no such compression.
        """
        try:
            compression = Compression[self.compression.upper()]
        except KeyError:
            raise InvalidArgument(
                f"there is no compression {self.compression!r}",
                remedy="Use none, lz4 or zstd.",
                facts={"field": "compression"},
            ) from None
        return RecordCompressor(compression, self.compression_bytes_min)


METRICS_PRODUCER = ProducerSettings(compression="zstd", delivery_timeout_ms=10_000)
"""Settings of the producer that publishes events to the topic of the metrics."""
