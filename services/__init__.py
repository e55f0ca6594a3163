"""The services of BatonMQ, and the programs that run them."""

from __future__ import annotations

import batonmq  # noqa: F401  first: it sets what gRPC reads when it is imported
