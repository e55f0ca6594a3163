"""`python -m batonmq_server.scaler`: serve KEDA until SIGTERM or SIGINT."""

from __future__ import annotations

import sys

from batonmq._process.config import ConfigError, load
from batonmq.errors import InvalidArgument
from batonmq_server.scaler.app import serve
from batonmq_server.scaler.config import PREFIX, ScalerSettings

if __name__ == "__main__":
    if sys.argv[1:]:
        print(f"usage: python -m batonmq_server.scaler; settings: {PREFIX}_*", file=sys.stderr)
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    try:
        serve(load(ScalerSettings, PREFIX))
    except (ConfigError, InvalidArgument) as error:
        print(f"scaler: {error}", file=sys.stderr)
        sys.exit(2)
