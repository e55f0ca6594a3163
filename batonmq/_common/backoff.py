"""How long to wait before the next try."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Delays that double from `first_ms` to `delay_ms_max`, each with full jitter above half."""

    first_ms: int = 100
    delay_ms_max: int = 5_000

    def delay_ms(self, attempt: int, random: Random, at_least_ms: int = 0) -> int:
        """Delay before try number `attempt` + 1, in milliseconds.

        Args:
            attempt: Failed tries so far, from 0.
            at_least_ms: The server's advice (`retry_after_ms`); never waited less.
        """
        ceiling = min(self.first_ms << min(attempt, 20), self.delay_ms_max)
        return max(at_least_ms, random.randint(ceiling // 2, ceiling))
