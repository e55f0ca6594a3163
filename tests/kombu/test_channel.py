"""Goal: a body that is no message of Kombu becomes a dead letter, and ends no worker; a queue whose
consumer has ended can be read again.

Method: a channel without a connection, whose messages to the client process are recorded.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from batonmq._kombu.inbox import Delivery, Inbox
from batonmq.errors import TopicNotFound
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


def test_get_joins_again_after_its_consumer_has_ended() -> None:
    joined = list[Inbox]()

    class Getter(RecordedChannel):
        connection: Any = SimpleNamespace(consumers={})
        _link: Any = SimpleNamespace(
            alive=True, options=SimpleNamespace(get_timeout_ms=1), remove_inbox=lambda _: None
        )

        def _call(self, op: str, body: bytes = b"", **fields: Any) -> Any:
            self._tell(op, **fields)

        def _join(self, queue: str, inbox: Inbox, *, by_get: bool) -> int:
            joined.append(inbox)
            return len(joined)

    channel = Getter()
    channel._getters = {}
    assert channel.basic_get("q") is None
    joined[0].fail(TopicNotFound("topic q does not exist"))
    with pytest.raises(TopicNotFound):
        channel.basic_get("q")
    assert channel.told[-1] == ("cancel", {"consumer": 1})
    assert channel.basic_get("q") is None
    assert len(joined) == 2
    channel._stop_getting("q")
