"""Chooses what reads and writes the sockets of gRPC in this process.

gRPC 1.85 for Python leaves this to a pool of threads, its EventEngine. A message that arrives wakes
a thread of the pool. That thread wakes the polling thread of `grpc.aio`, and this one the event
loop. In earlier versions the polling thread read the socket itself, and it still can. See
docs/explanation/decisions/0065-the-polling-thread-reads-the-sockets.md.
"""

from __future__ import annotations

import os

import grpc

VARIABLE = "GRPC_EXPERIMENTS"
"""Read by gRPC when the process opens its first channel or server."""
POLLING_THREAD_READS = "-event_engine_client,-event_engine_listener"
FIRST_UNMEASURED = (1, 86)
"""First version of gRPC with which this was not measured: it may not know the names any more, and
would write an error for each of them."""


def choose() -> None:
    """Let the polling thread read and write sockets, unless the environment says something else.

    Any value of `GRPC_EXPERIMENTS`, also an empty one, is left as it is.
    """
    if _version() < FIRST_UNMEASURED:
        os.environ.setdefault(VARIABLE, POLLING_THREAD_READS)  # noqa: TID251  gRPC reads it


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in grpc.__version__.split(".")[:2])
