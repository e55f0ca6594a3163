"""Settings of a consumer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Literal

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._connection.security import Security
from batonmq._core.retries import RETRIES_MAX, RetryPolicy
from batonmq._core.setting_checks import check_choice, check_positive
from batonmq._core.start_offset import ConsumeFrom
from batonmq.errors import InvalidArgument

MODELS: Mapping[Literal["clustering", "broadcasting"], pb.MessageModel.ValueType] = {
    "clustering": pb.MESSAGE_MODEL_CLUSTERING,
    "broadcasting": pb.MESSAGE_MODEL_BROADCASTING,
}

MessageOrder = Literal["none", "queue", "key"]
ORDERS: Mapping[MessageOrder, pb.MessageOrder.ValueType] = {
    "none": pb.MESSAGE_ORDER_UNSPECIFIED,
    "queue": pb.MESSAGE_ORDER_QUEUE,
    "key": pb.MESSAGE_ORDER_KEY,
}

CONSUME_FROM: Mapping[ConsumeFrom, pb.ConsumeFrom.ValueType] = {
    "first": pb.CONSUME_FROM_FIRST,
    "last": pb.CONSUME_FROM_LAST,
    "timestamp": pb.CONSUME_FROM_TIMESTAMP,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    """Settings of a consumer. Times are in milliseconds, sizes in bytes.

    Attributes:
        model: `clustering`: each message is delivered to one member. `broadcasting`: each message
            is delivered to every member, which keeps its progress in `offsets_file`.
        offsets_file: The offsets file of a broadcasting member. Each member of each group has its
            own; the next process of the member continues with it.
        consume_from: Where a group without progress starts: `last` (behind the messages that
            exist), `first` or `timestamp`. All members must have the same.
        start_unix_ms: Start time for `timestamp`: the first message stored at or after it, by
            storage's wall clock; 0 for half an hour before the consumer was created.
        concurrency: Handler calls that run at once, of all queues; for `run` and `run_batches`.
        queue_concurrency: Handler calls of one queue that run at once; for `run` and `run_batches`.
            With more than 1, messages are started in order and may end in any order; see `order`.
        buffer_messages_max: Maximum number of messages of one queue that wait in the client.
        buffer_bytes_max: Maximum bytes of messages that wait in the client, of all queues together.
            At the limit, a queue without waiting messages may still fetch an equal share of it.
        pull_messages_max: Maximum number of messages that storage sends of a queue at once.
        pull_bytes_max: Approximate limit of the bytes that storage sends of a queue at once.
        pull_hold_ms: How long storage waits for a message of a queue before it answers without
            one.
        span_max: Maximum number of offsets between the committed offset of a queue and the last one
            received. After a crash, at most so many messages of a queue are delivered again.
        commit_interval_ms: Acks are committed at least this often, and sooner when a quarter of
            `span_max` of one queue waits.
        commit_on_pull: Whether acks also travel with requests for more messages, in a group with
            ownership. Then only a queue that is read from a follower is committed sooner, when
            three quarters wait.
        keep_alive_ms: How often the leases of the queues are renewed.
        drain_timeout_ms: How long running handlers may take when a queue is revoked or the consumer
            stops or closes. Messages that are not handled by then are delivered again, with
            `redelivered` set. None waits until the handlers end; but a consumer that stops or
            closes keeps its queues for 60 s at most.
        room: Machine room of this member, for groups that assign queues by room; empty for none.
        order: Which messages of one queue are handled strictly one after the other. `none`: see
            `queue_concurrency`. `queue`: all of them, whatever `queue_concurrency` is; a message
            that fails delays its queue, and no other queue. `key`: those that were sent with the
            same ordering key, also at a hand-over; others are handled side by side, up to
            `queue_concurrency`. A message that fails delays its key, and no other key, until
            `span_max` offsets behind it were received. Messages without an ordering key wait for no
            other. Not for `run_batches`. All members must have the same.
        send_back: Whether messages that fail are sent to the group's retry topic,
            `%RETRY%<group>`, which the consumer creates and subscribes to. They are delivered again
            after 10 s, 30 s, 1 min ... 2 h, to any member. Without it, this consumer keeps them and
            handles them again. None: yes, unless `order` is set or the group is broadcasting. All
            members must have the same. A consumer that iterates receives messages of the retry
            topic, and sends none back itself.
        retries_max: How often a failed message is handled again; None: 16 times with `send_back` or
            broadcasting, else without limit.
        exhausted: What happens then. `dead_letter`: the message is sent to the group's dead-letter
            topic, `%DLQ%<group>`; a broadcasting member only logs and skips it, as other members
            get it too. `skip`: the message is logged and acknowledged. `stop`: the consumer stops
            and `run` raises MessageFailed.
        handle_timeout_ms: How long a handler may take; None for no limit. A handler that takes
            longer has failed: it is cancelled and its result is ignored. A thread can't be
            cancelled; it counts in `concurrency` until it ends. The same holds for handlers that
            run when an operator resets the group. `Consumer.handle_timeout_ms` changes the limit
            of a running consumer.
        retry_first_ms: Delay before a failed message that is not sent back is handled again; it
            doubles with each failure.
        retry_ms_max: The longest such delay.
        start_timeout_ms: How long to wait for a nameserver when the consumer starts, and for the
            end of an earlier process with the same client id: usually 5 s after it was killed.
        handle_signals: Whether the first SIGTERM or SIGINT stops the consumer: `run`, `run_batches`
            and the iteration end, and leaving the block drains. A second signal ends the program
            at once. This holds from the start of `run`, `run_batches` or the iteration until the
            block is left, and only in the main thread. A signal with a handler of the program or of
            a framework is left alone; that handler calls `stop`.
        metrics_stream: Whether to publish what is handled, failed and sent back, and how long it
            takes, once a second, to the topic BATON_SYS_METRICS.
        security: TLS settings; None for plain connections.

    Raises:
        InvalidArgument: `offsets_file` is missing in a broadcasting group, or given in another; or
            `send_back` is set together with `order`, or in a broadcasting group; or a value is not
            possible, such as a limit of 0.
    """

    model: Literal["clustering", "broadcasting"] = "clustering"
    offsets_file: str | PathLike[str] = ""
    consume_from: ConsumeFrom = "last"
    start_unix_ms: int = 0
    concurrency: int = 20
    queue_concurrency: int = 1
    buffer_messages_max: int = 2_000
    buffer_bytes_max: int = 100 * 1024 * 1024
    pull_messages_max: int = 2_000
    pull_bytes_max: int = 2 * 1024 * 1024
    pull_hold_ms: int = 15_000
    span_max: int = 2_000
    commit_interval_ms: int = 5_000
    commit_on_pull: bool = True
    keep_alive_ms: int = 5_000
    drain_timeout_ms: int | None = 30_000
    room: str = ""
    order: MessageOrder = "none"
    send_back: bool | None = None
    retries_max: int | None = None
    exhausted: Literal["dead_letter", "skip", "stop"] = "dead_letter"
    handle_timeout_ms: int | None = 15 * 60_000
    retry_first_ms: int = 1_000
    retry_ms_max: int = 30_000
    start_timeout_ms: int = 30_000
    handle_signals: bool = True
    metrics_stream: bool = False
    security: Security | None = None

    def __post_init__(self) -> None:
        """Check the settings, also those that depend on each other."""
        check_choice("model", self.model, MODELS)
        check_choice("consume_from", self.consume_from, CONSUME_FROM)
        check_choice("order", self.order, ORDERS)
        check_choice("exhausted", self.exhausted, ("dead_letter", "skip", "stop"))
        check_positive(
            self,
            "concurrency",
            "queue_concurrency",
            "buffer_messages_max",
            "buffer_bytes_max",
            "pull_messages_max",
            "pull_bytes_max",
            "span_max",
            "commit_interval_ms",
            "keep_alive_ms",
        )
        if bool(self.offsets_file) != (self.model == "broadcasting"):
            raise InvalidArgument(
                f"offsets_file is {str(self.offsets_file)!r} and model is {self.model!r}",
                remedy="Set offsets_file if the model is broadcasting, and only then.",
                facts={"field": "offsets_file"},
            )
        if self.model == "broadcasting" and self.send_back:
            raise InvalidArgument(
                "send_back is not possible in a broadcasting group: "
                "every member would get the message again",
                remedy="Do not set send_back.",
                facts={"field": "send_back"},
            )
        if self.order != "none" and self.send_back:
            raise InvalidArgument(
                f"order is {self.order!r} and send_back is set, "
                "but a message that is sent back is handled after later ones",
                remedy="Set order or send_back, not both.",
                facts={"field": "send_back"},
            )

    @property
    def sends_back(self) -> bool:
        """Whether messages that fail are sent to the retry topic."""
        if self.send_back is None:
            return self.model == "clustering" and self.order == "none"
        return self.send_back


def check_transforms(settings: ConsumerSettings, topics: Sequence[str]) -> None:
    """Check that a consumer with these settings can transform messages.

    Raises:
        InvalidArgument: It can't, or there is no output topic.
    """
    if not topics:
        raise InvalidArgument("transform needs an output topic", facts={"field": "to"})
    if settings.model == "broadcasting":
        raise InvalidArgument(
            "a broadcasting member can't transform messages: every member would store the outputs",
            remedy="Use a clustering group.",
            facts={"field": "model"},
        )
    if settings.sends_back:
        raise InvalidArgument(
            "transform is not possible with send_back: the copy in the retry topic would be "
            "another input, with outputs of its own",
            remedy="Set send_back=False, or an order: failed messages are handled again in place.",
            facts={"field": "send_back"},
        )


def retry_policy(settings: ConsumerSettings) -> RetryPolicy:
    """Return the retry policy that the settings mean."""
    limit, broadcasting = settings.retries_max, settings.model == "broadcasting"
    if limit is None and (settings.sends_back or broadcasting):
        limit = RETRIES_MAX
    skips = broadcasting and settings.exhausted == "dead_letter"
    return RetryPolicy(
        sends_back=settings.sends_back,
        retries_max=limit,
        exhausted="skip" if skips else settings.exhausted,
        first_ms=settings.retry_first_ms,
        delay_ms_max=settings.retry_ms_max,
    )
