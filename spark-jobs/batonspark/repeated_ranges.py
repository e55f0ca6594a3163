"""Find the messages of one queue that a group received more than once, and why. Pure.

The algorithm works on ranges of offsets: it keeps the last owner of each delivered range, and the
overlap of a later delivery with that range is a repeat. The cause follows from how the earlier
ownership ended; section 9 of the protocol says which ends allow a second start of a handler.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from batonmq._core.ranges import Range, normalize, subtract

CLOCKS_APART_MS = 2_000
"""Events of two services less than this apart may have happened in reverse order, because each
service publishes about once a second."""


class RepeatCause(StrEnum):
    """Why messages were delivered again."""

    CRASH = "crash"
    """The lease of the previous owner expired, or its process ended."""
    TIMEOUT = "timeout"
    """The previous owner was alive but did not release the queue in time."""
    UNFINISHED = "unfinished"
    """The previous owner released the queue and reported these as not handled."""
    FORCED = "forced"
    """An operator forced the release of the queue."""
    REACQUIRED = "reacquired"
    """The same owner acquired the queue again."""
    RESET = "reset"
    """An operator moved progress back."""
    RETRY = "retry"
    """A handler failed, and the message was sent back to the group's retry topic."""
    UNOWNED = "unowned"
    """The queues of the group have no owner."""
    LEASE = "lease"
    """A remote client gave the message back, or its lease at the gateway expired."""
    RETURNED = "returned"
    """The previous owner released the queue and had not started these."""
    REPEATED = "repeated"
    """The same owner pulled again because the first response was lost."""
    GRACEFUL = "graceful"
    """A bug: the hand-over was graceful, and these were marked as started."""
    ACKED = "acked"
    """A bug: these were acknowledged before."""
    UNKNOWN = "unknown"
    """The events do not show how the previous ownership ended."""


HARMLESS = frozenset({RepeatCause.RETURNED, RepeatCause.REPEATED})
"""Causes of a second transfer without a second start of a handler."""
BUGS = frozenset({RepeatCause.GRACEFUL, RepeatCause.ACKED})

_OF_MANNER = {
    "UNFINISHED": RepeatCause.UNFINISHED,
    "LEASE_EXPIRED": RepeatCause.CRASH,
    "DRAIN_TIMED_OUT": RepeatCause.TIMEOUT,
    "FORCED": RepeatCause.FORCED,
}


@dataclass(frozen=True, slots=True)
class DeliveryEvent:
    """A range [first_offset, next_offset) was scanned for an owner.

    Attributes:
        runs: Lengths of alternating runs of offsets: skipped, delivered, skipped, ...; empty if
            every offset was delivered.
        redelivered_count: Delivered messages that an earlier owner may have started.
    """

    unix_ms: int
    token: int
    client_id: str
    first_offset: int
    next_offset: int
    runs: Sequence[int] = ()
    redelivered_count: int = 0

    def islands(self) -> Iterator[Range]:
        """Return the delivered ranges."""
        if not len(self.runs):
            yield self.first_offset, self.next_offset
            return
        end = self.first_offset
        for skipped, taken in zip(self.runs[::2], self.runs[1::2], strict=False):
            begin = end + skipped
            end = begin + taken
            if taken:
                yield begin, end


@dataclass(frozen=True, slots=True)
class OwnerChange:
    """A queue changed its owner, or lost it.

    Attributes:
        token: Fencing token of the next owner.
        previous_token: Fencing token of the previous owner; 0 if unknown.
        manner: Manner of the hand-over, as in the contract; empty if unknown.
    """

    unix_ms: int
    token: int
    client_id: str
    previous_token: int = 0
    previous_client_id: str = ""
    manner: str = ""
    stolen: bool = False


@dataclass(frozen=True, slots=True)
class CommitEvent:
    """Committed progress under a token."""

    unix_ms: int
    token: int
    committed_offset: int
    delivered_offset: int


@dataclass(frozen=True, slots=True)
class ResetEvent:
    """An operator reset the progress."""

    unix_ms: int
    to_offset: int
    by: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class QueueHistory:
    """The events of one queue of one group, in any order.

    Attributes:
        hand_outs: Deliveries of gateways to remote clients.
        is_retry: Whether the queue belongs to the retry topic of the group.
        settled_unix_ms: Commits after this time are not checked against the deliveries, whose
            events may not be published yet.
    """

    deliveries: Sequence[DeliveryEvent] = ()
    passings: Sequence[OwnerChange] = ()
    commits: Sequence[CommitEvent] = ()
    resets: Sequence[ResetEvent] = ()
    hand_outs: Sequence[DeliveryEvent] = ()
    is_retry: bool = False
    settled_unix_ms: int = 1 << 62


