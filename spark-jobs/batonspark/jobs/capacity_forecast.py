"""Report how fast topics grow, when disks are full and how many queues are needed.

See docs/reference/spark.md.
"""

from __future__ import annotations

from batonspark.capacity import forecast
from batonspark.reports import run_report

if __name__ == "__main__":
    run_report("capacity_forecast", forecast)
