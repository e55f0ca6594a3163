"""Entry point of the `baton` command."""

from __future__ import annotations

import importlib
import io
import os
import sys
from pathlib import Path


def main() -> None:
    """Run the command line; exit with status 130 if it is interrupted before the command runs.

    gRPC prints a line for each failed TLS handshake, before the error message of the command.
    These lines are suppressed, except for `baton up`: its services inherit the setting, and their
    logs need the lines to tell which clients were rejected.
    """
    _prepare_streams()
    if "up" not in sys.argv:
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # noqa: TID251  gRPC reads it there
    try:
        importlib.import_module("batonmq.cli.app").baton(prog_name="baton")
    except KeyboardInterrupt:
        sys.exit(130)


def _prepare_streams() -> None:
    """Replace standard streams that are closed; escape what the encoding of the output lacks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
