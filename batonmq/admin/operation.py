"""What is recorded of a change that an operator makes to progress or ownership."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Operation:
    """One change.

    Attributes:
        by: Who does it, 1 to 255 characters.
        reason: Why, 1 to 1,024 characters.
        op_id: The same when the change is repeated, which then has no other effect; 1 to 64
            characters.
    """

    by: str
    reason: str
    op_id: str = field(default_factory=lambda: secrets.token_hex(8))
