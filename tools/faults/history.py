"""What happened in a run, as plain values.

Every time is of one monotonic clock, in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

Queue = tuple[str, int]
"""Broker and index: of the one topic there is."""


class SendOutcome(Enum):
    """What a producer was told of a message."""

    OK = "ok"
    FAIL = "fail"
    """It is certainly not stored."""
    INDETERMINATE = "indeterminate"
    """It may be stored or not."""


class Send(NamedTuple):
    """A message and its outcome.

    Attributes:
        number: Its body; no two messages have the same.
        lane: Producer and ordering key; empty without a key.
        begin_us: When it was handed to the producer.
        end_us: When the outcome was known.
        queue: Where the receipt says it is; None without one.
        offset: Likewise; -1 without one.
        reason: Of a failure.
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
    """A handler that was started.

    Attributes:
        member: Client id; no two processes of a run have the same.
        done_us: None if it did not end.
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
    """A queue came to a member or went.

    Attributes:
        kind: Of `OwnershipEvent`.
    """

    member: str
    kind: str
    queue: Queue
    token: int
    at_us: int


class MemberOutage(NamedTuple):
    """A member was killed, or stood still until `end_us`.

    Attributes:
        stood_still: False if it went on, but cut off from everything for longer than its lease.
    """

    member: str
    begin_us: int
    end_us: int | None
    paused: bool = True


class LoggedMessage(NamedTuple):
    """A message that was read from the log when all was over."""

    queue: Queue
    offset: int
    number: int


class StuckReport(NamedTuple):
    """A queue with a backlog that did not move, and what was said of it.

    Attributes:
        reason: Of the diagnosis, or of the error if there was none.
    """

    queue: Queue
    committed: int
    at_us: int
    unmoved_ms: int
    reason: str


class ProgressSample(NamedTuple):
    """Committed offsets by queue, asked for at `begin_us` and answered at `end_us`."""

    begin_us: int
    end_us: int
    committed: dict[Queue, int]


@dataclass(slots=True, kw_only=True)
class FaultRecord:
    """A fault that was made.

    Attributes:
        what: For people: what was done to whom.
        kinds: What was done, and to which service.
        end_us: When it was undone; None as long as it is not.
        healed_us: When everything served and was in sync again; None if it never was.
    """

    what: str
    begin_us: int
    kinds: Sequence[tuple[str, str]] = ()
    end_us: int | None = None
    healed_us: int | None = None


@dataclass(slots=True, kw_only=True)
class History:
    """Of all parties, merged.

    Attributes:
        sends: In no particular order, like the rest but the samples, which are as they were taken.
        stored: The whole topic; None if it was not read.
        problems: What the run itself could not do, such as heal the cluster.
        notes: What was left out, and what else one should know.
        begin_us: When the work began.
        end_us: When everything that will ever be handled was.
    """

    sends: Sequence[Send] = ()
    handler_calls: Sequence[HandlerCall] = ()
    ownership_changes: Sequence[OwnershipChange] = ()
    outages: Sequence[MemberOutage] = ()
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
    """The first handler of each message, and the later ones.

    Attributes:
        by_place: First handlings by queue and offset.
        again: Pairs of handlings of one message, the one before first.
    """

    by_place: dict[tuple[Queue, int], HandlerCall] = field(default_factory=dict)
    repeats: list[tuple[HandlerCall, HandlerCall]] = field(default_factory=list)

    @classmethod
    def of(cls, handler_calls: Sequence[HandlerCall]) -> FirstCalls:
        """Sort handlings out."""
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
        """First handlings of each queue, in the order of their starts."""
        queues: dict[Queue, list[HandlerCall]] = {}
        for one in self.by_place.values():
            queues.setdefault(one.queue, []).append(one)
        yield from sorted(queues.items())
