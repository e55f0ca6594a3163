"""Sets the environment variables that gRPC reads when it is imported.

So this module must not import gRPC. A variable that is set already, also to an empty value, is left
as it is.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

EXPERIMENTS = "GRPC_EXPERIMENTS"
"""gRPC 1.85 for Python leaves sockets to a pool of threads, its EventEngine. A message that arrives
wakes a thread of the pool. That thread wakes the polling thread of `grpc.aio`, and this one the
event loop. In earlier versions the polling thread read the socket itself, and it still can. See
docs/explanation/decisions/0065-the-polling-thread-reads-the-sockets.md."""
POLLING_THREAD_READS = "-event_engine_client,-event_engine_listener"
FIRST_UNMEASURED = (1, 86)
"""First version of gRPC with which this was not measured: it may not know the names any more, and
would write an error for each of them."""
FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"
"""What gRPC does at forks does not work with `grpc.aio`: children of a program with an open client,
such as those of a ProcessPoolExecutor, crash now and then."""
NAMES = frozenset({EXPERIMENTS, FORK_SUPPORT})


def prepare() -> None:
    """Set the variables. After gRPC was imported this has no effect on this process."""
    environment = os.environ  # noqa: TID251  gRPC reads it
    environment.setdefault(FORK_SUPPORT, "0")
    if grpc_version() < FIRST_UNMEASURED:
        environment.setdefault(EXPERIMENTS, POLLING_THREAD_READS)


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
