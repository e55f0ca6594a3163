"""The measured work: the same for every broker, and the figures that come of it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median, quantiles
from typing import Literal

from bench.peers.clients.task import Kind, Outcome
from bench.peers.figures import Column

MIB = 1024 * 1024
POST_RATE = 2_000


@dataclass(frozen=True, slots=True)
class Step:
    """One kind of work.

    Attributes:
        title: Name of the figures.
        kind: The work of the client process; `handle` also needs one that posts.
        topic: Topic; consumers read what an earlier step has sent to it.
        shown: Which figures are added: `rate`, `p50`, or `p50` and `p99`.
        cost: Name of the figures of CPU time; empty to leave them out.
    """

    title: str
    kind: Kind
    topic: str
    size: int
    shown: Literal["rate", "p50", "p50, p99"] = "rate"
    cost: str = ""

    @property
    def group(self) -> str:
        """Name of the consumer group: one of its own for every step that consumes."""
        return f"{self.topic}-{self.kind}"


@dataclass(frozen=True, slots=True)
class Measured:
    """An outcome, and the CPU time of the processes meanwhile."""

    outcome: Outcome
    server_cpu_s: float
    client_cpu_s: float


WARM_UP = (
    Step("warm-up: produce", "produce", "bench-warm", 100),
    Step("warm-up: consume", "consume", "bench-warm", 100),
)
"""Not counted, because servers with a compiler at run time are slow at first."""
MEMORY = (
    Step("produce 100 B", "produce", "bench-100", 100, cost="produced, 100 B"),
    Step("produce 1 KiB", "produce", "bench-1024", 1_024, cost="produced, 1 KiB"),
    Step(
        "one message per call, 2,000 in flight, 100 B",
        "send-each",
        "bench-each",
        100,
        cost="sent one per call",
    ),
    Step("consume 100 B, batches", "consume", "bench-100", 100, cost="consumed in batches, 100 B"),
    Step(
        "consume 1 KiB, batches", "consume", "bench-1024", 1_024, cost="consumed in batches, 1 KiB"
    ),
    Step("consume 100 B, one by one", "consume-each", "bench-100", 100, cost="consumed one by one"),
    Step("one send at a time", "send-one", "bench-one", 100, "p50"),
    Step(
        "send to handler at 2,000 msg/s",
        "handle",
        "bench-rate",
        100,
        "p50, p99",
        cost="at 2,000 msg/s",
    ),
)
FSYNC = (
    Step("produce 100 B, fsync", "produce", "bench-100", 100),
    Step("produce 1 KiB, fsync", "produce", "bench-1024", 1_024),
    Step("one send at a time, fsync", "send-one", "bench-one", 100, "p50"),
    Step("send to handler at 2,000 msg/s, fsync", "handle", "bench-rate", 100, "p50, p99"),
)

GROUPS = tuple(dict.fromkeys(step.group for step in (*WARM_UP, *MEMORY, *FSYNC)))
"""Names of all consumer groups."""


def add_speed(column: Column, step: Step, measured: Measured) -> None:
    """Add the rate or the delays of a round."""
    outcome = measured.outcome
    if step.shown == "rate":
        rate = outcome.count / outcome.seconds / 1_000
        column.add(step.title, rate, "k msg/s", more_is_better=True)
        return
    column.add(f"{step.title}, p50", median(outcome.delays_ms), "ms")
    if step.shown == "p50, p99":
        column.add(f"{step.title}, p99", quantiles(outcome.delays_ms, n=100)[-1], "ms")


def cost_rows(step: Step) -> tuple[str, str]:
    """Return the names of the CPU time of clients and of servers."""
    name = f"CPU per million {step.cost}"
    return f"{name}, clients", f"{name}, servers"


def add_cost(column: Column, step: Step, measured: Measured) -> None:
    """Add the CPU time per million messages of a round, if the step has this figure."""
    if step.cost:
        millions = measured.outcome.count / 1e6
        clients, servers = cost_rows(step)
        column.add(servers, measured.server_cpu_s / millions, "s")
        column.add(clients, measured.client_cpu_s / millions, "s")


def add_memory(column: Column, rss_bytes: int) -> None:
    """Add the memory of all servers of a round."""
    column.add("RSS of all servers after it", rss_bytes / MIB, "MiB")
