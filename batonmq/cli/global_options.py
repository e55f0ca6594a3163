"""Values of the options that stand before the command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from batonmq.cli.output import OutputFormat

if TYPE_CHECKING:
    from batonmq._connection.security import Security

DEFAULT_NAMESERVER = "127.0.0.1:9876"


@dataclass(frozen=True, slots=True)
class GlobalOptions:
    """Options before the command, or else the context; options after the command win.

    Attributes:
        by: Name that is recorded with changes; empty for user@host.
        config: File of the contexts.
        security: TLS and credentials; None for a connection without TLS.
    """

    nameserver: str
    form: OutputFormat
    by: str = ""
    config: Path = Path()
    security: Security | None = None
