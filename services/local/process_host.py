"""The network address and launcher of a process of a local cluster."""

from __future__ import annotations

from dataclasses import dataclass

from batonmq_server.local.ports import HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHost:
    """A host of its own, for clusters whose processes do not share one.

    Attributes:
        address: Address the process listens at.
        launcher: Command that goes before the process's command: the full path of a program and
            its arguments, such as `nsenter --net=...`. It must exec the command that follows.
    """

    address: str = HOST
    launcher: tuple[str, ...] = ()


LOOPBACK = ProcessHost()
