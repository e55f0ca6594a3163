"""What a client process has to do, and its conversation with the bench.

The bench starts a client process with a task in its arguments. The process prints `ready` when the
measured work can begin, waits for a line on standard input, does the work, prints its outcome and
waits until standard input is closed. So the bench reads the CPU time of a process that is running.
"""

from __future__ import annotations

import json
import struct
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Literal

Kind = Literal[
    "create", "produce", "send-each", "send-one", "consume", "consume-each", "post", "handle"
]
STAMP = struct.Struct(">d")
SENDS_IN_FLIGHT = 2_000
TOPICS = ("bench-warm", "bench-100", "bench-1024", "bench-each", "bench-one", "bench-rate")
PARTITIONS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The work of one client process.

    Attributes:
        kind: `create` creates all topics. `produce` sends with bulk calls, `send-each` with one
            call per message and 2,000 in flight, `send-one` one after the other. `consume` receives
            batches, `consume-each` single messages. `post` sends at a rate, `handle` receives that.
        address: Address of the servers.
        topic: Name of the topic.
        group: Name of the consumer group.
        size: Bytes of a body.
        fsync: Whether a message must be on the disk before its receipt.
        seconds: Duration of the work; a consumer ends earlier when it has received all messages.
        count: Messages in the topic, for consumers, or to send, for `post`.
        rate: Messages per second, for `post`.
    """

    kind: Kind
    address: str
    topic: str = ""
    group: str = ""
    size: int = 0
    fsync: bool = False
    seconds: float = 0
    count: int = 0
    rate: int = 0

    def encode(self) -> str:
        """Return the task as an argument of a process."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Task:
        """Return the task in an argument."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a client process.

    Attributes:
        count: Messages that were sent or received during `seconds`.
        seconds: Duration of the measured work.
        delays_ms: Time of each send, or from each send to the handler; empty for other kinds.
    """

    count: int
    seconds: float
    delays_ms: Sequence[float] = ()


def say(kind: str, **values: object) -> None:
    """Print a line for the bench."""
    print(json.dumps({"kind": kind, **values}), flush=True)


class Work:
    """The measured part of a task: it begins when the bench allows it, and is then counted."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.delays_ms: list[float] = []
        self._begin_s: float | None = None
        self._end_s = 0.0
        self._count = 0
        self._ignored = 0

    def begin(self) -> None:
        """Report that the work can begin, and wait for the bench."""
        say("ready")
        sys.stdin.readline()
        self._begin_s = self._end_s = monotonic()

    def begin_later(self) -> threading.Event:
        """Report that the work can begin; return an event that is set when the bench allows it."""
        allowed = threading.Event()

        def wait() -> None:
            sys.stdin.readline()
            self._begin_s = self._end_s = monotonic()
            allowed.set()

        say("ready")
        threading.Thread(target=wait, daemon=True).start()
        return allowed

    def is_over(self) -> bool:
        """Return whether the time of the task is over."""
        assert self._begin_s is not None, "the work has not begun"
        return monotonic() >= self._begin_s + self.task.seconds

    def add(self, count: int) -> None:
        """Count messages that are sent."""
        self._count += count
        self._end_s = monotonic()

    def received(self, bodies: Sequence[bytes]) -> bool:
        """Count a received batch; return whether the work is complete.

        The first batch begins the work and is not counted, because it includes the time in which
        the consumer joins its group.
        """
        if not sum(map(len, bodies)):  # each body is read
            return False
        if self._begin_s is None:
            self._ignored = len(bodies)
            self.begin()
        else:
            self.add(len(bodies))
        is_complete = self._count + self._ignored >= self.task.count
        return is_complete or (self._count > 0 and self.is_over())

    def handled(self, body: bytes) -> bool:
        """Note the delay of a message with a stamp; return whether it was the last one.

        Messages without a stamp cost CPU time too, so they count, but their delay does not.
        """
        (sent_s,) = STAMP.unpack_from(body)
        now_s = monotonic()
        if self._begin_s is None:
            self.begin()
            return False
        self.add(1)
        if sent_s:
            self.delays_ms.append(1_000 * (now_s - sent_s))
        return len(self.delays_ms) >= self.task.count

    def finish(self) -> None:
        """Report the outcome, and wait until the bench has read the CPU time."""
        begin_s = self._end_s if self._begin_s is None else self._begin_s
        seconds = self._end_s - begin_s
        say("done", count=self._count, seconds=seconds, delays_ms=self.delays_ms)
        sys.stdin.read()
