"""Services that leave out a check of identities; see protocol section 3."""

from __future__ import annotations

from typing import Any

import pytest

from batonmq._core.queues import Incarnation
from batonmq_server.offsets.core.progress import Progress
from batonmq_server.runtime.access import owner


def token_of_every_identity(patch: pytest.MonkeyPatch) -> None:
    """Offsets accepts a token from every caller."""

    def check_caller(self: Progress, token: int, caller: int) -> None: ...

    patch.setattr(Progress, "check_caller", check_caller)


def unknown_owner_matches_no_owner(patch: pytest.MonkeyPatch) -> None:
    """Records from before access control belong to another incarnation."""

    def matches(self: Incarnation, other: Incarnation | None) -> bool:
        return self == other

    patch.setattr(Incarnation, "matches", matches)


def incarnation_of_every_identity(patch: pytest.MonkeyPatch) -> None:
    """A call with the number of an incarnation is accepted from every caller."""
    real = owner.sign

    def sign(request: Any, identity: str) -> None:
        real(request, identity)
        if "incarnation" in request.DESCRIPTOR.fields_by_name and request.HasField("incarnation"):
            request.incarnation.owner = 0

    patch.setattr(owner, "sign", sign)
