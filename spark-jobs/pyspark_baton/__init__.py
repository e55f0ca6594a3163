"""Register `format("baton")` in every Spark session that can import this package."""

from __future__ import annotations

from batonspark.source import BatonDataSource as DefaultSource

__all__ = ["DefaultSource"]
