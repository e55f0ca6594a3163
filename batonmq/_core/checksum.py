"""CRC-32C, the checksum of batches and of what the services write.

The package crc32c is an extension in C and a command. An import of the package also imports the
command and reads its own metadata, which takes 27 ms: the first message of a program would wait for
that. So only the extension is loaded, in less than a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from typing import cast

_PACKAGE, _EXTENSION = "crc32c", "crc32c._crc32c"
Checksum = Callable[..., int]
"""Takes bytes and the checksum of the bytes before them, 0 by default; returns that of both."""


def extension_alone() -> Checksum | None:
    """Return the function of the extension; None if it is not where the import system looks."""
    package = PathFinder.find_spec(_PACKAGE)
    folders = package.submodule_search_locations if package is not None else None
    spec = PathFinder.find_spec(_EXTENSION, folders) if folders is not None else None
    if spec is None or spec.loader is None:
        return None  # as in a program that was packed into one file
    extension = module_from_spec(spec)
    spec.loader.exec_module(extension)
    return cast("Checksum | None", getattr(extension, "crc32c", None))


def _checksum() -> Checksum:
    if (alone := extension_alone()) is not None:
        return alone
    from crc32c import crc32c  # noqa: PLC0415  only without the extension

    return crc32c


crc32c = _checksum()
