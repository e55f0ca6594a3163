"""Where refused calls and calls of operators are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from google.protobuf import text_format
from google.protobuf.message import Message

from batonmq.errors import BatonError
from batonmq_server.runtime.access.permissions import Permission

REQUEST_CHARACTERS_MAX = 2_000
MASKED = "(masked)"
_SECRETS = ("secret",)
"""Fields of requests that no record may contain."""


class AuditSink(Protocol):
    """Records calls. It never waits, and no caller can fill it."""

    def refused(self, call: str, identity: str, error: BatonError) -> None:
        """Record a call that was refused for missing permissions or credentials.

        Args:
            call: Full path of the method.
            identity: Identity of the caller; empty if it is not known.
        """
        ...

    def operated(
        self, call: str, identity: str, needs: Sequence[Permission], request: object, reason: str
    ) -> None:
        """Record a call that needs the role admin, with its outcome.

        Args:
            reason: OK, or the reason of the error.
        """
        ...


def request_text(request: object) -> str:
    """Return the beginning of a request in one line; a secret that the caller chose is masked."""
    if not isinstance(request, Message):
        return ""
    given = [name for name in _SECRETS if getattr(request, name, "")]
    if given:
        shown = type(request)()
        shown.CopyFrom(request)
        for name in given:
            setattr(shown, name, MASKED)
        request = shown
    return text_format.MessageToString(request, as_one_line=True)[:REQUEST_CHARACTERS_MAX]
