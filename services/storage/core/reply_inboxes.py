"""Reply inboxes of one node: replies that wait until their requester takes them. Pure.

Memory is bounded per inbox and per node. Replies for an unknown or a full inbox are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Generic, TypeVar

from batonmq.errors import Overloaded

INBOX_ID_BYTES = 16
INBOXES_MAX = 10_000
INBOX_BYTES_MAX = 4 * 1024 * 1024
NODE_BYTES_MAX = 64 * 1024 * 1024
REPLY_OVERHEAD_BYTES = 128
"""Memory of a waiting reply besides its bytes."""

Reply = TypeVar("Reply")


class ReplyStatus(Enum):
    """What became of replies; the names of the protocol."""

    DELIVERED = "delivered"
    LATE = "late"
    INBOX_FULL = "inbox_full"


class ReplyInbox(Generic[Reply]):
    """The waiting replies of one requester.

    Attributes:
        waiting: The replies, in the order of their arrival.
        waiting_bytes: Their size.
        notify: Called when replies have arrived.
    """

    def __init__(self, inbox_id: bytes, notify: Callable[[], None]) -> None:
        self.inbox_id, self.notify = inbox_id, notify
        self.waiting: list[Reply] = []
        self.waiting_bytes = 0


class ReplyInboxes(Generic[Reply]):
    """The open inboxes of a node.

    Args:
        new_id: Returns an unguessable inbox id.
    """

    def __init__(self, new_id: Callable[[], bytes]) -> None:
        self._new_id = new_id
        self._open: dict[bytes, ReplyInbox[Reply]] = {}
        self._waiting_bytes = 0

    def __len__(self) -> int:
        """Return the number of open inboxes."""
        return len(self._open)

    def open(self, notify: Callable[[], None]) -> ReplyInbox[Reply]:
        """Open an inbox.

        Raises:
            Overloaded: the node has `INBOXES_MAX` inboxes.
        """
        if len(self._open) >= INBOXES_MAX:
            raise Overloaded(
                f"{INBOXES_MAX} reply inboxes are open already; that is the limit",
                remedy="Share one Producer per process, or try another storage node.",
                retry_after_ms=1_000,
                facts={"limit": INBOXES_MAX},
            )
        inbox: ReplyInbox[Reply] = ReplyInbox(self._new_id(), notify)
        self._open[inbox.inbox_id] = inbox
        return inbox

    def close(self, inbox: ReplyInbox[Reply]) -> None:
        """Close an inbox and drop its replies."""
        self.take(inbox)
        self._open.pop(inbox.inbox_id, None)

    def put(self, inbox_id: bytes, replies: Iterable[Reply], size: int) -> ReplyStatus:
        """Put all replies into an inbox, or none.

        Args:
            size: Size of the replies in bytes, with `REPLY_OVERHEAD_BYTES` for each.
        """
        inbox = self._open.get(inbox_id)
        if inbox is None:
            return ReplyStatus.LATE
        is_full = inbox.waiting and inbox.waiting_bytes + size > INBOX_BYTES_MAX
        if is_full or self._waiting_bytes + size > NODE_BYTES_MAX:
            return ReplyStatus.INBOX_FULL
        inbox.waiting.extend(replies)
        inbox.waiting_bytes += size
        self._waiting_bytes += size
        inbox.notify()
        return ReplyStatus.DELIVERED

    def take(self, inbox: ReplyInbox[Reply]) -> list[Reply]:
        """Return the waiting replies and remove them."""
        replies, inbox.waiting = inbox.waiting, []
        self._waiting_bytes -= inbox.waiting_bytes
        inbox.waiting_bytes = 0
        return replies
