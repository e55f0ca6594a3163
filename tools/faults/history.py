"""The events of a run as plain values.

Every time is read from one monotonic clock, in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

Queue = tuple[str, int]
"""Broker and queue id; a run has one topic."""


class SendOutcome(Enum):
    """The outcome of a send."""

    OK = "ok"
    FAIL = "fail"
    """The message is certainly not stored."""
    INDETERMINATE = "indeterminate"
    """The message may be stored or not."""


class Send(NamedTuple):
    """A message and its outcome.

    Attributes:
        number: Body; unique in a run.
        lane: Producer and ordering key, or message group of a remote client; empty without one.
        begin_us: Time of the call of the producer.
        end_us: Time of the outcome.
        queue: Queue of the receipt; None without one.
        offset: Offset of the receipt; -1 without one.
        reason: Error of a failed or indeterminate send.
    """

    number: int
    lane: str
    begin_us: int
    end_us: int
    outcome: SendOutcome
    queue: Queue | None = None
    offset: int = -1
    reason: str = ""


class HandlerCall(NamedTuple):
    """A call of a message handler.

    Attributes:
        member: Client id; unique for each process of a run.
        done_us: None if the call did not end.
    """

    member: str
    queue: Queue
    offset: int
    token: int
    redelivered: bool
    number: int
    start_us: int
    done_us: int | None


class OwnershipChange(NamedTuple):
    """A change of the ownership of a queue, as its member saw it.

    Attributes:
        kind: Kind of the `OwnershipEvent`.
    """

    member: str
    kind: str
    queue: Queue
    token: int
    at_us: int


class MemberOutage(NamedTuple):
    """A member was killed at `begin_us`, or paused or cut off until `end_us`.

    Attributes:
        paused: False if the member was running, but cut off for longer than its lease.
    """

    member: str
    begin_us: int
    end_us: int | None
    paused: bool = True


class RemoteDelivery(NamedTuple):
    """A message that a remote client got from a gateway.

    Attributes:
        gateway: Name of its process.
        attempt: Number of the delivery, as the gateway says.
        queue: Where the message is stored, as `offset`.
    """

    client: str
    gateway: str
    number: int
    attempt: int
    at_us: int
    queue: Queue
    offset: int


REMOTE_LANE = "remote-lane-"
"""Begin of the message groups of remote clients."""


@dataclass(slots=True, kw_only=True)
class RemoteLedger:
    """What the remote clients of a group got and acknowledged.

    Attributes:
        in_order: Whether the group gets the messages with a message group of remote clients; it
            gets those without an ordering key otherwise.
        asked: When the first acknowledgement of each message was sent.
        acks: When the first one was answered OK.
        committed: Committed offsets of the group at the end.
    """

    in_order: bool = False
    deliveries: list[RemoteDelivery] = field(default_factory=list)
    asked: dict[int, int] = field(default_factory=dict)
    acks: dict[int, int] = field(default_factory=dict)
    committed: Mapping[Queue, int] = field(default_factory=dict)

    def is_for(self, send: Send) -> bool:
        """Return whether the group gets this message."""
        return send.lane.startswith(REMOTE_LANE) if self.in_order else not send.lane

    def settled(self) -> Set[int]:
        """Return the numbers of the acknowledged messages.

        The answer to an acknowledgement may be lost with its gateway; then progress counts.
        """
        return self.acks.keys() | {
            one.number
            for one in self.deliveries
            if one.number in self.asked and one.offset < self.committed.get(one.queue, 0)
        }

    def lost(self, sends: Iterable[Send]) -> Iterator[Send]:
        """Yield the stored messages that are for the group and not acknowledged."""
        settled = self.settled()
        for send in sends:
            if send.outcome is SendOutcome.OK and self.is_for(send) and send.number not in settled:
                yield send


class LoggedMessage(NamedTuple):
    """A message that was read from the log at the end of the run."""

    queue: Queue
    offset: int
    number: int


class StuckReport(NamedTuple):
    """A queue with a backlog that did not move, and its diagnosis.

    Attributes:
        reason: Reason of the diagnosis, or of the error of the call.
    """

    queue: Queue
    committed: int
    at_us: int
    unmoved_ms: int
    reason: str


class HistoryProblem(NamedTuple):
    """A violated rule and its description."""

    rule: str
    text: str


class ProgressSample(NamedTuple):
    """Committed offsets by queue; requested at `begin_us`, received at `end_us`."""

    begin_us: int
    end_us: int
    committed: dict[Queue, int]


@dataclass(slots=True, kw_only=True)
class FaultRecord:
    """A group of faults that was injected.

    Attributes:
        what: Description of the faults and their processes.
        kinds: Kind and service of each fault.
        end_us: Time at which all faults were undone; None before.
        healed_us: Time at which all processes served and were in sync; None if never.
    """

    what: str
    begin_us: int
    kinds: Sequence[tuple[str, str]] = ()
    end_us: int | None = None
    healed_us: int | None = None


@dataclass(slots=True, kw_only=True)
class History:
    """The merged history of all processes of a run; only `samples` are ordered by time.

    Attributes:
        remote: Of each group of remote clients; empty without gateways.
        gateway_outages: Of gateways, by the names of their processes.
        stored: All messages of the topic; None if the topic was not read.
        problems: Failures of the run itself, such as a cluster that did not heal.
        notes: Omitted faults and other remarks.
        begin_us: Start of the load.
        end_us: Time at which all messages were handled.
    """

    sends: Sequence[Send] = ()
    handler_calls: Sequence[HandlerCall] = ()
    ownership_changes: Sequence[OwnershipChange] = ()
    outages: Sequence[MemberOutage] = ()
    remote: Sequence[RemoteLedger] = ()
    gateway_outages: Sequence[MemberOutage] = ()
    samples: Sequence[ProgressSample] = ()
    stuck_reports: Sequence[StuckReport] = ()
    stored: Sequence[LoggedMessage] | None = None
    faults: Sequence[FaultRecord] = ()
    problems: Sequence[str] = ()
    notes: Sequence[str] = ()
    begin_us: int = 0
    end_us: int = 0


@dataclass(slots=True)
class FirstCalls:
    """The first handler call of each message, and the repeated ones.

    Attributes:
        by_place: First calls by queue and offset.
        repeats: Pairs of consecutive calls for one message.
    """

    by_place: dict[tuple[Queue, int], HandlerCall] = field(default_factory=dict)
    repeats: list[tuple[HandlerCall, HandlerCall]] = field(default_factory=list)

    @classmethod
    def of(cls, handler_calls: Sequence[HandlerCall]) -> FirstCalls:
        """Split handler calls into first and repeated ones."""
        found, last = cls(), dict[tuple[Queue, int], HandlerCall]()
        for one in sorted(handler_calls, key=lambda handling: handling.start_us):
            place = one.queue, one.offset
            if place in last:
                found.repeats.append((last[place], one))
            else:
                found.by_place[place] = one
            last[place] = one
        return found

    def by_queue(self) -> Iterator[tuple[Queue, list[HandlerCall]]]:
        """Yield the first calls of each queue in the order of their start."""
        queues: dict[Queue, list[HandlerCall]] = {}
        for one in self.by_place.values():
            queues.setdefault(one.queue, []).append(one)
        yield from sorted(queues.items())
