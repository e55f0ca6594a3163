"""`python -m batonmq_server.console`: run the console until SIGTERM or SIGINT."""

from __future__ import annotations

import sys

from batonmq._process.config import ConfigError, load
from batonmq_server.console.config import PREFIX, ConsoleSettings
from batonmq_server.console.server import serve

if __name__ == "__main__":
    if sys.argv[1:]:
        print(f"usage: python -m batonmq_server.console; settings: {PREFIX}_*", file=sys.stderr)
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    try:
        settings = load(ConsoleSettings, PREFIX)
    except ConfigError as error:
        print(f"console: {error}", file=sys.stderr)
        sys.exit(2)
    serve(settings)
