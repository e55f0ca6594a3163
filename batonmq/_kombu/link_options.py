"""Options of a connection, from the URL and the transport options of Kombu."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from batonmq._common.secret import Secret
from batonmq._connection.security import Security
from batonmq._producer.producer_settings import Durability
from batonmq.errors import InvalidArgument

DEFAULT_PORT = 9876
KOMBU_OPTIONS = frozenset(
    (
        "body_encoding", "client_properties", "deadletter_queue", "errback", "interval_max",
        "interval_start", "interval_step", "max_retries", "polling_interval",
    )
)  # fmt: skip
"""Options that Kombu or Celery itself reads."""
_CREDENTIALS = ("ca_file", "cert_file", "key_file", "server_name", "token", "token_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """What a client process needs to know; connections with the same options share one.

    Attributes:
        nameserver: host:port; several separated by commas.
        tls: Whether connections use TLS.
        ca_file, cert_file, key_file, server_name, token, token_file: See `Security`.
        topic_prefix: Put in front of the name of each queue.
        queue_count: Number of queues of a topic that is created; 0 for the default of the cluster.
        create_topics: Whether a queue that is declared is created; else it must exist.
        durability: Name of the `Durability` of a task that was sent.
        send_timeout_ms: A task has no outcome after this time: sending it has failed.
        connect_timeout_ms: How long a connection waits for a nameserver.
        unacked_max: Messages of a channel without a prefetch count that are not acknowledged, at
            most.
        requeues_max: How often a message may be requeued before it is a dead letter.
        requeue_ms: Delay of the second requeue; the first has none, and each further one twice
            the delay of the one before.
        requeue_ms_max: The longest such delay.
        get_timeout_ms: How long a `get` waits for a message.
        span_max: See `ConsumerSettings`.
    """

    nameserver: str
    tls: bool = False
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    server_name: str = ""
    token: str = ""
    token_file: str = ""
    topic_prefix: str = ""
    queue_count: int = 0
    create_topics: bool = True
    durability: str = "FSYNCED"
    send_timeout_ms: int = 30_000
    connect_timeout_ms: int = 5_000
    unacked_max: int = 1_000
    requeues_max: int = 16
    requeue_ms: int = 1_000
    requeue_ms_max: int = 60_000
    get_timeout_ms: int = 2_000
    span_max: int = 2_000

    @property
    def security(self) -> Security | None:
        """The TLS settings; None without TLS."""
        given = {name: getattr(self, name) for name in _CREDENTIALS if getattr(self, name)}
        if not self.tls and not given:
            return None
        if "token" in given:
            given["token"] = Secret(given["token"])
        return Security(**given)

    def requeue_delay_ms(self, attempts: int) -> int:
        """Return the delay before a message is delivered again after so many attempts."""
        if attempts <= 1:
            return 0
        return min(self.requeue_ms << min(attempts - 2, 30), self.requeue_ms_max)

    def to_json(self) -> str:
        """Return the options for the client process; the token is not hidden in them."""
        return json.dumps(asdict(self))

    def __repr__(self) -> str:
        return f"LinkOptions({self.nameserver})"


def options_from_json(text: str) -> LinkOptions:
    """Inverse of `LinkOptions.to_json`."""
    return LinkOptions(**json.loads(text))


def options_of(
    nameservers: str, given: Mapping[str, Any], *, password: str = "", connect_timeout_s: float = 0
) -> LinkOptions:
    """Return the checked options of a connection.

    Args:
        nameservers: host:port of the URL.
        given: The transport options; those of Kombu itself are left out.
        password: Password of the URL: the token.

    Raises:
        InvalidArgument: An option is unknown, or has a value that is not possible.
    """
    values = {name: value for name, value in given.items() if name not in KOMBU_OPTIONS}
    if password:
        if values.get("token") or values.get("token_file"):
            raise InvalidArgument(
                "the URL has a password, and a token is among the transport options",
                remedy="Give the token in one place.",
                facts={"field": "token"},
            )
        values["token"] = password
    if connect_timeout_s and "connect_timeout_ms" not in values:
        values["connect_timeout_ms"] = max(int(connect_timeout_s * 1000), 1)
    values.setdefault("nameserver", nameservers)
    known = {field.name: field.type for field in fields(LinkOptions)}
    for name, value in values.items():
        if name not in known:
            raise InvalidArgument(
                f"transport option {name} is unknown",
                remedy=f"Known are {', '.join(sorted(known))}.",
                facts={"field": name},
            )
        _check_type(name, value, str(known[name]))
    options = LinkOptions(**values)
    if options.durability not in Durability.__members__:
        raise InvalidArgument(
            f"durability must be one of {', '.join(Durability.__members__)}, "
            f"got {options.durability!r}",
            facts={"field": "durability"},
        )
    options.security  # noqa: B018  refuses what does not fit together
    return options


def _check_type(name: str, value: object, wanted: str) -> None:
    least = 0 if name in ("queue_count", "requeues_max", "requeue_ms", "get_timeout_ms") else 1
    fits = type(value).__name__ == wanted and (not isinstance(value, int) or value >= least)
    if not (fits or (isinstance(value, bool) and wanted == "bool")):
        limit = f" of at least {least}" if wanted == "int" else ""
        raise InvalidArgument(
            f"transport option {name} must be {wanted}{limit}, got {value!r}",
            facts={"field": name},
        )
