"""Storage that leaves out a rule of producer ids; see `batonmq_server.storage.core.producers`."""

from __future__ import annotations

import pytest

from batonmq._core.records import Header
from batonmq_server.storage.core import producers
from batonmq_server.storage.core.producers import QueueKey, Share


def receipt_for_other_content(patch: pytest.MonkeyPatch) -> None:
    """A batch gets the receipt of another one with its sequence."""

    def same(header: Header, count: int, checksum: int) -> None: ...

    patch.setattr(producers, "_check_content", same)


def ids_without_owner(patch: pytest.MonkeyPatch) -> None:
    """A producer id belongs to each identity that uses it."""

    def share(_: Header, queue: QueueKey) -> Share:
        return 0, queue[0]

    patch.setattr(producers, "_share", share)