@dataclass(frozen=True, slots=True)
class RepeatedRange:
    """Messages [first_offset, next_offset) were delivered to one owner and then to another.

    Attributes:
        flagged_count: Messages marked as redelivered in the whole later delivery, which may be
            longer than this range.
        why: The cause as a sentence.
    """

    first_offset: int
    next_offset: int
    cause: RepeatCause
    previous_client_id: str
    previous_token: int
    previous_unix_ms: int
    client_id: str
    token: int
    unix_ms: int
    flagged_count: int
    why: str

    @property
    def count(self) -> int:
        """Number of messages."""
        return self.next_offset - self.first_offset


@dataclass(slots=True)
class OwnershipSpan:
    """An owner with its token, and the time of its last known delivery."""

    token: int
    client_id: str
    last_unix_ms: int


@dataclass(slots=True)
class LastDelivered:
    """The last owner of each delivered offset: disjoint ranges in order, each with its owner."""

    _begins: list[int] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)
    _tenures: list[OwnershipSpan] = field(default_factory=list)

    def put(
        self, first: int, next_: int, tenure: OwnershipSpan
    ) -> list[tuple[int, int, OwnershipSpan]]:
        """Record a delivery of [first, next_); return the parts that were delivered before."""
        low, high = bisect_right(self._ends, first), bisect_left(self._begins, next_)
        overlaps = list(
            zip(self._begins[low:high], self._ends[low:high], self._tenures[low:high], strict=True)
        )
        pieces = [(first, next_, tenure)]
        if overlaps and overlaps[0][0] < first:
            pieces.insert(0, (overlaps[0][0], first, overlaps[0][2]))
        if overlaps and overlaps[-1][1] > next_:
            pieces.append((next_, overlaps[-1][1], overlaps[-1][2]))
        if low and self._ends[low - 1] == first and self._tenures[low - 1] is tenure:
            low -= 1
            pieces.insert(0, (self._begins[low], first, tenure))
        joined = _joined(pieces)
        self._begins[low:high] = [begin for begin, _, _ in joined]
        self._ends[low:high] = [end for _, end, _ in joined]
        self._tenures[low:high] = [owner for _, _, owner in joined]
        return [(max(begin, first), min(end, next_), owner) for begin, end, owner in overlaps]


def repeated_ranges(history: QueueHistory) -> Iterator[RepeatedRange]:
    """Return every repeated delivery with its cause.

    Each delivery is compared with the previous delivery of the same message.
    """
    ends, last = OwnershipEnds(history), LastDelivered()
    tenures: dict[tuple[int, str], OwnershipSpan] = {}
    order = sorted(history.deliveries, key=lambda one: (one.token, one.unix_ms, one.first_offset))
    for delivery in order:
        key = (delivery.token, delivery.client_id)
        tenure, alone = tenures.setdefault(key, OwnershipSpan(*key, delivery.unix_ms)), True
        for first, next_ in delivery.islands():
            seen = last.put(first, next_, tenure)
            alone = alone and not seen
            for begin, end, before in seen:
                yield from _explained(begin, end, before, delivery, ends)
            fresh = subtract([(first, next_)], normalize([(b, e) for b, e, _ in seen]))
            for begin, end in fresh:
                if history.is_retry:
                    yield _sent_back(begin, end, delivery)
                yield from _acked_unseen(begin, end, delivery, ends)
        if alone and delivery.redelivered_count and ends.was_graceful(delivery.token):
            yield _flagged(delivery)
        tenure.last_unix_ms = max(tenure.last_unix_ms, delivery.unix_ms)
    yield from _handed_out_again(history, ends)


def _handed_out_again(history: QueueHistory, ends: OwnershipEnds) -> Iterator[RepeatedRange]:
    """Return what gateways handed to remote clients again under the same token.

    Repeats under another token are those of the gateways, which are the owners.
    """
    last: dict[int, LastDelivered] = {}
    order = sorted(history.hand_outs, key=lambda one: (one.unix_ms, one.first_offset))
    for delivery in order:
        of_token = last.setdefault(delivery.token, LastDelivered())
        tenure = OwnershipSpan(delivery.token, delivery.client_id, delivery.unix_ms)
        for first, next_ in delivery.islands():
            for begin, end, before in of_token.put(first, next_, tenure):
                yield from _leased_again(begin, end, before, delivery, ends)


