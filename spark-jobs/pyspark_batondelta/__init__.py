"""Register `format("batondelta")` in every Spark session that can import this package."""

from __future__ import annotations

from batonspark.sink_delta import DeltaDataSource as DefaultSource

__all__ = ["DefaultSource"]
