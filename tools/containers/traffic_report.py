"""The progress of the traffic during a container run, from `batonmq_server.demo.traffic`."""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import Process
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TrafficCount:
    """Sent and handled messages at a time of the loop's clock."""

    at_s: float
    sent: int
    handled: int


@dataclass(slots=True)
class TrafficReport:
    """The counts so far, and the verdict at the end."""

    process: Process
    seconds: list[TrafficCount] = field(default_factory=list)
    verdict: dict[str, Any] = field(default_factory=dict)

    async def follow(self) -> None:
        """Read the output of the process until it ends."""
        assert self.process.stdout is not None
        loop = asyncio.get_running_loop()
        async for line in self.process.stdout:
            result = json.loads(line)
            if "ok" in result:
                self.verdict = result
            else:
                self.seconds.append(TrafficCount(loop.time(), result["sent"], result["handled"]))
        await self.process.wait()

    @property
    def last(self) -> TrafficCount:
        """The latest counts."""
        return self.seconds[-1] if self.seconds else TrafficCount(0, 0, 0)

    async def flows(self, sent_more: int, timeout_s: float) -> None:
        """Wait until `sent_more` more are sent, and at most `sent_more` are not handled.

        Raises:
            TimeoutError: The traffic has ended, or does not reach this in time.
        """
        goal = self.last.sent + sent_more
        async with asyncio.timeout(timeout_s):
            while self.last.sent < goal or self.last.handled < self.last.sent - sent_more:
                if self.process.returncode is not None:
                    raise TimeoutError(
                        f"the traffic process has ended with status {self.process.returncode}"
                    )
                await asyncio.sleep(0.2)

    def stalled_s(self, what: str, since_s: float) -> float:
        """Return the longest time since `since_s` without growth of `what`, to a second.

        Args:
            what: `sent` or `handled`.
        """
        worst, moved_s, before = 0.0, since_s, -1
        for second in self.seconds:
            now = getattr(second, what)
            if second.at_s >= since_s:
                worst = max(worst, second.at_s - moved_s)
            if now > before:
                before, moved_s = now, max(second.at_s, since_s)
        return round(worst, 1)