def _leased_again(
    begin: int, end: int, before: OwnershipSpan, delivery: DeliveryEvent, ends: OwnershipEnds
) -> Iterator[RepeatedRange]:
    reset = ends.reset_between(before.last_unix_ms, delivery.unix_ms)
    if reset is not None and reset.to_offset < end:
        cut = max(begin, reset.to_offset)
        why = f"{reset.by} moved progress to {reset.to_offset}: {reset.reason}"
        yield _repeat((cut, end), RepeatCause.RESET, before, delivery, why)
        end = cut
    acked = min(ends.acked_until(delivery.token, delivery.unix_ms - CLOCKS_APART_MS), end)
    if begin < acked:
        why = f"{_SENTENCES[RepeatCause.ACKED]} and handed to a remote client again"
        yield _repeat((begin, acked), RepeatCause.ACKED, before, delivery, why)
        begin = acked
    if begin < end:
        why = _SENTENCES[RepeatCause.LEASE]
        yield _repeat((begin, end), RepeatCause.LEASE, before, delivery, why)


def undelivered_commits(history: QueueHistory) -> list[Range]:
    """Return the committed offsets without a known delivery.

    Their deliveries are missing in the stream, so repeats of them are not found.
    """
    settled = [one for one in history.commits if one.unix_ms < history.settled_unix_ms]
    parts: dict[int, list[CommitEvent]] = {}
    for commit in sorted(settled, key=lambda one: (one.token, one.unix_ms)):
        parts.setdefault(commit.token if history.resets else 0, []).append(commit)
    needed = [
        (max(part[0].committed_offset, part[0].delivered_offset), part[-1].committed_offset)
        for part in parts.values()
    ]
    scanned = normalize([(one.first_offset, one.next_offset) for one in history.deliveries])
    return subtract(normalize([run for run in needed if run[0] < run[1]]), scanned)


class OwnershipEnds:
    """How each ownership of a queue ended."""

    def __init__(self, history: QueueHistory) -> None:
        self._passings = sorted(history.passings, key=lambda one: (one.token, not one.manner))
        self._tokens = [one.token for one in self._passings]
        self._told = {one.previous_token: one for one in self._passings if one.previous_token}
        self._manners = {one.token: one.manner for one in self._passings if one.manner}
        self._resets = history.resets
        self._commits = sorted((one.token, one.committed_offset) for one in history.commits)
        self._commit_times: dict[int, list[int]] = {}
        self._committed: dict[int, list[int]] = {}
        for one in sorted(history.commits, key=lambda one: one.unix_ms):
            self._commit_times.setdefault(one.token, []).append(one.unix_ms)
            reached = self._committed.setdefault(one.token, [])
            reached.append(max(one.committed_offset, reached[-1] if reached else 0))

    def of(self, token: int) -> OwnerChange | None:
        """Return the owner change that ended the ownership with this token."""
        if token in self._told:
            return self._told[token]
        place = bisect_right(self._tokens, token)
        return self._passings[place] if place < len(self._passings) else None

    def was_graceful(self, token: int) -> bool:
        """Return whether the owner with this token got the queue by a graceful hand-over."""
        return self._manners.get(token) == "GRACEFUL"

    def acked_below(self, from_token: int, to_token: int) -> int:
        """Return the offset below which all is acked under tokens in [from_token, to_token)."""
        begin = bisect_left(self._commits, (from_token, -1))
        end = bisect_left(self._commits, (to_token, -1))
        return max((offset for _, offset in self._commits[begin:end]), default=0)

    def acked_until(self, token: int, unix_ms: int) -> int:
        """Return the offset below which all was acked under a token by a time."""
        place = bisect_right(self._commit_times.get(token, []), unix_ms)
        return self._committed[token][place - 1] if place else 0

    def unmoved_below(self, token: int) -> int:
        """Return the offset below which all was acked before the token, and never reset."""
        moved = min((reset.to_offset for reset in self._resets), default=1 << 62)
        return min(self.acked_below(0, token), moved)

    def reset_between(self, begin_unix_ms: int, end_unix_ms: int) -> ResetEvent | None:
        """Return the reset to the lowest offset between two times."""
        found = [
            one
            for one in self._resets
            if begin_unix_ms - CLOCKS_APART_MS <= one.unix_ms <= end_unix_ms + CLOCKS_APART_MS
        ]
        return min(found, key=lambda one: one.to_offset, default=None)


