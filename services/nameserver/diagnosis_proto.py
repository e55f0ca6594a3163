"""Protobuf messages of diagnoses, and of refused clients as evidence."""

from __future__ import annotations

from collections.abc import Iterable

from baton.common.v1 import error_pb2, queue_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq_server.nameserver.core.diagnosis import Finding
from batonmq_server.nameserver.core.evidence import (
    ExcludedClient,
    QueueEvidence,
    SubscriptionMismatch,
)


def diagnosis_to_pb(e: QueueEvidence, finding: Finding) -> pb.Diagnosis:
    """Return a diagnosis as the message of the contract."""
    return pb.Diagnosis(
        queue=queue_pb2.GroupQueue(
            group=e.group.name,
            queue=queue_pb2.QueueRef(topic=e.topic, broker=e.broker, queue_id=e.queue_id),
        ),
        reason=pb.StuckReason.Value(f"STUCK_REASON_{finding.reason}"),
        message=finding.message,
        remedy=finding.remedy,
        evidence={name: str(value) for name, value in finding.values.items()},
        lag_count=e.lag_count,
        lag_ms=e.lag_ms,
        committed_offset=e.committed_offset,
        next_offset=e.log.next_offset if e.log else -1,
        owner=e.lock.owner if e.lock else "",
        unmoved_ms=e.unmoved_ms,
    )


def excluded_from_pb(clients: Iterable[pb.RefusedClient]) -> list[ExcludedClient]:
    """Return the clients that are refused for their subscription."""
    return [
        ExcludedClient(
            client.incarnation.client_id,
            client.error.differences[0].member_client_id,
            tuple(
                SubscriptionMismatch(d.topic or d.setting, d.newcomer_value, d.member_value)
                for d in client.error.differences
            ),
        )
        for client in clients
        if client.error.reason == error_pb2.REASON_SUBSCRIPTION_CONFLICT
        and client.error.differences
    ]
