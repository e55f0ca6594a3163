"""What remote clients of gateways saw in a run, and the promises that it must keep.

Times are milliseconds of the one clock of the run. Handles are read with the key of the run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from batonmq._core.queues import QueueRef
from batonmq_server.gateway.core.receipt_handles import ReceiptHandle
from batonmq_server.testing.processes import START_UNIX_MS

UNKNOWN = 1 << 60
"""End of a lease whose end is not known."""


@dataclass(slots=True)
class Delivery:
    """A delivery that its client received whole, and the lease of it.

    Attributes:
        begin_ms: Time of the lease; None if the lease is renewed.
        end_ms: When the lease expires, or may have ended otherwise.
        hold_ms: Time of the lease.
        replaced_ms: When its client learned that the handle is replaced.
    """

    body: bytes
    message_group: str
    client: str
    handle: ReceiptHandle
    hold_ms: int
    arrive_ms: int
    begin_ms: int | None = None
    end_ms: int = UNKNOWN
    replaced_ms: int | None = None

    @property
    def expires_ms(self) -> int:
        """The end of the lease by its handle; a lost call does not change it."""
        return UNKNOWN if self.begin_ms is None else self.handle.expires_unix_ms - START_UNIX_MS


@dataclass(slots=True)
class Ack:
    """An acknowledgement, and its outcome.

    Attributes:
        other_token: Newest token of the queue that another gateway was known to have before.
        replaced: Whether the client knew that the handle was replaced.
        code: None if the outcome is not known.
    """

    delivery: Delivery
    sent_ms: int
    other_token: int
    replaced: bool
    code: int | None = None
    answered_ms: int = 0


@dataclass(slots=True)
class RemoteLedger:
    """The events of one run.

    Attributes:
        ok: The code of an acknowledgement that was accepted.
        sent: Bodies of messages whose send was answered OK.
        tried: Bodies of messages that were sent, answered or not.
        violations: Broken promises, each with the name of its rule.
    """

    ok: int
    sent: set[bytes] = field(default_factory=set)
    tried: set[bytes] = field(default_factory=set)
    deliveries: list[Delivery] = field(default_factory=list)
    acks: list[Ack] = field(default_factory=list)
    acknowledged: dict[bytes, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    _tokens: dict[QueueRef, dict[tuple[str, int], int]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    _of_message: dict[bytes, list[Delivery]] = field(default_factory=lambda: defaultdict(list))

    def fail(self, rule: str, text: str) -> None:
        """Note a broken promise."""
        self.violations.append(f"{rule}: {text}")

    def delivered(self, one: Delivery) -> None:
        """Note a delivery, and check it against the earlier ones of its message."""
        handle = one.handle
        if handle.expires_unix_ms:
            one.end_ms = handle.expires_unix_ms - START_UNIX_MS
            one.begin_ms = one.end_ms - one.hold_ms
        self.counts["deliveries"] += 1
        known = self._of_message[one.body]
        self.counts["repeated deliveries"] += bool(known)
        text = f"{one.body!r} to {one.client}, {handle}"
        if handle.attempt == 1 and (before := [each for each in known if _is_before(each, one)]):
            self.fail("flagged", f"{text} is not its first delivery: {before[-1].handle}")
        if one.begin_ms is not None:
            acked_ms = self.acknowledged.get(one.body)
            if acked_ms is not None and one.begin_ms > acked_ms:
                self.fail(
                    "acknowledged", f"{text} was acknowledged {one.begin_ms - acked_ms} ms before"
                )
            for other in known:
                same = other.handle.queue == handle.queue and other.handle.token == handle.token
                overlap = (
                    other.begin_ms is not None and other.begin_ms <= one.begin_ms < other.end_ms
                )
                if same and overlap and other.handle.serial != handle.serial:
                    self.fail(
                        "one holder", f"{text} is held until {other.end_ms} by {other.client}"
                    )
        tokens, process = self._tokens[handle.queue], _process_of(handle)
        tokens[process] = max(tokens.get(process, 0), handle.token)
        known.append(one)
        self.deliveries.append(one)

    def changed(self, one: Delivery) -> None:
        """Note the new handle of a delivery; the lease is the same, with another end."""
        one.end_ms = one.handle.expires_unix_ms - START_UNIX_MS
        one.begin_ms = one.end_ms - one.hold_ms
        self._of_message[one.body].append(one)

    def begin_ack(self, one: Delivery, now_ms: int) -> Ack:
        """Note an acknowledgement that is sent."""
        tokens, process = self._tokens[one.handle.queue], _process_of(one.handle)
        other_token = max((t for each, t in tokens.items() if each != process), default=0)
        ack = Ack(one, now_ms, other_token, one.replaced_ms is not None)
        self.acks.append(ack)
        return ack

    def end_ack(self, ack: Ack, code: int, now_ms: int) -> None:
        """Note the outcome of an acknowledgement, and check it."""
        ack.code, ack.answered_ms = code, now_ms
        one = ack.delivery
        if code != self.ok:
            self.counts["acks refused"] += 1
            return
        self.counts["acks"] += 1
        before = [
            each
            for each in self.acks
            if each is not ack and each.delivery is one and each.code in (None, self.ok)
        ]
        text = f"{one.body!r} by {one.client}, {one.handle}, sent at {ack.sent_ms}"
        if not before:  # a repeated call has the outcome of the first one
            if ack.other_token > one.handle.token:
                self.fail("token", f"{text}: another gateway had token {ack.other_token}")
            if ack.sent_ms >= one.expires_ms:
                self.fail("expired", f"{text}: the lease expired at {one.expires_ms}")
            if ack.replaced:
                self.fail("replaced", f"{text}: the handle was replaced")
        others = [
            each
            for each in self.acks
            if each.code == self.ok
            and each.delivery.body == one.body
            and each.delivery.handle.serial != one.handle.serial
        ]
        if others:
            self.fail("one holder", f"{text}; it was acknowledged by {others[0].delivery.handle}")
        self.acknowledged.setdefault(one.body, now_ms)

    def judge(self, stored: Mapping[tuple[str, int], Iterable[tuple[int, bytes, str]]]) -> None:
        """Check what is known at the end.

        Args:
            stored: Offset, body and message group of the messages of each queue, by broker and id.
        """
        copies = Counter(body for queue in stored.values() for _, body, _ in queue)
        for body in sorted(self.sent):
            if copies[body] != 1:
                self.fail("once", f"{body!r} is stored {copies[body]} times")
            if body not in self._of_message:
                self.fail("lost", f"{body!r} was never delivered")
        for body, count in copies.items():
            if count > 1 or body not in self.tried:
                self.fail("once", f"{body!r} is stored {count} times")
        for (broker, queue_id), queue in stored.items():
            groups: dict[str, list[bytes]] = defaultdict(list)
            for _, body, message_group in sorted(queue):
                if message_group:
                    groups[message_group].append(body)
            for message_group, bodies in groups.items():
                self._check_order(f"{broker}/{queue_id} {message_group}", bodies)

    def _check_order(self, name: str, bodies: list[bytes]) -> None:
        """Check that no message was delivered before the one ahead of it may have been ended."""
        for ahead, body in pairwise(bodies):
            ended_ms = min(
                (
                    ack.sent_ms
                    for ack in self.acks
                    if ack.delivery.body == ahead and ack.code in (None, self.ok)
                ),
                default=UNKNOWN,
            )
            for one in self._of_message.get(body, ()):
                self.counts["deliveries in order"] += 1
                if one.arrive_ms < ended_ms:
                    self.fail("order", f"{name}: {body!r} was delivered before {ahead!r} was ended")


def _process_of(handle: ReceiptHandle) -> tuple[str, int]:
    """Return the process of a gateway, whose numbers start at a random one of 62 bits.

    A process that is fenced and acquires the queue again, before any other one, keeps what it holds
    (protocol section 11). So only the tokens of others end a handle.
    """
    return handle.gateway, handle.serial >> 32


def _is_before(other: Delivery, one: Delivery) -> bool:
    """Whether a delivery is known to be of an earlier lease than another one."""
    if other.handle.token != one.handle.token:
        return other.handle.token < one.handle.token
    return other.handle.serial < one.handle.serial
