"""Background tasks of mutants."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def in_background(work: Coroutine[Any, Any, Any]) -> None:
    """Start a task whose result is ignored."""
    asyncio.get_running_loop().create_task(work)
