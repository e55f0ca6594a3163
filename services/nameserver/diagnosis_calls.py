"""The call WhyStuck."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq_server.nameserver.diagnosis_proto import diagnosis_to_pb
from batonmq_server.nameserver.group_calls import GroupCalls
from batonmq_server.nameserver.inspector import InspectionTarget, QueueInspector
from batonmq_server.nameserver.topic_calls import TopicCalls
from batonmq_server.runtime.access.permissions import Permission, use_topic


@dataclass(frozen=True, slots=True)
class DiagnosisCalls:
    """Diagnoses the queues that a request names."""

    groups: GroupCalls
    topics: TopicCalls
    inspector: QueueInspector

    async def why_stuck(
        self, request: pb.WhyStuckRequest, require: Callable[[Permission], None]
    ) -> pb.WhyStuckResponse:
        """See the proto.

        Args:
            require: Raises PermissionDenied if the caller does not have a permission. That for the
                group includes the state of the topics that it subscribes to, and of no others.
        """
        group = await self.groups.group(request.group)
        subscribed = {one.topic for one in group.terms.subscriptions}
        if request.topic not in ("", *subscribed):
            require(use_topic(request.topic))
        if request.topic:
            topic = await self.topics.topic(request.topic)
            queues = tuple(self.inspector.queues_of_topic(topic.name))
        else:
            queues = await self.inspector.queues_to_inspect(group)
            for name in sorted({queue.topic for queue in queues} - subscribed):
                require(use_topic(name))
        selected = tuple(
            queue
            for queue in queues
            if request.broker in ("", queue.broker)
            and (not request.HasField("queue_id") or request.queue_id == queue.queue_id)
        )
        diagnoses = await self.inspector.inspect([InspectionTarget(group, selected)], patient=True)
        return pb.WhyStuckResponse(
            queues=[diagnosis_to_pb(d.evidence, d.finding) for d in diagnoses]
        )
