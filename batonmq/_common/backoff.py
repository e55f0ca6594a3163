"""Delays between retries."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Delays that double from `first_ms` to `delay_ms_max`, each with jitter from half to full."""

    first_ms: int = 100
    delay_ms_max: int = 5_000

    def delay_ms(self, attempt: int, random: Random, at_least_ms: int = 0) -> int:
        """Return the delay before the next try, in milliseconds.

        Args:
            attempt: Number of retries so far, from 0.
            at_least_ms: Lower bound, such as the server's advice `retry_after_ms`.
        """
        ceiling = min(self.first_ms << min(attempt, 20), self.delay_ms_max)
        return max(at_least_ms, random.randint(ceiling // 2, ceiling))
