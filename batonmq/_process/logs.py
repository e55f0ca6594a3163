"""Log output of a process: structlog renders the records of the standard library's loggers.

A message is an event and its values: `"segment sealed topic=%s queue_id=%d"`.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog

LogFormat = Literal["auto", "json", "text"]


def configure(level: str, log_format: LogFormat, **fields: str) -> None:
    """Make the root logger write to standard error.

    Args:
        level: Name of the lowest level that is written.
        log_format: `auto` means text on a terminal and JSON elsewhere.
        fields: Fields of every line, such as service and node.
    """
    as_text = log_format == "text" or (log_format == "auto" and sys.stderr.isatty())

    def add_fields(
        _: object, __: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        return {**fields, **event}

    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_fields,
        structlog.processors.format_exc_info,
    ]
    last = structlog.dev.ConsoleRenderer() if as_text else structlog.processors.JSONRenderer()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
