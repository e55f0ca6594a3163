"""How far long work is: on standard error, only where a person can see it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

_SHOWN_PER_S = 4


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """What to call with the number of things done so far.

    Args:
        what: Such as "messages sent".
        total: How many there will be; None if nobody knows.
    """
    columns = [TextColumn("{task.completed:,.0f} {task.description}"), TimeElapsedColumn()]
    bar = [BarColumn()] if total is not None else []
    with Progress(
        *columns,
        *bar,
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
        redirect_stdout=sys.stdout.isatty(),  # else what is printed would end on standard error
        refresh_per_second=_SHOWN_PER_S,
    ) as shown:
        task = shown.add_task(what, total=total)
        yield lambda done: shown.update(task, completed=done)
