"""The problem because of which a follower can't follow its leader until an operator acts."""

from __future__ import annotations

import logging

from prometheus_client import Gauge

from batonmq.errors import BatonError, DataLoss, DiskFull

log = logging.getLogger(__name__)

PROBLEM_CHARS_MAX = 300


class FollowProblem:
    """Reports the problem: in the log, by a metric, and to the leader.

    Args:
        gauge: Set to 1 while there is a problem, else to 0.

    Attributes:
        problem: Text for the leader; empty if there is none.
    """

    def __init__(self, gauge: Gauge) -> None:
        self._gauge, self.problem = gauge, ""

    def report(self, error: BatonError) -> None:
        """Record a step that failed. Errors that pass by themselves change nothing."""
        if not isinstance(error, DataLoss | DiskFull):
            return
        if not self.problem.startswith(f"{error.reason}:"):
            log.error("can't follow a leader error=%s remedy=%r", error, error.remedy)
        self.problem = f"{error.reason}: {error.message}"[:PROBLEM_CHARS_MAX]
        self._gauge.set(1)

    def clear(self) -> None:
        """Record a step that succeeded: the follower can follow."""
        if self.problem:
            log.warning("can follow a leader again")
        self.problem = ""
        self._gauge.set(0)