def _explained(
    begin: int, end: int, before: OwnershipSpan, delivery: DeliveryEvent, ends: OwnershipEnds
) -> Iterator[RepeatedRange]:
    """Return the parts of [begin, end), each with its cause."""
    if before.token in (0, delivery.token):
        cause = RepeatCause.REPEATED if before.token else RepeatCause.UNOWNED
        yield _repeat((begin, end), cause, before, delivery, _SENTENCES[cause])
        return
    reset = ends.reset_between(before.last_unix_ms, delivery.unix_ms)
    if reset is not None and reset.to_offset < end:
        cut = max(begin, reset.to_offset)
        why = f"{reset.by} moved progress to {reset.to_offset}: {reset.reason}"
        yield _repeat((cut, end), RepeatCause.RESET, before, delivery, why)
        end = cut
    acked = min(ends.acked_below(before.token, delivery.token), end)
    if begin < acked:
        why = f"{_SENTENCES[RepeatCause.ACKED]} under a token from {before.token} on"
        yield _repeat((begin, acked), RepeatCause.ACKED, before, delivery, why)
        begin = acked
    if begin < end:
        cause = _cause(ends.of(before.token), delivery, ends)
        yield _repeat((begin, end), cause, before, delivery, _SENTENCES[cause])


def _cause(
    passing: OwnerChange | None, delivery: DeliveryEvent, ends: OwnershipEnds
) -> RepeatCause:
    """Return why messages in flight were delivered again, by how the ownership ended."""
    if passing is None:
        return RepeatCause.UNKNOWN
    if passing.manner in _OF_MANNER or passing.stolen:
        return _OF_MANNER.get(passing.manner, RepeatCause.CRASH)
    if passing.previous_client_id and passing.previous_client_id == passing.client_id:
        return RepeatCause.REACQUIRED
    if delivery.redelivered_count and ends.was_graceful(delivery.token):
        return RepeatCause.GRACEFUL
    if passing.manner == "GRACEFUL" or not delivery.redelivered_count:
        return RepeatCause.RETURNED
    return RepeatCause.UNFINISHED


_SENTENCES = {
    RepeatCause.CRASH: "the lease of the owner expired, or its process ended",
    RepeatCause.TIMEOUT: "the owner did not release the queue in time",
    RepeatCause.UNFINISHED: "the owner released the queue and had not handled these",
    RepeatCause.FORCED: "an operator forced the release of the queue",
    RepeatCause.REACQUIRED: "the owner acquired the queue again",
    RepeatCause.UNOWNED: "the queues of the group have no owner",
    RepeatCause.LEASE: "the lease of the remote client expired, or it gave the message back",
    RepeatCause.RETURNED: "the owner released the queue and had not started these",
    RepeatCause.REPEATED: "the owner pulled again, because a response was lost",
    RepeatCause.GRACEFUL: "a bug: marked as started, though the hand-over was graceful",
    RepeatCause.ACKED: "a bug: these were acknowledged before,",
    RepeatCause.UNKNOWN: "the events do not show how the ownership ended",
}


def _repeat(
    run: Range, cause: RepeatCause, before: OwnershipSpan, delivery: DeliveryEvent, why: str
) -> RepeatedRange:
    return RepeatedRange(
        *run,
        cause,
        before.client_id,
        before.token,
        before.last_unix_ms,
        delivery.client_id,
        delivery.token,
        delivery.unix_ms,
        delivery.redelivered_count,
        why,
    )


def _sent_back(begin: int, end: int, delivery: DeliveryEvent) -> RepeatedRange:
    """Return the repeat of messages in a retry topic, delivered in their own topic before."""
    unknown = OwnershipSpan(0, "", delivery.unix_ms)
    why = "a handler failed, and the message was sent to the retry topic"
    return _repeat((begin, end), RepeatCause.RETRY, unknown, delivery, why)


def _acked_unseen(
    begin: int, end: int, delivery: DeliveryEvent, ends: OwnershipEnds
) -> Iterator[RepeatedRange]:
    """Return the acknowledged part of the range; its first delivery is unknown."""
    end = min(end, ends.unmoved_below(delivery.token))
    if begin < end:
        unknown = OwnershipSpan(0, "", delivery.unix_ms)
        why = f"{_SENTENCES[RepeatCause.ACKED]} under an earlier token"
        yield _repeat((begin, end), RepeatCause.ACKED, unknown, delivery, why)


def _flagged(delivery: DeliveryEvent) -> RepeatedRange:
    """Return the repeat of a delivery marked as started whose first delivery is unknown."""
    unknown = OwnershipSpan(0, "", delivery.unix_ms)
    run = (delivery.first_offset, delivery.next_offset)
    return _repeat(run, RepeatCause.GRACEFUL, unknown, delivery, _SENTENCES[RepeatCause.GRACEFUL])


def _joined(
    pieces: Iterable[tuple[int, int, OwnershipSpan]],
) -> list[tuple[int, int, OwnershipSpan]]:
    """Join neighbours with the same owner."""
    joined: list[tuple[int, int, OwnershipSpan]] = []
    for begin, end, tenure in pieces:
        if joined and joined[-1][1] == begin and joined[-1][2] is tenure:
            joined[-1] = (joined[-1][0], end, tenure)
        else:
            joined.append((begin, end, tenure))
    return joined
