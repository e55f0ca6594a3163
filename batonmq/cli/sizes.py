"""Sizes in bytes on the command line."""

from __future__ import annotations

import re

from batonmq.errors import InvalidArgument

_SIZE = re.compile(r"([0-9]{1,18})(B|KiB|MiB|GiB|TiB)?")
SIZE_MAX = 2**63 - 1
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def parse_bytes(text: str) -> int:
    """Return the bytes of a size, such as `512MiB`; a number without a unit is in bytes.

    Raises:
        InvalidArgument: the text is not a size, or the size is too large.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise InvalidArgument(
            f"{text!r} is not a size",
            remedy="Use a number and a unit, such as 500KiB, 64MiB or 1GiB, or a number of bytes.",
            facts={"field": "size"},
        )
    count = int(match[1]) * _UNITS[match[2] or "B"]
    if count > SIZE_MAX:
        raise InvalidArgument(
            f"{text!r} is more than {SIZE_MAX} bytes", facts={"field": "size", "limit": SIZE_MAX}
        )
    return count


def size_text(count: int) -> str:
    """Return bytes as text that `parse_bytes` reads, in the largest unit without a rest."""
    whole = (name for name in _UNITS if count and count % _UNITS[name] == 0)
    unit = max(whole, key=_UNITS.__getitem__, default="B")
    return f"{count // _UNITS[unit]}{unit}"
