"""Entry point of the `baton` command."""

from __future__ import annotations

import importlib
import os
import sys


def main() -> None:
    """Run the command line; exit with status 130 if it is interrupted before the command runs.

    gRPC prints a line for each failed TLS handshake, before the error message of the command.
    These lines are suppressed, except for `baton up`: its services inherit the setting, and their
    logs need the lines to tell which clients were rejected.
    """
    if "up" not in sys.argv:
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # noqa: TID251  gRPC reads it there
    try:
        importlib.import_module("batonmq.cli.app").baton(prog_name="baton")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
