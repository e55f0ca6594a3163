"""Which member of a group gets which queues.

Every member computes it for itself from the same members and the same queues, so all must use
the same strategy. Nothing is remembered: a change of the members may move many queues.

Source: RocketMQ AllocateMessageQueueAveragely and AllocateMessageQueueAveragelyByCircle.
Deviation: the queues of all topics of the group are allotted together, so that the members' shares
differ by one queue at most however many topics there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from batonmq.core.route import QueueId


class Strategy(Enum):
    """How queues are dealt out."""

    AVERAGE = "average"
    """Consecutive queues to one member: 8 queues, 3 members: 0-2, 3-5, 6-7."""
    CIRCLE = "circle"
    """In turn, like cards: 8 queues, 3 members: 0 3 6, 1 4 7, 2 5."""


def allocate(
    strategy: Strategy, members: Sequence[str], queues: Sequence[QueueId], me: str
) -> tuple[QueueId, ...]:
    """My queues, ascending; none if I am not a member.

    Args:
        members: Client ids, in any order.
        queues: All queues of the group's topics, in any order.
        me: My client id.
    """
    ranked, dealt = sorted(set(members)), sorted(set(queues))
    if me not in ranked:
        return ()
    index, count = ranked.index(me), len(ranked)
    if strategy is Strategy.CIRCLE:
        return tuple(dealt[index::count])
    each, odd = divmod(len(dealt), count)
    first = index * each + min(index, odd)
    return tuple(dealt[first : first + each + (index < odd)])
