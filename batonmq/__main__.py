"""The `baton` command, from its first moment: an interrupt while it still loads ends it quietly."""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    """Run the command line; status 130 if it is interrupted before the command has begun."""
    try:
        importlib.import_module("batonmq.cli").app(prog_name="baton")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
