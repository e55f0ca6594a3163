"""A follower that can't follow its leader, for a reason that does not pass by itself."""

from __future__ import annotations

import logging

from prometheus_client import Gauge

from batonmq.errors import BatonError, DataLoss, DiskFull

log = logging.getLogger(__name__)

PROBLEM_CHARS_MAX = 300


class FollowProblem:
    """Says so: to people in the log and by a metric, and to the leader.

    Args:
        gauge: 1 while it is so.

    Attributes:
        problem: For the leader; empty if there is none.
    """

    def __init__(self, gauge: Gauge) -> None:
        self._gauge, self.problem = gauge, ""

    def met(self, error: BatonError) -> None:
        """A step was in vain. Errors that pass by themselves say nothing about the others."""
        if not isinstance(error, DataLoss | DiskFull):
            return
        if not self.problem.startswith(f"{error.reason}:"):
            log.error("can't follow a leader error=%s remedy=%r", error, error.remedy)
        self.problem = f"{error.reason}: {error.message}"[:PROBLEM_CHARS_MAX]
        self._gauge.set(1)

    def passed(self) -> None:
        """A step was made, and the next one can be."""
        if self.problem:
            log.warning("can follow a leader again")
        self.problem = ""
        self._gauge.set(0)
