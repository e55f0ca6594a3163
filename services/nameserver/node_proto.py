"""Protobuf messages of nodes."""

from __future__ import annotations

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1.stored_node_pb2 import StoredNode


def node_from_bytes(value: bytes) -> pb.Node:
    """Return the node of a value in etcd as the message of the contract."""
    node = StoredNode.FromString(value)
    return pb.Node(
        service=node.service,
        node_id=node.node_id,
        address=node.address,
        metrics_address=node.metrics_address,
        start_unix_ms=node.start_unix_ms,
        epoch=node.epoch,
        leader=node.leader,
        room=node.room,
        replica_epoch=node.replica_epoch,
        replica_version=node.replica_version,
        replica_set=node.replica_set,
        outside_address=node.outside_address,
        contract=node.contract,
        contract_min=node.contract_min,
    )
