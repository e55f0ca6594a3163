"""A file that a command writes: it is there in full, or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def replaced(path: Path) -> Iterator[TextIO]:
    """Open a new text file beside `path` that replaces `path` at the end.

    After an exception `path` is unchanged. What is no regular file, such as a pipe or a terminal,
    can't be replaced, so it is written directly.
    """
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    path = path.resolve()  # the target of a link is replaced, not the link
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    partial = Path(name)
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            yield file
        partial.chmod(path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
