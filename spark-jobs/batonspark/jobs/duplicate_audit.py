"""Report which messages a group was delivered more than once, and why.

See docs/reference/spark.md.
"""

from __future__ import annotations

from batonspark.audit import audit
from batonspark.reports import run_report

if __name__ == "__main__":
    run_report("duplicate_audit", audit)
