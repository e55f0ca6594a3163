"""The record of a change that an operator makes to progress or ownership."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Operation:
    """Author, reason and id of one change.

    Attributes:
        by: Name of the operator, 1 to 255 characters.
        reason: Reason of the change, 1 to 1,024 characters.
        op_id: Id of the change, 1 to 64 characters. A repeated call with the same id has no
            further effect.
    """

    by: str
    reason: str
    op_id: str = field(default_factory=lambda: secrets.token_hex(8))
