"""Quotas of identities: token buckets and counts. Pure: without calls, etcd or clock.

A bucket of a rate holds at most what one second brings. A call is admitted while the bucket is not
in debt, and may take more than it holds: so a batch of any size passes, and the next call waits
until the debt is paid. Over any time the rate is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum

from batonmq.errors import Throttled
from batonmq_server.runtime.access.permissions import SERVICE_PREFIX

DEFAULT = "*"
"""Name of the quota of all identities without limits of their own."""
WAIT_MS_MAX = 5_000
"""Longest wait that a refusal names: the limit may be raised meanwhile."""
BUSY_WAIT_MS = 200
"""Wait for a call or connection of the same identity to end."""
CONNECTION_AGE_MS = 60_000
"""A connection counts for this long after its last call: servers close it after this time."""
IDENTITIES_MAX = 10_000
"""Identities whose use is kept; those that have not called for longest are forgotten first."""


class Traffic(Enum):
    """What a call does with messages."""

    PRODUCE = "produce"
    CONSUME = "consume"


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of an identity at one node; None for none."""

    produce_bytes_per_s: int | None = None
    produce_calls_per_s: int | None = None
    consume_bytes_per_s: int | None = None
    consume_calls_per_s: int | None = None
    in_flight: int | None = None
    connections: int | None = None
    topics: int | None = None
    groups: int | None = None

    def over(self, default: Quota) -> Quota:
        """Return this quota, with the limits of `default` where it has none."""
        values = {}
        for one in fields(self):
            own = getattr(self, one.name)
            values[one.name] = getattr(default, one.name) if own is None else own
        return Quota(**values)


UNLIMITED = Quota()


class TokenBucket:
    """A rate, and what is left of it.

    Args:
        rate: Tokens per second.
        burst: Most tokens that it holds; those of one second by default.
    """

    __slots__ = ("_at_ms", "_burst", "_level", "rate")

    def __init__(self, rate: int, now_ms: int, burst: int = 0) -> None:
        self.rate, self._burst, self._at_ms = rate, float(burst or rate), now_ms
        self._level = self._burst

    def set_rate(self, rate: int) -> None:
        """Change the rate, and the burst to that of one second; a debt stays."""
        self.rate, self._burst = rate, float(rate)
        self._level = min(self._level, self._burst)

    def wait_ms(self, now_ms: int) -> int:
        """Return the time until a call is admitted, in milliseconds; 0 if it is now."""
        self._level = min(self._burst, self._level + (now_ms - self._at_ms) * self.rate / 1000)
        self._at_ms = now_ms
        return 0 if self._level > 0 else int(-self._level * 1000 / self.rate) + 1

    def take(self, tokens: int) -> None:
        """Take tokens, into debt if there are not so many."""
        self._level -= tokens


_CHECKED: dict[Traffic, tuple[str, str]] = {
    Traffic.PRODUCE: ("produce_bytes_per_s", "produce_calls_per_s"),
    Traffic.CONSUME: ("consume_bytes_per_s", "consume_calls_per_s"),
}


@dataclass(slots=True)
class _Use:
    """What an identity uses at this node."""

    quota: Quota
    buckets: dict[str, TokenBucket] = field(default_factory=dict)
    in_flight: int = 0
    connections: dict[str, int] = field(default_factory=dict)


