"""One delivery of a queue by stream: what was stated with which credit, and how it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._consumer.delivery_streams import DeliveryStream, OpenDelivery
from batonmq._consumer.stored_batch import StoredBatch
from batonmq._core.delivery_credit import DeliveryCredit
from batonmq._core.queue_progress import Acks
from batonmq.errors import BadBatch, BatonError


@dataclass(frozen=True, slots=True)
class Statement:
    """What the consumer has stated with one credit.

    Attributes:
        sent_ms: Monotonic time at which it was sent.
        acks: The acks that it carried; None for none.
        epoch: Offsets set and epoch that it named.
    """

    number: int
    sent_ms: int
    acks: Acks | None
    epoch: tuple[str, int]


class QueueDelivery:
    """The delivery that is under way; frames count as long as it has not ended.

    Args:
        node_id: The node, as the consumer calls it; empty for the leader.
        notify: Called when the delivery ends, or needs to be looked at.

    Attributes:
        credit: Its credit.
        error: Why it has ended, if an error has.
        ended: Another delivery must begin.
        silent: The node is a follower that has had nothing for long: look the leader up.
    """

    def __init__(
        self, stream: DeliveryStream, node_id: str, window: int, notify: Callable[[], None]
    ) -> None:
        self._stream, self.node_id, self._notify = stream, node_id, notify
        self.credit = DeliveryCredit(window)
        self.error: BatonError | None = None
        self.ended = self.silent = False
        self._statements: deque[Statement] = deque()
        self._kept: StoredBatch | None = None
        self._open: OpenDelivery | None = None

    def begin(
        self,
        pull: pb.PullRequest,
        credit: pb.DeliveryCredit,
        statement: Statement,
        on_frame: Callable[[pb.DeliveryFrame], None],
    ) -> None:
        """Begin the delivery with its first credit."""
        self._statements.append(statement)
        start = pb.DeliveryStart(pull=pull, credit=credit, keeps_last_batch=True)
        self._open = self._stream.start(start, on_frame, self.fail)

    def raise_credit(self, credit: pb.DeliveryCredit, statement: Statement) -> None:
        """Send a new credit."""
        assert self._open is not None
        self._statements.append(statement)
        self._stream.raise_credit(self._open, credit)

    def receive(self, frame: pb.DeliveryFrame) -> tuple[Statement, Acks | None]:
        """Note a frame; return the statement that its record included.

        Returns:
            The statement, and the newest acks that were stated with it or before.
        """
        self.credit.receive(frame.messages_sent, frame.bytes_sent)
        statements, acks = self._statements, None
        while len(statements) > 1 and statements[1].number <= frame.credit_number:
            acks = statements.popleft().acks or acks
        return statements[0], statements[0].acks or acks

    def batches(self, frame: pb.DeliveryFrame) -> Sequence[StoredBatch]:
        """Return the batches of a frame; call it for each one.

        A batch that continues in the next frame is kept, because that frame does not repeat it.

        Raises:
            BadBatch, BadChecksum, LimitExceeded: A batch is damaged.
            BadBatch: The frame continues a batch that was not sent.
        """
        kept, batches = self._kept, [StoredBatch(raw) for raw in frame.messages.batches]
        last = batches[-1] if batches else kept
        if frame.continues_batch:
            if kept is None:
                raise BadBatch("the frame continues a batch that was not sent")
            batches.insert(0, kept)
        goes_on = last is not None and frame.messages.next_offset < last.header.next_offset
        self._kept = last if goes_on else None
        return batches

    def end(self) -> None:
        """End the delivery: use no more frames, and begin another one."""
        self.ended = True
        self._notify()

    def fail(self, error: BatonError) -> None:
        """End the delivery by an error."""
        self.error = self.error or error
        self.end()

    def look(self) -> None:
        """Have the leader looked up."""
        self.silent = True
        self._notify()

    def stop(self) -> None:
        """Tell the node that the delivery has ended."""
        if self._open is not None:
            self._stream.stop(self._open)
