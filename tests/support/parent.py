"""A parent process that is killed, to test that its child ends with it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from tests.support.conditions import lives, until


async def assert_child_is_killed_with_its_parent(
    program: str, *arguments: str, is_ready: Callable[[], object] = lambda: True
) -> None:
    """Run a Python program that prints the pid of its child; kill it when the child is ready."""
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, *arguments, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    await until(is_ready)
    assert lives(pid)
    parent.kill()
    await parent.wait()
    await until(lambda: not lives(pid))
