"""Chooses what reads and writes the sockets of gRPC in this process.

gRPC 1.85 for Python leaves this to a pool of threads, its EventEngine. A message that arrives wakes
a thread of the pool. That thread wakes the polling thread of `grpc.aio`, and this one the event
loop. In earlier versions the polling thread read the socket itself, and it still can. See
docs/explanation/decisions/0065-the-polling-thread-reads-the-sockets.md.

gRPC reads the choice when it is imported, so this module must not import it.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

VARIABLE = "GRPC_EXPERIMENTS"
"""Read by gRPC when the process imports it."""
POLLING_THREAD_READS = "-event_engine_client,-event_engine_listener"
FIRST_UNMEASURED = (1, 86)
"""First version of gRPC with which this was not measured: it may not know the names any more, and
would write an error for each of them."""


def choose() -> None:
    """Let the polling thread read and write sockets, unless the environment says something else.

    Call it before gRPC is imported; later it has no effect on this process. Any value of
    `GRPC_EXPERIMENTS`, also an empty one, is left as it is.
    """
    if grpc_version() < FIRST_UNMEASURED:
        os.environ.setdefault(VARIABLE, POLLING_THREAD_READS)  # noqa: TID251  gRPC reads it


def grpc_version() -> tuple[int, ...]:
    """Return the installed version of gRPC, without importing it; very high if it is unknown."""
    unknown = (99,)
    package = find_spec("grpc")
    if package is None or package.origin is None:
        return unknown
    try:  # importlib.metadata knows it, too, but takes 30 ms
        text = Path(package.origin).with_name("_grpcio_metadata.py").read_text(encoding="utf-8")
    except OSError:
        return unknown
    found = re.search(r"(\d+)\.(\d+)", text)
    return tuple(int(part) for part in found.groups()) if found else unknown
