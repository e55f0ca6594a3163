"""Goal: reply inboxes deliver all replies of a call or none, within bounds of memory.

Method: the core of the inboxes, with sizes at the bounds, and their servicer.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random

import pytest
from prometheus_client import CollectorRegistry

from baton.storage.v1 import reply_service_pb2 as pb
from batonmq.errors import Overloaded
from batonmq_server.storage.core import reply_inboxes
from batonmq_server.storage.core.reply_inboxes import (
    INBOX_BYTES_MAX,
    NODE_BYTES_MAX,
    ReplyInboxes,
    ReplyStatus,
)
from batonmq_server.storage.metrics import StorageMetrics
from batonmq_server.storage.reply_server import ReplyServicer


def new_inboxes() -> ReplyInboxes[str]:
    """Return inboxes with the ids b"0", b"1" and so on."""
    numbers: Iterator[int] = count()
    return ReplyInboxes(lambda: b"%d" % next(numbers))


def test_replies_reach_their_inbox_in_order_and_notify_it() -> None:
    inboxes, notified = new_inboxes(), list[str]()
    one = inboxes.open(lambda: notified.append("one"))
    other = inboxes.open(lambda: notified.append("other"))
    assert inboxes.put(one.inbox_id, ["a", "b"], 2) is ReplyStatus.DELIVERED
    assert inboxes.put(one.inbox_id, ["c"], 1) is ReplyStatus.DELIVERED
    assert notified == ["one", "one"]
    assert inboxes.take(one) == ["a", "b", "c"]
    assert inboxes.take(one) == inboxes.take(other) == []


def test_reply_to_an_unknown_or_closed_inbox_is_late() -> None:
    inboxes = new_inboxes()
    inbox = inboxes.open(lambda: None)
    assert inboxes.put(b"no such inbox", ["a"], 1) is ReplyStatus.LATE
    inboxes.close(inbox)
    assert inboxes.put(inbox.inbox_id, ["a"], 1) is ReplyStatus.LATE
    assert len(inboxes) == 0


def test_full_inbox_drops_replies_until_its_requester_has_read() -> None:
    inboxes = new_inboxes()
    slow, other = inboxes.open(lambda: None), inboxes.open(lambda: None)
    assert inboxes.put(slow.inbox_id, ["a"], INBOX_BYTES_MAX) is ReplyStatus.DELIVERED
    assert inboxes.put(slow.inbox_id, ["b"], 1) is ReplyStatus.INBOX_FULL
    assert inboxes.put(other.inbox_id, ["c"], 1) is ReplyStatus.DELIVERED
    assert inboxes.take(slow) == ["a"]
    assert inboxes.put(slow.inbox_id, ["d"], 1) is ReplyStatus.DELIVERED


def test_memory_of_a_node_is_bounded_and_freed_by_readers_and_by_closed_inboxes() -> None:
    inboxes = new_inboxes()
    full = [inboxes.open(lambda: None) for _ in range(NODE_BYTES_MAX // INBOX_BYTES_MAX)]
    for inbox in full:
        assert inboxes.put(inbox.inbox_id, ["a"], INBOX_BYTES_MAX) is ReplyStatus.DELIVERED
    last = inboxes.open(lambda: None)
    assert inboxes.put(last.inbox_id, ["b"], 1) is ReplyStatus.INBOX_FULL
    inboxes.take(full[0])
    inboxes.close(full[1])
    for _ in range(2):
        status = inboxes.put(last.inbox_id, ["c"], INBOX_BYTES_MAX // 2)
        assert status is ReplyStatus.DELIVERED


def test_number_of_inboxes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_inboxes, "INBOXES_MAX", 2)
    inboxes = new_inboxes()
    first, _ = inboxes.open(lambda: None), inboxes.open(lambda: None)
    with pytest.raises(Overloaded, match="2 reply inboxes are open already"):
        inboxes.open(lambda: None)
    inboxes.close(first)
    inboxes.open(lambda: None)


async def test_waiting_reply_is_no_part_of_its_request() -> None:
    """A part of a request keeps the memory of all of it, which no limit counts."""
    servicer = ReplyServicer("storage-a", StorageMetrics(CollectorRegistry()), Random(1))
    inbox = servicer._inboxes.open(lambda: None)
    entry = pb.InboxReplies(inbox_id=inbox.inbox_id, replies=[pb.RequestReply(body=b"kept")])
    request = pb.ReplyRequest(inboxes=[entry])
    await servicer.Reply(request, None)  # type: ignore[arg-type]
    request.inboxes[0].replies[0].body = b"changed"
    assert [reply.body for reply in servicer._inboxes.take(inbox)] == [b"kept"]
