"""Settings of a consumer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Literal

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._connection.security import Security
from batonmq._core.retries import RETRIES_MAX, RetryPolicy
from batonmq._core.start_offset import ConsumeFrom
from batonmq.errors import InvalidArgument

MODELS: Mapping[Literal["clustering", "broadcasting"], pb.MessageModel.ValueType] = {
    "clustering": pb.MESSAGE_MODEL_CLUSTERING,
    "broadcasting": pb.MESSAGE_MODEL_BROADCASTING,
}

CONSUME_FROM: Mapping[ConsumeFrom, pb.ConsumeFrom.ValueType] = {
    "first": pb.CONSUME_FROM_FIRST,
    "last": pb.CONSUME_FROM_LAST,
    "timestamp": pb.CONSUME_FROM_TIMESTAMP,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    """How a consumer behaves.

    Attributes:
        model: `clustering`: each message goes to one member. `broadcasting`: each goes to every
            member, which keeps its progress itself, in `offsets_file`.
        offsets_file: The file of a broadcasting member, of this group and this member only; taken
            up again by the next process of the member.
        consume_from: Where a group without progress starts: `last` (after the messages that are
            there), `first` or `timestamp`. All members must agree.
        start_unix_ms: For `timestamp`: with the first message stored at or after this time, by the
            wall clock of storage; 0 for half an hour before the start of the consumer.
        concurrency: Messages handled at once in all; `run` only.
        queue_concurrency: Messages of one queue handled at once; with more than 1 they are started
            in order and may end in any; `run` only.
        buffer_messages_max: Messages of one queue that wait in the client.
        buffer_bytes_max: Bytes of bodies that wait in the client, of all queues together. At the
            bound a queue without waiting messages may still fetch an equal share of it.
        pull_messages_max: Offsets taken by one pull.
        pull_bytes_max: Bytes taken by one pull, about.
        pull_hold_ms: How long storage holds a pull that finds nothing.
        span_max: Offsets of one queue between the committed one and the last received; bounds
            what is delivered again after a crash.
        commit_interval_ms: Acks are committed at least so often, and sooner when a quarter of
            `span_max` waits; three quarters with `commit_on_pull`.
        commit_on_pull: Acks travel with pulls too, so that a busy consumer commits on its way.
        keep_alive_ms: How often the ownership of queues is renewed.
        drain_timeout_ms: How long handlers may run on when a queue is lost or the consumer
            closes; what is not done by then is delivered again, flagged. None waits until they
            end. A consumer that closes keeps its queues for 60 s at most: what runs longer is
            delivered again in any case.
        room: Machine room, for groups whose queues are dealt out by room; empty for none.
        orderly: Messages of one queue are handled one after the other, whatever
            `queue_concurrency` says, and one that fails holds its queue up, no other. All members
            must agree.
        send_back: Messages that fail are sent to the retry topic of the group, `%RETRY%<group>`,
            which this creates and subscribes to, and come again after 10 s, 30 s, 1 min ... 2 h,
            to any member; without, they stay in hand. None: wherever it can be, which is not with
            `orderly`, nor in a broadcasting group. All members must agree; one that iterates gets
            what others have sent back, and sends nothing back itself.
        retries_max: So often a message is handled again; None: 16 times with `send_back` or
            broadcasting, without limit otherwise.
        exhausted: Then it goes to the dead letters of the group, topic `%DLQ%<group>`, but is only
            logged and skipped by a broadcasting member, as the others get it too; or the consumer
            stops and `run` raises MessageFailed.
        handle_timeout_ms: A handler that takes longer has failed: it is cancelled, and what it
            still says is ignored. A thread goes on, and counts in `concurrency` until it ends.
            None for no limit. `Consumer.handle_timeout_ms` changes it on the way.
        retry_first_ms: Wait so long before a failed message in hand is handled again; doubles.
        retry_ms_max: The longest such wait.
        start_timeout_ms: How long to wait for a nameserver at the start.
        metrics_stream: Tell the cluster what is handled, failed and sent back, and how long it
            takes, once a second, through the topic BATON_SYS_METRICS.
        security: How to use TLS; None for none.

    Raises:
        InvalidArgument: `offsets_file` is missing, or is given to a clustering member; `send_back`
            together with `orderly`, or in a broadcasting group.
    """

    model: Literal["clustering", "broadcasting"] = "clustering"
    offsets_file: str | PathLike[str] = ""
    consume_from: ConsumeFrom = "last"
    start_unix_ms: int = 0
    concurrency: int = 20
    queue_concurrency: int = 1
    buffer_messages_max: int = 1_000
    buffer_bytes_max: int = 100 * 1024 * 1024
    pull_messages_max: int = 1_000
    pull_bytes_max: int = 1024 * 1024
    pull_hold_ms: int = 15_000
    span_max: int = 2_000
    commit_interval_ms: int = 5_000
    commit_on_pull: bool = True
    keep_alive_ms: int = 5_000
    drain_timeout_ms: int | None = 30_000
    room: str = ""
    orderly: bool = False
    send_back: bool | None = None
    retries_max: int | None = None
    exhausted: Literal["dead_letter", "stop"] = "dead_letter"
    handle_timeout_ms: int | None = 15 * 60_000
    retry_first_ms: int = 1_000
    retry_ms_max: int = 30_000
    start_timeout_ms: int = 30_000
    metrics_stream: bool = False
    security: Security | None = None

    def __post_init__(self) -> None:
        """Check what belongs together."""
        if bool(self.offsets_file) != (self.model == "broadcasting"):
            raise InvalidArgument(
                f"a {self.model} consumer with offsets_file {str(self.offsets_file)!r}",
                remedy="Give a broadcasting consumer an offsets_file, and no other.",
                facts={"field": "offsets_file"},
            )
        if self.model == "broadcasting" and self.send_back:
            raise InvalidArgument(
                "a broadcasting member can't send back: every other member would get it again",
                remedy="Leave send_back out.",
                facts={"field": "send_back"},
            )
        if self.orderly and self.send_back:
            raise InvalidArgument(
                "a message that is sent back comes after those behind it, so not in order",
                remedy="Set one of orderly and send_back.",
                facts={"field": "send_back"},
            )

    @property
    def sends_back(self) -> bool:
        """Whether messages that fail go to the retry topic."""
        if self.send_back is None:
            return self.model == "clustering" and not self.orderly
        return self.send_back

    @property
    def policy(self) -> RetryPolicy:
        """How failures are met."""
        limit, broadcasting = self.retries_max, self.model == "broadcasting"
        if limit is None and (self.sends_back or broadcasting):
            limit = RETRIES_MAX
        skips = broadcasting and self.exhausted == "dead_letter"
        return RetryPolicy(
            sends_back=self.sends_back,
            retries_max=limit,
            exhausted="skip" if skips else self.exhausted,
            first_ms=self.retry_first_ms,
            delay_ms_max=self.retry_ms_max,
        )
