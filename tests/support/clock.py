"""A clock that a test moves ahead."""

from __future__ import annotations

from batonmq._common.clock import Clock


class MovableClock(Clock):
    """The real clock, with monotonic time that is `ahead_ms` ahead."""

    def __init__(self) -> None:
        self.ahead_ms = 0

    def monotonic_ms(self) -> int:
        return super().monotonic_ms() + self.ahead_ms


class WrongClock(Clock):
    """The real clock, with wall time that is behind; ahead if `behind_ms` is negative."""

    def __init__(self, behind_ms: int) -> None:
        self.behind_ms = behind_ms

    def unix_ms(self) -> int:
        return super().unix_ms() - self.behind_ms
