"""The messages of one queue that remote clients hold, or may hold: a state machine.

A message is added once it is started under the gateway's token, and leaves when it is ended.
Between that it is in one of four states:

- WAITING: it is behind an earlier message of its message group.
- READY: it may be leased.
- LEASED: a client holds it until the lease expires. The delivery has a serial number; a call with
  that number may end or change the lease.
- ENDING: it was acknowledged, or its attempts are used up. It is not leased again; `end` follows
  when the outcome is durable.

Messages with the same message group are leased one at a time, in the order of their offsets: the
next one is READY when the one before was ended. Other messages go on.

A client that can't read one message of an answer uses no message of it, and neither does one that
crashes over one. A message that has used half of its attempts is therefore leased alone. So the
other half is used up only by the message that is the reason.

The module does no I/O; times are milliseconds of the monotonic clock, passed in.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from heapq import heapify, heappop, heappush

from batonmq_server.gateway.core.client_connections import Reception

RENEW_MS_MAX = 3 * 3_600_000
"""A lease that is renewed automatically lasts no longer than this."""
_EXPIRIES_SPARE = 1_024
"""Old expiries are dropped once there are so many beyond twice those of the present leases."""


class LeaseState(Enum):
    """Where a message is; see the docstring of the module."""

    WAITING = "behind an earlier message of its message group"
    READY = "may be leased"
    LEASED = "held by a client"
    ENDING = "its outcome is being stored"


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """How a client holds messages.

    Attributes:
        client_id: The client.
        hold_ms: Time until the lease expires.
        renewed: Whether the lease is renewed by the same time as long as the client is alive.
        reception: The answer that the messages came with.
    """

    client_id: str
    hold_ms: int
    renewed: bool = False
    reception: Reception | None = None


@dataclass(slots=True)
class MessageLease:
    """A message, and the last delivery of it.

    Attributes:
        message_group: Empty if its order does not matter.
        attempt: Deliveries so far, those before it was added included.
        serial: Number of the delivery or of its last change, unique in the process.
        begin_ms: When the delivery began.
        expires_ms: When the lease expires.
        terms: How the client holds it; None before the first delivery.
        alone: Whether it is the only message of its answer.
    """

    offset: int
    message_group: str
    attempt: int
    state: LeaseState = LeaseState.WAITING
    serial: int = 0
    begin_ms: int = 0
    expires_ms: int = 0
    terms: LeaseTerms | None = None
    alone: bool = False


class QueueLeases:
    """The leases of one queue.

    Args:
        attempts_max: Deliveries of a message before it is a dead letter.
        serials: Numbers that no other delivery gets.
    """

    def __init__(self, attempts_max: int, serials: Iterator[int]) -> None:
        self._attempts_max, self._serials = attempts_max, serials
        self._messages: dict[int, MessageLease] = {}
        self._ready: list[int] = []
        self._expiries: list[tuple[int, int, int]] = []
        self._waiting: dict[str, list[int]] = {}
        """Offsets behind the first message of each message group, ascending."""
        self._leased: dict[str, dict[int, MessageLease]] = {}
        """What each client holds, by offset, the oldest delivery first."""
        self._leased_count = 0
        self._ready_count = 0

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def ready_count(self) -> int:
        """Number of messages that may be leased now."""
        return self._ready_count

    @property
    def leased_count(self) -> int:
        """Number of messages that clients hold."""
        return self._leased_count

    def get(self, offset: int) -> MessageLease | None:
        """Return the message at `offset`, if it was added and not ended."""
        return self._messages.get(offset)

    def add(self, offset: int, attempts_before: int, message_group: str = "") -> None:
        """Add a message that was started.

        Args:
            attempts_before: Deliveries before, as far as they are known.
        """
        assert offset not in self._messages, f"offset {offset} was added before"
        message = MessageLease(offset, message_group, attempts_before)
        self._messages[offset] = message
        if message_group and message_group in self._waiting:
            insort(self._waiting[message_group], offset)
            return
        if message_group:
            self._waiting[message_group] = []
        self._make_ready(message)

    def lease(
        self, count_max: int, now_ms: int, terms: LeaseTerms, *, with_others: bool = False
    ) -> list[MessageLease]:
        """Lease messages to a client, lowest offsets first.

        Args:
            with_others: Whether the answer has messages already: then none that is to be alone is
                leased.
        """
        leased: list[MessageLease] = []
        while self._ready and len(leased) < count_max:
            message = self._messages.get(self._ready[0])
            if message is None or message.state is not LeaseState.READY:
                heappop(self._ready)
                continue
            message.alone = message.attempt >= max(1, self._attempts_max // 2)
            if message.alone and (with_others or leased):
                break
            heappop(self._ready)
            self._ready_count -= 1
            message.terms = terms
            self._hold(message)
            message.attempt += 1
            message.begin_ms = now_ms
            self._set_expiry(message, now_ms + terms.hold_ms)
            leased.append(message)
            if message.alone:
                break
        return leased

    def find(self, offset: int, serial: int, now_ms: int) -> MessageLease | None:
        """Return the lease with this number; None if it has expired or is not the current one."""
        message = self._messages.get(offset)
        if message is None or message.serial != serial or message.state is not LeaseState.LEASED:
            return None
        return message if now_ms < message.expires_ms or _renews(message) else None

    def change(self, offset: int, serial: int, now_ms: int, hold_ms: int) -> MessageLease | None:
        """Let a lease expire `hold_ms` from now, under a new number, and renew it no more.

        Returns:
            The lease; None, without effect, as for `find`.
        """
        message = self.find(offset, serial, now_ms)
        if message is not None and message.terms is not None:
            _note_arrival(message.terms)
            message.terms = LeaseTerms(message.terms.client_id, hold_ms)
            self._set_expiry(message, now_ms + hold_ms)
        return message

    def begin_end(self, offset: int, serial: int, now_ms: int) -> bool:
        """Note that the outcome of a message is being stored: its lease does not expire any more.

        Returns:
            False, without effect, if `find` finds no lease.
        """
        message = self.find(offset, serial, now_ms)
        if message is None or message.terms is None:
            return False
        _note_arrival(message.terms)
        self._let_go(message)
        message.state = LeaseState.ENDING
        return True

    def end(self, offset: int) -> None:
        """Remove a message whose outcome is durable; the next one of its message group is ready."""
        message = self._messages.pop(offset, None)
        if message is None:
            return
        assert message.state is LeaseState.ENDING, f"{message} was not ending"
        self._advance(message.message_group)

    def undo(self, offset: int, serial: int) -> None:
        """Take back a delivery that did not reach its client; the attempt does not count."""
        message = self._messages.get(offset)
        if message is not None and message.serial == serial and message.state is LeaseState.LEASED:
            message.attempt -= 1
            self._let_go(message)
            self._make_ready(message)

    def lapse(self, offset: int, serial: int, now_ms: int) -> None:
        """Let a lease expire now: the delivery did not reach its client, and its attempt counts."""
        message = self.find(offset, serial, now_ms)
        if message is not None and message.terms is not None:
            message.terms = LeaseTerms(message.terms.client_id, message.terms.hold_ms)
            self._set_expiry(message, now_ms, renumber=False)

    def expire_soon(self, client_id: str, at_ms: int) -> None:
        """Renew the leases of a client that ends no more; they expire at `at_ms` at the latest."""
        for message in self._leased.get(client_id, {}).values():
            terms = message.terms
            if terms is not None and terms.renewed:
                message.terms = LeaseTerms(client_id, terms.hold_ms)
                self._set_expiry(message, min(at_ms, message.expires_ms), renumber=False)

    def expire(self, now_ms: int, may_renew: Callable[[LeaseTerms], bool]) -> list[MessageLease]:
        """Make the messages ready whose leases have expired; renew those that are to be renewed.

        Args:
            may_renew: Returns whether a client still holds what it was sent on such terms.

        Returns:
            Messages whose attempts are used up; they are ENDING now.
        """
        exhausted: list[MessageLease] = []
        while self._expiries and self._expiries[0][0] <= now_ms:
            expires_ms, offset, serial = heappop(self._expiries)
            message = self._messages.get(offset)
            if (
                message is None
                or message.state is not LeaseState.LEASED
                or (message.serial, message.expires_ms) != (serial, expires_ms)
            ):
                continue  # ended or changed meanwhile
            terms = message.terms
            assert terms is not None
            too_long = now_ms - message.begin_ms >= RENEW_MS_MAX
            if terms.renewed and not too_long and may_renew(terms):
                self._set_expiry(message, now_ms + terms.hold_ms, renumber=False)
                continue
            self._let_go(message)
            if message.attempt >= self._attempts_max:
                message.state = LeaseState.ENDING
                exhausted.append(message)
            else:
                self._make_ready(message)
        return exhausted

    def next_expiry_ms(self) -> int | None:
        """Return when `expire` may have something to do; None if nothing is leased."""
        return self._expiries[0][0] if self._expiries else None

    def withdraw(self) -> list[int]:
        """Remove all messages that no client holds, and return their offsets."""
        idle = (LeaseState.READY, LeaseState.WAITING)
        offsets = sorted(one.offset for one in self._messages.values() if one.state in idle)
        for offset in offsets:
            del self._messages[offset]
        self._ready.clear()
        self._ready_count = 0
        left = {one.message_group for one in self._messages.values()}
        self._waiting = {group: [] for group in self._waiting if group in left}
        return offsets

    def oldest_lease_ms(self) -> int | None:
        """Return when the oldest delivery that a client holds began."""
        begins = (_oldest(held) for held in self._leased.values())
        return min(begins, default=None)

    @property
    def leased(self) -> Mapping[str, Mapping[int, MessageLease]]:
        """What each client holds, by offset, the oldest delivery first."""
        return self._leased

    def messages(self, client_id: str = "") -> Iterable[MessageLease]:
        """Return all messages, or those that a client holds, in no order."""
        return self._leased.get(client_id, {}).values() if client_id else self._messages.values()

    def _hold(self, message: MessageLease) -> None:
        assert message.terms is not None
        message.state = LeaseState.LEASED
        self._leased.setdefault(message.terms.client_id, {})[message.offset] = message
        self._leased_count += 1

    def _let_go(self, message: MessageLease) -> None:
        assert message.terms is not None
        held = self._leased[message.terms.client_id]
        del held[message.offset]
        if not held:
            del self._leased[message.terms.client_id]
        self._leased_count -= 1

    def _make_ready(self, message: MessageLease) -> None:
        message.state = LeaseState.READY
        self._ready_count += 1
        heappush(self._ready, message.offset)

    def _set_expiry(self, message: MessageLease, expires_ms: int, *, renumber: bool = True) -> None:
        if renumber:
            message.serial = next(self._serials)
        message.expires_ms = expires_ms
        heappush(self._expiries, (expires_ms, message.offset, message.serial))
        if len(self._expiries) > 2 * self._leased_count + _EXPIRIES_SPARE:
            self._drop_old_expiries()

    def _drop_old_expiries(self) -> None:
        """Keep the expiries of the present leases: those of ended ones may be hours ahead."""
        self._expiries = [
            (one.expires_ms, one.offset, one.serial)
            for held in self._leased.values()
            for one in held.values()
        ]
        heapify(self._expiries)

    def _advance(self, message_group: str) -> None:
        """Make the next message of a message group ready."""
        if not message_group:
            return
        waiting = self._waiting[message_group]
        if waiting:
            self._make_ready(self._messages[waiting.pop(0)])
        else:
            del self._waiting[message_group]


def _oldest(held: dict[int, MessageLease]) -> int:
    """Return when the oldest delivery began: a dict keeps the order of the deliveries."""
    return next(iter(held.values())).begin_ms


def _note_arrival(terms: LeaseTerms) -> None:
    if terms.reception is not None:
        terms.reception.arrived = True


def _renews(message: MessageLease) -> bool:
    return message.terms is not None and message.terms.renewed
