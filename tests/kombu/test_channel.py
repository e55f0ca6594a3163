"""Goal: a body that is no message of Kombu becomes a dead letter, and ends no worker.

Method: a channel without a connection, whose messages to the client process are recorded.
"""

from __future__ import annotations

from typing import Any

import pytest

from batonmq._kombu.inbox import Delivery
from batonmq.kombu import Channel


class RecordedChannel(Channel):
    """A channel without a connection.

    Attributes:
        told: What the client process was told.
    """

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []

    def _tell(self, op: str, **fields: Any) -> None:
        self.told.append((op, fields))


@pytest.mark.parametrize(
    "body",
    [
        b"\xff" * 4 * 1024 * 1024,
        b"[]",
        b"[" * 200_000,
        b'{"body": "", "properties": {"priority": {"__type__": "decimal", "__value__": "x"}}}',
    ],
    ids=["no text", "no object", "too deep", "no decimal"],
)
def test_a_body_that_is_no_message_becomes_a_dead_letter(body: bytes) -> None:
    channel = RecordedChannel()
    assert channel._message(Delivery(1, 7, False, body), no_ack=False) is None
    ((op, fields),) = channel.told
    assert (op, fields["tag"]) == ("reject", 7)
    assert fields["reason"].startswith("no message of Kombu: ")
    assert len(fields["reason"]) < 300
