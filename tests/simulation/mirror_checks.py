"""What is known of a run of mirrors outside its clusters, and the promises that it is judged by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from batonmq._consumer.message import ReceivedMessage
from batonmq._core.mirror_map import OffsetMap
from batonmq._core.queues import QueueRef
from batonmq._core.ranges import Range, contains, subtract
from batonmq._core.transactions import PendingTransaction, TransactionState
from tests.simulation.run_record import RunRecord

Log = Mapping[QueueRef, Sequence[ReceivedMessage]]
"""All messages of a topic by queue, in the order of their offsets."""
Progress = Mapping[QueueRef, list[Range]]
"""The handled offsets of a group by queue."""


class Handling(NamedTuple):
    """A call of a handler: cluster, time, and whether it was a copy that had been sent back."""

    cluster: str
    time_s: float
    sent_back: bool


@dataclass(slots=True)
class MirrorsRun(RunRecord):
    """What is known of a run outside its clusters.

    Attributes:
        produced: Numbers that were sent, or may have been sent, to each cluster.
        confirmed: Numbers with a receipt, by cluster.
        booked, refused: Numbers whose transactions are to be committed, or rolled back.
        handled_s: When a handler of any cluster had first handled a number.
        calls: All calls of handlers by number.
        sent_back: Numbers whose handler had failed in a cluster.
        seen: Progress of the standby group, by cluster, whenever it had changed; with the time.
        failovers: Numbers that were handled by the progress of a standby at its failover, with
            the cluster and the time.
    """

    produced: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    confirmed: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    booked: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    handled_s: dict[int, float] = field(default_factory=dict)
    calls: defaultdict[int, list[Handling]] = field(default_factory=lambda: defaultdict(list))
    sent_back: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    seen: list[tuple[float, Progress]] = field(default_factory=list)
    failovers: list[tuple[str, float, set[int]]] = field(default_factory=list)

    def state_of(self, pending: PendingTransaction) -> TransactionState:
        """Answer a check."""
        number = number_of(pending.message)
        if number in self.booked:
            return TransactionState.COMMIT
        return TransactionState.ROLLBACK if number in self.refused else TransactionState.UNKNOWN

    def note_progress(self, time_s: float, progress: Progress) -> None:
        """Note the progress of a standby group."""
        if not self.seen or self.seen[-1][1] != progress:
            self.seen.append((time_s, progress))

    def judge_confirmed(self, cluster: str, log: Log) -> None:
        """Check that a cluster has each message with a receipt."""
        stored = {number_of(one) for queue in log.values() for one in queue}
        for number in sorted(self.confirmed[cluster] - stored):
            self.fail("confirmed", f"{number} has a receipt, and {cluster} does not have it")

    def judge_copies(
        self, source: str, logs: Mapping[str, Log], target: str, *, all_: bool
    ) -> None:
        """Check that a target has the messages of a source: each once, in order, as they were.

        Args:
            all_: Whether all messages have to be there; otherwise the first ones of each queue.
        """
        produced, used = self.produced[source], dict[QueueRef, QueueRef]()
        homes = {number_of(one): queue for queue, log in logs[target].items() for one in log
                 if number_of(one) in produced}  # fmt: skip
        for here, log in logs[source].items():
            wanted = [one for one in log if number_of(one) in produced]
            there = {homes[number_of(one)] for one in wanted if number_of(one) in homes}
            if len(there) > 1:
                self.fail("queue", f"{here} was mirrored to {sorted(there)}")
            for queue in there:
                if queue in used:
                    self.fail("queue", f"{queue} has messages of {here} and {used[queue]}")
                elif queue != here and here in logs[target]:
                    self.fail("queue", f"{here} was mirrored to {queue}")
                used[queue] = here
            found = [one for queue in there for one in logs[target][queue]
                     if number_of(one) in produced]  # fmt: skip
            self._judge_queue(f"{here} from {source} to {target}", wanted, found, all_=all_)

    def _judge_queue(
        self,
        name: str,
        wanted: Sequence[ReceivedMessage],
        found: Sequence[ReceivedMessage],
        *,
        all_: bool,
    ) -> None:
        numbers = [number_of(one) for one in found]
        if len(set(numbers)) < len(numbers):
            twice = sorted({number for number in numbers if numbers.count(number) > 1})
            self.fail("once", f"{name}: {twice[:5]}")
        expected = [number_of(one) for one in wanted]
        if len(numbers) > len(expected):
            self.fail("once", f"{name}: {len(numbers)} of {len(expected)} messages")
        if all_ and len(numbers) < len(expected):
            lost = sorted(set(expected) - set(numbers))
            self.fail("lost", f"{name}: {len(lost)} of {len(expected)}, {lost[:5]}")
        pairs = list(zip(numbers, expected, strict=False))
        wrong = [index for index, (number, other) in enumerate(pairs) if number != other]
        if wrong:
            text = f"{name}: {pairs[wrong[0]][0]} at {wrong[0]}, and not {pairs[wrong[0]][1]}"
            self.fail("order", text)
        for here, there in zip(wanted, found, strict=False):
            if number_of(here) == number_of(there) and _content(here) != _content(there):
                self.fail("same", f"{_content(here)} became {_content(there)}")
        self.counts["mirrored"] += len(numbers)

    def judge_map(self, name: str, runs: OffsetMap, here: Sequence[ReceivedMessage],
                  there: Sequence[ReceivedMessage]) -> None:  # fmt: skip
        """Check that a map names the same messages of both logs."""
        for run in runs.runs:
            source = [number_of(one) for one in here[run.source_offset : run.source_end]]
            target = [number_of(one) for one in there[run.target_offset : run.target_end]]
            if source != target or len(source) != run.message_count:
                self.fail("map", f"{name}: {run} names {source[:3]} and {target[:3]}")
            self.counts["mapped"] += len(source)
        self.counts["runs of maps"] += len(runs)

    def judge_seen(self, cluster: str, log: Log) -> None:
        """Check all progress of a standby: nothing that was not handled then, and never back.

        What its own cluster had sent back before waits for its retry there.
        """
        before: Progress = {}
        for time_s, progress in self.seen:
            for queue, ranges in progress.items():
                if gone := subtract(before.get(queue, []), ranges):
                    self.fail("back", f"{gone} of {queue} at {time_s:.1f} s")
            before = progress
            for number in sorted(self._numbers(progress, log) - self.sent_back[cluster]):
                if self.handled_s.get(number, float("inf")) > time_s:
                    self.fail("past", f"{number} counts as handled at {time_s:.1f} s")
        self.counts["changes of progress"] += len(self.seen)
        self.seen.clear()

    def _numbers(self, progress: Progress, log: Log) -> set[int]:
        """Return the numbers that progress says are handled."""
        for queue, ranges in progress.items():
            end = len(log.get(queue, ()))
            if ranges and ranges[-1][1] > end:
                self.fail("past", f"{ranges[-1]} of {queue}, which ends at {end}")
        return handled_numbers(progress, log)

    def judge_calls(self) -> None:
        """Check that nothing is handled again that was handled by the progress of a failover.

        What a cluster has sent back is delivered by its retry topic, whatever happened elsewhere.
        """
        for cluster, time_s, numbers in self.failovers:
            for number in sorted(numbers):
                for call in self.calls[number]:
                    if call.time_s > time_s and not call.sent_back:
                        self.fail("again", f"{number} at {call}, after {time_s:.1f} in {cluster}")
                        break

    def judge_handled(self, logs: Iterable[Log]) -> None:
        """Check that everything was handled in some cluster."""
        stored = {number_of(one) for log in logs for queue in log.values() for one in queue}
        for number in sorted(stored - self.handled_s.keys()):
            self.fail("handled", f"{number} is stored, and was never handled")
        self.counts["handled"] += len(self.handled_s)


def handled_numbers(progress: Progress, log: Log) -> set[int]:
    """Return the numbers of a log that progress says are handled."""
    return {
        number_of(one)
        for queue, messages in log.items()
        for one in messages
        if contains(progress.get(queue, []), one.offset)
    }


def number_of(message: Any) -> int:
    """Return the number in a message."""
    return int(message.body.partition(b" ")[0])


def _content(message: ReceivedMessage) -> tuple[object, ...]:
    return (message.body[:20], len(message.body), message.tag, message.keys,
            dict(message.properties), message.ordering_key, message.born_unix_ms)  # fmt: skip
