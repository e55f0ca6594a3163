"""Which names are allowed. The same rules stand in the comments of the protos."""

from __future__ import annotations

import re

from batonmq.errors import InvalidName

_TOPIC = re.compile(r"[A-Za-z0-9_%-]+"), 127
_BROKER = re.compile(r"[a-z0-9-]+"), 63
_CLIENT = re.compile(r"[!-.0-~]+"), 255
_HOST_CHARACTERS_MAX = 255

SYSTEM_TOPIC_PREFIX = "BATON_SYS_"
METRICS_TOPIC = "BATON_SYS_METRICS"
"""What services and clients tell of themselves, as `baton.metrics.v1.MetricBatch`."""
ALERTS_TOPIC = "BATON_SYS_ALERTS"
"""What jobs find alarming in that."""


def is_system_topic(name: str) -> bool:
    """Whether the system itself makes and uses the topic."""
    return name.startswith(SYSTEM_TOPIC_PREFIX)


def check_topic(name: str) -> str:
    """`name`, if it may name a topic."""
    return _check("topic", name, _TOPIC, "1 to 127 characters of A-Z a-z 0-9 _ % -")


def check_user_topic(name: str) -> str:
    """`name`, if it may name a topic that users create and delete."""
    check_topic(name)
    if is_system_topic(name):
        raise InvalidName(
            f"topic {name} is reserved for the system",
            remedy=f"Use a name that does not start with {SYSTEM_TOPIC_PREFIX}.",
            facts={"field": "topic"},
        )
    return name


def check_group(name: str) -> str:
    """`name`, if it may name a consumer group."""
    return _check("group", name, _TOPIC, "1 to 127 characters of A-Z a-z 0-9 _ % -")


def check_broker(name: str) -> str:
    """`name`, if it may name a storage replica set."""
    return _check("broker", name, _BROKER, "1 to 63 characters of a-z 0-9 -")


def check_offsets_set(name: str) -> str:
    """`name`, if it may name an offsets replica set."""
    return _check("offsets_set", name, _BROKER, "1 to 63 characters of a-z 0-9 -")


def check_client_id(name: str) -> str:
    """`name`, if it may be a client id."""
    return _check("client_id", name, _CLIENT, "1 to 255 visible ASCII characters without /")


def check_host(name: str) -> str:
    """`name`, if it may stand as the host of a client: it is only ever shown to people."""
    rule = f"at most {_HOST_CHARACTERS_MAX} printable characters"
    return _checked("host", name, name.isprintable(), _HOST_CHARACTERS_MAX, rule)


def _check(field: str, name: str, allowed: tuple[re.Pattern[str], int], rule: str) -> str:
    characters, limit = allowed
    return _checked(field, name, characters.fullmatch(name) is not None, limit, rule)


def _checked(field: str, name: str, good: bool, limit: int, rule: str) -> str:
    if len(name) > limit:
        raise InvalidName(
            f"{field} {name[:140]!r} has {len(name)} characters; the limit is {limit}",
            remedy=f"Use {rule}.",
            facts={"field": field, "limit": limit, "actual": len(name)},
        )
    if not good:
        raise InvalidName(
            f"{field} {name!r} is not allowed", remedy=f"Use {rule}.", facts={"field": field}
        )
    return name
