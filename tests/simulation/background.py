"""Work that a mutant does beside what it should do."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def in_background(work: Coroutine[Any, Any, Any]) -> None:
    """Begin something that nobody waits for."""
    asyncio.get_running_loop().create_task(work)
