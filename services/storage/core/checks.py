"""The checks of a batch and of a queue that need no state of the store."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batonmq._columns.batch_columns import check_batch
from batonmq._core.names import check_topic
from batonmq._core.records import Header
from batonmq.errors import BadBatch, NotReadable, NotWritable, QueueNotFound
from batonmq_server.storage.core.compaction_policy import CompactionPolicy
from batonmq_server.storage.core.key_digests import check_keyed
from batonmq_server.storage.core.outputs import OutputBatch, parse_outputs
from batonmq_server.storage.core.producers import QueueKey


@dataclass(frozen=True, slots=True)
class LocalTopic:
    """The queues of a topic on this broker.

    Attributes:
        queue_count: Number of queues on this broker; 0 if there are none.
        write_queue_count: Queues with an id below this accept messages; None means all, and 0
            none: the topic leaves this broker.
        readable: Whether consumers may read the topic.
        writable: Whether producers may write to the topic.
        retention_ms: Retention time of its messages; 0 for that of the broker.
        retention_bytes: Maximum bytes of a queue; 0 for unlimited.
        compaction: How its queues are compacted; None if they are not.
        epoch: Of the topic; see `core.topic_epochs` of the nameserver.
        opened_epoch: Epoch in which queues on this broker began to take messages again; 0 if none
            has. Batches that name an earlier one are refused.
    """

    topic_id: int
    queue_count: int
    write_queue_count: int | None = None
    readable: bool = True
    writable: bool = True
    retention_ms: int = 0
    retention_bytes: int = 0
    compaction: CompactionPolicy | None = None
    epoch: int = 0
    opened_epoch: int = 0

    def takes(self, queue_id: int) -> bool:
        """Return whether the queue accepts messages."""
        count = self.queue_count if self.write_queue_count is None else self.write_queue_count
        return self.writable and queue_id < count

    @property
    def delivery_queue_count(self) -> int:
        """Number of queues for batches that were accepted earlier; 0 if there are none.

        If no queue takes new messages, all do: they exist until these batches are delivered.
        """
        return self.write_queue_count or self.queue_count

    def for_deliveries(self) -> LocalTopic:
        """Return the topic as it is for batches that were accepted earlier."""
        return replace(self, writable=True, write_queue_count=self.write_queue_count or None)


@dataclass(frozen=True, slots=True)
class CheckedBatch:
    """A batch that has passed all checks that need no state of the store.

    Attributes:
        outputs: Its output columns; None if its messages are not outputs.
        topic_epoch: Epoch of the topic that its sender has named; None for none.
    """

    header: Header
    batch: bytes
    outputs: OutputBatch | None = None
    topic_epoch: int | None = None


def check(batch: bytes, owner: int = 0, topic_epoch: int | None = None) -> CheckedBatch:
    """Check a batch that a producer has sent.

    Args:
        owner: Owner of the batch, see `owner_of`. What the batch itself says is ignored.
        topic_epoch: See `CheckedBatch`.

    Raises:
        BadBatch, BadChecksum, LimitExceeded, InvalidName: the batch is rejected.
    """
    header = check_batch(batch, stamped=False)
    if header.owner != owner:
        header = replace(header, owner=owner)
    check_topic(header.topic)
    outputs = parse_outputs(batch, header) if header.output_head_bytes else None
    if header.producer_id < 0 or (outputs is not None and header.producer_id):
        least = "be 0 in a batch of outputs" if outputs is not None else "not be negative"
        raise BadBatch(
            f"producer_id must {least}, got {header.producer_id}", facts={"field": "producer_id"}
        )
    return CheckedBatch(header, batch, outputs, topic_epoch)


def check_no_outputs(checked: CheckedBatch) -> CheckedBatch:
    """Return the batch if its messages are not outputs.

    Raises:
        BadBatch: They are, and only `append` stores these.
    """
    if checked.outputs is not None:
        raise BadBatch(
            "outputs can't be scheduled, nor be part of a transaction", facts={"field": "outputs"}
        )
    return checked


def check_queue(topic: str, queues: LocalTopic, queue_id: int) -> QueueKey:
    """Return the key of a queue.

    Raises:
        QueueNotFound: the topic has no such queue on this broker.
    """
    if queue_id >= queues.queue_count:
        raise QueueNotFound(
            f"topic {topic} has {queues.queue_count} queues on this broker; there is no "
            f"queue {queue_id}",
            facts={"topic": topic, "queue_id": queue_id, "queue_count": queues.queue_count},
        )
    return queues.topic_id, queue_id


def check_readable(topic: str, queues: LocalTopic) -> None:
    """Check that consumers may read a topic.

    Raises:
        NotReadable: the topic is write-only.
    """
    if not queues.readable:
        raise NotReadable(
            f"topic {topic} is write-only: its messages can't be read",
            retry_after_ms=2_000,
            facts={"topic": topic},
        )


def check_takes(checked: CheckedBatch, queues: LocalTopic) -> None:
    """Check that the queue of a batch accepts its messages.

    Raises:
        NotWritable: it accepts no messages, or none with the epoch that the batch names.
        BadBatch: the topic is compacted, and a message has no ordering key.
    """
    header = checked.header
    if queues.compaction is not None:
        check_keyed(header.topic, checked.batch, header)
    if not queues.takes(header.queue_id):
        which = f"queue {header.queue_id} of " if queues.writable else ""
        raise NotWritable(
            f"{which}topic {header.topic} accepts no messages",
            facts={"topic": header.topic, "queue_id": header.queue_id},
        )
    if checked.topic_epoch is not None and checked.topic_epoch < queues.opened_epoch:
        raise NotWritable(
            f"the batch was sent with a route of topic {header.topic} that is older than the last "
            "opening of queues on this broker",
            remedy="Send it again with the newest route.",
            facts={
                "topic": header.topic,
                "queue_id": header.queue_id,
                "topic_epoch": checked.topic_epoch,
                "opened_epoch": queues.opened_epoch,
            },
        )
