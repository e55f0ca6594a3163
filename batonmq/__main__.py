"""The `baton` command, from its first moment: an interrupt while it still loads ends it quietly."""

from __future__ import annotations

import importlib
import os
import sys


def main() -> None:
    """Run the command line; status 130 if it is interrupted before the command has begun.

    gRPC would write a line for every handshake that fails, before the one that says what to do. Of
    services that `baton up` starts, these lines are in their logs: they tell who was not let in.
    """
    if "up" not in sys.argv:
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # noqa: TID251  gRPC reads it there
    try:
        importlib.import_module("batonmq.cli").app(prog_name="baton")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
