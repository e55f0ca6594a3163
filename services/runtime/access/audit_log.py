"""The audit log of a process: refused calls, and calls that need the role admin, as JSON lines.

    {"time": "2026-01-31T08:00:00.000Z", "kind": "refused", "service": "storage/broker-a",
     "call": "/baton.storage.v1.StorageService/Append", "identity": "shop",
     "reason": "PERMISSION_DENIED", "message": "shop lacks produce on topic:orders", "count": 1}
    {"time": "...", "kind": "operated", "service": "...", "call": "...", "identity": "carol",
     "needs": ["admin on group:billing"], "reason": "OK", "request": "group: \\"billing\\" ..."}

Its size is bounded: five files, of which the oldest is replaced. A caller can't fill it: refusals
of one identity, call and reason within a minute share a line, with their count.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler

from batonmq._common.clock import Clock
from batonmq.errors import BatonError
from batonmq_server.runtime.access.audit import request_text
from batonmq_server.runtime.access.permissions import Permission
from batonmq_server.runtime.log_limiter import LogLimiter

FILES = 5
LINE_INTERVAL_MS = 60_000


class AuditLog:
    """Appends lines to a file; see the module and AuditSink.

    Args:
        path: The file; the older ones are `path.1` to `path.4`.
        bytes_max: Greatest size of all files together.
        source: Service and node.
    """

    def __init__(self, path: str, bytes_max: int, source: str, clock: Clock) -> None:
        self._source, self._clock = source, clock
        self._limiter = LogLimiter(clock.monotonic_ms, LINE_INTERVAL_MS)
        self._file = RotatingFileHandler(
            path, maxBytes=bytes_max // FILES, backupCount=FILES - 1, encoding="utf-8", delay=True
        )

    def refused(self, call: str, identity: str, error: BatonError) -> None:
        """See AuditSink."""
        count = self._limiter.count((call, identity, error.reason))
        if count:
            facts = {"reason": error.reason, "message": error.message, "count": count}
            self._write("refused", call, identity, facts)

    def operated(
        self, call: str, identity: str, needs: Sequence[Permission], request: object, reason: str
    ) -> None:
        """See AuditSink."""
        facts = {
            "needs": [str(one) for one in needs],
            "reason": reason,
            "request": request_text(request),
        }
        self._write("operated", call, identity, facts)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, kind: str, call: str, identity: str, facts: Mapping[str, object]) -> None:
        now = datetime.fromtimestamp(self._clock.unix_ms() / 1000, UTC)
        line = {
            "time": now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "kind": kind,
            "service": self._source,
            "call": call,
            "identity": identity,
            **facts,
        }
        text = json.dumps(line, ensure_ascii=True)
        record = logging.LogRecord("audit", logging.INFO, "", 0, text, None, None)
        self._file.handle(record)