class QuotaLedger:
    """The quotas of all identities, and what each uses.

    Args:
        on_refusal: Called with the identity and the name of the limit for each refused call.
    """

    def __init__(self, on_refusal: Callable[[str, str], None] = lambda *_: None) -> None:
        self._quotas: dict[str, Quota] = {}
        self._uses: dict[str, _Use] = {}
        self._on_refusal = on_refusal

    def set_quota(self, identity: str, quota: Quota | None) -> None:
        """Set the quota of an identity or of DEFAULT; None removes it."""
        if quota is None:
            self._quotas.pop(identity, None)
        else:
            self._quotas[identity] = quota
        for name, use in self._uses.items():
            use.quota = self.quota_of(name)

    def quota_of(self, identity: str) -> Quota:
        """Return the limits of an identity. Services have none."""
        if identity.startswith(SERVICE_PREFIX):
            return UNLIMITED
        default = self._quotas.get(DEFAULT, UNLIMITED)
        return self._quotas.get(identity, UNLIMITED).over(default)

    @property
    def has_quotas(self) -> bool:
        """Whether any identity has a quota."""
        return bool(self._quotas)

    def limits(self, identity: str) -> bool:
        """Return whether an identity has a limit of any kind."""
        return self.has_quotas and self._use(identity).quota != UNLIMITED

    def begin(
        self, identity: str, traffic: Traffic, request_bytes: int, connection: str, now_ms: int
    ) -> bool:
        """Begin a call; return whether `end` must be called, because the identity has limits.

        Args:
            request_bytes: Size of the request; counts for calls that write.
            connection: Address and port of the caller.

        Raises:
            Throttled: a limit is reached; the call has no effect.
        """
        if not self.limits(identity):
            return False
        use = self._uses[identity]
        self._check(identity, use, traffic, connection, now_ms)
        use.in_flight += 1
        if use.quota.connections is not None:
            use.connections[connection] = now_ms
        of_bytes, of_calls = _CHECKED[traffic]
        if (bucket := use.buckets.get(of_calls)) is not None:
            bucket.take(1)
        if traffic is Traffic.PRODUCE and (bucket := use.buckets.get(of_bytes)) is not None:
            bucket.take(request_bytes)
        return True

    def debt_error(self, identity: str, traffic: Traffic, now_ms: int) -> Throttled | None:
        """Return why a call of an identity would be rejected for its rates; None if it would not.

        Nothing is taken: so a call can be rejected before its request is read.
        """
        use = self._uses.get(identity)
        if use is None or not use.buckets:
            return None
        for name in _CHECKED[traffic]:
            bucket = use.buckets.get(name)
            if bucket is None or bucket.rate != getattr(use.quota, name):
                continue  # the limit has changed; `begin` sees that
            if wait_ms := bucket.wait_ms(now_ms):
                self._on_refusal(identity, name)
                return throttled(identity, name, bucket.rate, wait_ms)
        return None

    def read_rate(self, identity: str) -> int | None:
        """Return the bytes per second that an identity may read; None for no limit."""
        use = self._uses.get(identity)
        return use.quota.consume_bytes_per_s if use is not None else None

    def read_wait_ms(self, identity: str, now_ms: int) -> int:
        """Return how long a stream of an identity waits before it reads; 0 if it may read now.

        The time is no longer than WAIT_MS_MAX: ask again after it. A wait counts as a refused call.
        """
        if not self.limits(identity):
            return 0
        debt = self._debt(self._uses[identity], Traffic.CONSUME, now_ms)
        if debt is None:
            return 0
        name, _, wait_ms = debt
        self._on_refusal(identity, name)
        return min(wait_ms, WAIT_MS_MAX)

    def charge_read(self, identity: str, byte_count: int) -> None:
        """Count what a stream of an identity has read: as one call, and so many bytes."""
        if not self.has_quotas or (use := self._uses.get(identity)) is None:
            return
        of_bytes, of_calls = _CHECKED[Traffic.CONSUME]
        if (bucket := use.buckets.get(of_calls)) is not None:
            bucket.take(1)
        if (bucket := use.buckets.get(of_bytes)) is not None:
            bucket.take(byte_count)

    def end(self, identity: str, traffic: Traffic, answer_bytes: int) -> None:
        """End a call for which `begin` returned True.

        Args:
            answer_bytes: Size of the answer, 0 if it failed; counts for calls that read.
        """
        use = self._uses.get(identity)
        if use is None:
            return
        use.in_flight -= 1
        bucket = use.buckets.get("consume_bytes_per_s")
        if traffic is Traffic.CONSUME and bucket is not None:
            bucket.take(answer_bytes)

    def _check(
        self, identity: str, use: _Use, traffic: Traffic, connection: str, now_ms: int
    ) -> None:
        quota = use.quota
        if (debt := self._debt(use, traffic, now_ms)) is not None:
            self._refuse(identity, *debt)
        if quota.in_flight is not None and use.in_flight >= quota.in_flight:
            self._refuse(identity, "in_flight", quota.in_flight, BUSY_WAIT_MS)
        if quota.connections is not None and connection not in use.connections:
            open_since_ms = now_ms - CONNECTION_AGE_MS
            if len(use.connections) >= quota.connections:
                use.connections = {
                    one: at for one, at in use.connections.items() if at > open_since_ms
                }
            if len(use.connections) >= quota.connections:
                self._refuse(identity, "connections", quota.connections, WAIT_MS_MAX)

    @staticmethod
    def _debt(use: _Use, traffic: Traffic, now_ms: int) -> tuple[str, int, int] | None:
        """Return name and value of the first rate that is in debt, and for how long; None if none.

        The buckets follow the limits, which may have changed.
        """
        for name in _CHECKED[traffic]:
            rate: int | None = getattr(use.quota, name)
            if rate is None:
                use.buckets.pop(name, None)
                continue
            bucket = use.buckets.get(name)
            if bucket is None:
                bucket = use.buckets[name] = TokenBucket(rate, now_ms)
            elif bucket.rate != rate:
                bucket.set_rate(rate)
            if wait_ms := bucket.wait_ms(now_ms):
                return name, rate, wait_ms
        return None

    def _refuse(self, identity: str, limit: str, value: int, wait_ms: int) -> None:
        self._on_refusal(identity, limit)
        raise throttled(identity, limit, value, wait_ms)

    def _use(self, identity: str) -> _Use:
        use = self._uses.pop(identity, None) or _Use(self.quota_of(identity))
        self._uses[identity] = use  # the order is that of the last calls
        if len(self._uses) > IDENTITIES_MAX:
            oldest = next(iter(self._uses))
            if not self._uses[oldest].in_flight:
                del self._uses[oldest]
        return use


def throttled(identity: str, limit: str, value: int, wait_ms: int) -> Throttled:
    """Return the error of a call beyond a limit."""
    return Throttled(
        f"{identity} has reached its quota {limit}={value}",
        retry_after_ms=min(wait_ms, WAIT_MS_MAX),
        facts={"identity": identity, "quota": limit, "limit": value},
    )
