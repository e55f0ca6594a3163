"""The call WhyStuck."""

from __future__ import annotations

from dataclasses import dataclass

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq_server.nameserver.diagnosis_proto import diagnosis_to_pb
from batonmq_server.nameserver.group_calls import GroupCalls
from batonmq_server.nameserver.inspector import InspectionTarget, QueueInspector
from batonmq_server.nameserver.topic_calls import TopicCalls


@dataclass(frozen=True, slots=True)
class DiagnosisCalls:
    """Diagnoses the queues that a request names."""

    groups: GroupCalls
    topics: TopicCalls
    inspector: QueueInspector

    async def why_stuck(self, request: pb.WhyStuckRequest) -> pb.WhyStuckResponse:
        """See the proto."""
        group = await self.groups.group(request.group)
        if request.topic:
            topic = await self.topics.topic(request.topic)
            queues = tuple(self.inspector.queues_of_topic(topic.name))
        else:
            queues = await self.inspector.queues_to_inspect(group)
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
