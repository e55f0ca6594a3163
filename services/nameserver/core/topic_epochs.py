"""Epochs of a topic: they tell storage which batches were sent before a queue was opened again.

A producer sends the messages of a batch to another queue when storage has refused the batch because
its queue accepts no messages. An earlier attempt with the same bytes may still be on its way, and
must not be stored when the queue takes messages again.

So the epoch of the topic rises when a queue stops taking messages, and when one takes messages
again. A producer names with each attempt the epoch of its newest route, and never a lower one than
with an attempt before. A broker refuses attempts that name an earlier epoch than the one in which
its queues were opened. It looks the topic up in etcd before it compares, if an attempt names a
later epoch than it knows. So whatever it refuses, it refuses at an epoch that is at least that of
every earlier attempt, and each later opening is higher.
"""

from __future__ import annotations

from dataclasses import replace

from batonmq_server.nameserver.core.topics import Topic


def with_epochs(before: Topic, after: Topic) -> Topic:
    """Return `after`, which replaces `before`, with the epochs that follow from the change.

    The epoch is 0 until a queue stops taking messages. A queue that is added before is new: no
    attempt for it is on its way. An earlier version may have closed queues without epochs.
    """
    had, has = _taking_counts(before), _taking_counts(after)
    stopped = any(has.get(broker, 0) < count for broker, count in had.items())
    began = {broker for broker, count in has.items() if count > had.get(broker, 0)}
    has_stopped = before.epoch or before.shrinking or before.permission == "READ"
    opened = began if has_stopped else set()
    if not stopped and not opened:
        return replace(after, epoch=before.epoch)
    epoch = before.epoch + 1
    spread = tuple(
        replace(part, opened_epoch=epoch) if part.broker in opened else part
        for part in after.spread
    )
    return replace(after, epoch=epoch, spread=spread)


def _taking_counts(topic: Topic) -> dict[str, int]:
    """Return how many queues of each broker take messages."""
    if topic.permission == "READ":
        return {}
    return {part.broker: part.writable_count for part in topic.spread}
