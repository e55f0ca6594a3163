"""How queues changed hands, as a page with plots; see docs/reference/spark.md."""

from __future__ import annotations

from batonspark.handovers import report
from batonspark.reports import run_report

if __name__ == "__main__":
    run_report("handover_report", report)
