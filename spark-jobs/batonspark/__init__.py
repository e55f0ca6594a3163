"""Answers from the streams that BatonMQ's services tell of themselves, by Spark."""

from __future__ import annotations

import batonmq  # noqa: F401  first: it sets what gRPC reads when it is imported
