"""Checks of names. The comments of the protos state the same rules."""

from __future__ import annotations

import re

from batonmq.errors import InvalidName

_TOPIC = re.compile(r"[A-Za-z0-9_%-]+"), 127
_BROKER = re.compile(r"[a-z0-9-]+"), 63
_CLIENT = re.compile(r"[!-.0-~]+"), 255
_HOST_CHARACTERS_MAX = 255

SYSTEM_TOPIC_PREFIX = "BATON_SYS_"
METRICS_TOPIC = "BATON_SYS_METRICS"
"""Topic of the events that services and clients publish, as `baton.metrics.v1.MetricBatch`."""
ALERTS_TOPIC = "BATON_SYS_ALERTS"
"""Topic of the alerts that Spark jobs derive from these events."""
UNRESOLVED_TOPIC = "BATON_SYS_UNRESOLVED"
"""Topic of the messages of transactions that reached a limit without an answer."""


def is_system_topic(name: str) -> bool:
    """Return whether the topic belongs to BatonMQ itself."""
    return name.startswith(SYSTEM_TOPIC_PREFIX)


def check_topic(name: str) -> str:
    """Return `name` if it is a valid topic name; raise InvalidName otherwise."""
    return _check("topic", name, _TOPIC, "1 to 127 characters of A-Z a-z 0-9 _ % -")


def check_user_topic(name: str) -> str:
    """Return `name` if it is a valid name of a user's topic; raise InvalidName otherwise."""
    check_topic(name)
    if is_system_topic(name):
        raise InvalidName(
            f"topic name {name} is reserved for BatonMQ",
            remedy=f"Choose a name that does not start with {SYSTEM_TOPIC_PREFIX}.",
            facts={"field": "topic"},
        )
    return name


def check_group(name: str) -> str:
    """Return `name` if it is a valid group name; raise InvalidName otherwise."""
    return _check("group", name, _TOPIC, "1 to 127 characters of A-Z a-z 0-9 _ % -")


def check_broker(name: str) -> str:
    """Return `name` if it is a valid broker name; raise InvalidName otherwise."""
    return _check("broker", name, _BROKER, "1 to 63 characters of a-z 0-9 -")


def check_offsets_set(name: str) -> str:
    """Return `name` if it is a valid name of an offsets set; raise InvalidName otherwise."""
    return _check("offsets_set", name, _BROKER, "1 to 63 characters of a-z 0-9 -")


def check_client_id(name: str) -> str:
    """Return `name` if it is a valid client id; raise InvalidName otherwise."""
    return _check("client_id", name, _CLIENT, "1 to 255 visible ASCII characters without /")


def check_host(name: str) -> str:
    """Return `name` if it is a valid host of a client, which is only shown to people."""
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
