"""Creates, measures, empties and deletes the topics and groups behind queues of Kombu."""

from __future__ import annotations

from contextlib import suppress

from batonmq._core.reset_targets import ToLatest
from batonmq._core.retries import retry_topic
from batonmq._kombu.link_options import LinkOptions
from batonmq._kombu.queue_names import QueueNames
from batonmq.admin.admin import Admin
from batonmq.admin.operation import Operation
from batonmq.admin.resets import Resets, ResetScope
from batonmq.errors import GroupNotFound, TopicExists, TopicNotFound, Unreachable


class QueueAdministrator:
    """Administers queues. All failures are those of `Admin`."""

    def __init__(self, admin: Admin, options: LinkOptions) -> None:
        self._admin, self._options = admin, options

    async def declare(self, names: QueueNames) -> None:
        """Create the topic of a queue unless it exists, with any number of queues.

        Raises:
            TopicNotFound: It does not exist, and topics are not created.
        """
        if not self._options.create_topics:
            if not await self.exists(names):
                raise TopicNotFound(
                    f"topic {names.topic} does not exist, and create_topics is off",
                    remedy=f"Create it: baton topic create {names.topic}",
                )
            return
        with suppress(TopicExists):  # with another number of queues, which an operator chose
            await self._admin.create_topic(names.topic, self._options.queue_count)

    async def exists(self, names: QueueNames) -> bool:
        """Return whether the topic of a queue exists."""
        try:
            await self._admin.describe_topic(names.topic)
        except TopicNotFound:
            return False
        return True

    async def size(self, names: QueueNames) -> int:
        """Return how many messages of a queue are not acknowledged.

        Raises:
            Unreachable: A service that knows it does not answer.
        """
        try:
            progress = await self._admin.group_progress(names.group)
        except GroupNotFound:
            return await self._stored(names.topic)
        rows = [row for row in progress.queues if row.topic in _topics(names)]
        if not any(row.topic == names.topic for row in rows):
            return await self._stored(names.topic)
        if progress.problems:
            raise Unreachable(f"the size of queue {names.queue} is unknown: {progress.problems[0]}")
        return sum(
            (row.log_end_offset or 0) if row.committed_offset is None else (row.lag or 0)
            for row in rows
        )

    async def purge(self, names: QueueNames) -> int:
        """Skip all messages of a queue; return how many were not acknowledged.

        Messages that wait for their time are not skipped.
        """
        count = await self.size(names)
        try:
            await self._admin.describe_group(names.group)
        except GroupNotFound:
            await self._admin.update_group(names.group)
        resets = Resets(self._admin)
        operation = Operation("kombu", f"queue {names.queue} was purged")
        for topic in _topics(names):
            try:
                plan = await resets.plan(names.group, ToLatest(), ResetScope(topic=topic))
            except TopicNotFound:
                if topic == names.topic:
                    raise
                continue  # no worker has joined the group yet
            result = await resets.reset(plan, Operation(operation.by, operation.reason))
            if result.problems:
                raise Unreachable(
                    f"queue {names.queue} was purged in part: {result.problems[0]}",
                    remedy="Purge it again.",
                )
        return count

    async def delete(self, names: QueueNames) -> None:
        """Delete the group of a queue, with what waits in its retry topic, and its topic.

        Raises:
            GroupInUse: A worker consumes the queue. Nothing has changed.
        """
        with suppress(GroupNotFound):
            await self._admin.delete_group(names.group)
        with suppress(TopicNotFound):
            await self._admin.delete_topic(names.topic)

    async def _stored(self, topic: str) -> int:
        detail = await self._admin.describe_topic(topic)
        if detail.problems:
            raise Unreachable(f"the size of topic {topic} is unknown: {detail.problems[0]}")
        return sum(queue.count or 0 for queue in detail.queues)


def _topics(names: QueueNames) -> tuple[str, str]:
    return names.topic, retry_topic(names.group)
