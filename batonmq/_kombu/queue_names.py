"""Names of topics and groups for the queues of Kombu."""

from __future__ import annotations

import re
from dataclasses import dataclass

from batonmq._core.names import check_group, check_topic, check_user_topic
from batonmq._core.retries import dead_letter_topic, retry_topic

_ENCODED = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True, slots=True)
class QueueNames:
    """The topic of a queue, and the consumer group of its workers.

    Attributes:
        queue: The name that Kombu knows.
        topic: The topic that has its messages.
        group: The group in which all workers of the queue are members.
    """

    queue: str
    topic: str
    group: str


def names_of(queue: str, prefix: str = "") -> QueueNames:
    """Return the names for a queue.

    Characters that names of topics do not have are written as % and their hexadecimal bytes, as in
    URLs: `mail.urgent` becomes `mail%2Eurgent`.

    Raises:
        InvalidName: The queue has no name, or a name that is too long.
    """
    name = prefix + _ENCODED.sub(_percent, queue)
    check_user_topic(name)
    check_topic(retry_topic(check_group(name)))
    check_topic(dead_letter_topic(name))
    return QueueNames(queue, name, name)


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match.group().encode())
