"""Report the hand-overs of queues, with a page of plots.

See docs/reference/spark.md.
"""

from __future__ import annotations

from batonspark.handovers import report
from batonspark.reports import run_report

if __name__ == "__main__":
    run_report("handover_report", report)
