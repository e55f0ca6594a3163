"""Where on this machine a process runs."""

from __future__ import annotations

from dataclasses import dataclass

from batonmq_server.local.ports import HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A host of its own, for a cluster whose processes do not share one.

    Attributes:
        host: Address the process listens at.
        launcher: Goes before its command: the full path of a program, and arguments, that sees to
            the surroundings and then becomes what it is given, such as `nsenter --net=...`.
    """

    host: str = HOST
    launcher: tuple[str, ...] = ()


LOOPBACK = Place()
