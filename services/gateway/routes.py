"""What clients are told about where to send and receive: the gateways, as brokers.

To a client each gateway is one broker with one queue per topic. A client sends to any of them, and
receives from all of them: each gateway owns other queues of the group.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from apache.rocketmq.v2 import definition_pb2 as pb
from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.nameserver.v1.stored_node_pb2 import StoredNode
from batonmq._core.queues import QueueRef
from batonmq_server.gateway.ports import PortKind, address_of
from batonmq_server.gateway.statuses import Refused
from batonmq_server.gateway.topic_types import ANY
from batonmq_server.runtime.etcd.mirror import EtcdMirror

ANY_QUEUE = -1


class Routes:
    """The gateways that are registered.

    Args:
        nodes: Mirror of the nodes in etcd.
        node_id: This gateway.
    """

    def __init__(self, nodes: EtcdMirror, node_id: str) -> None:
        self._nodes, self._node_id = nodes, node_id

    def brokers(
        self, access_point: pb.Endpoints, kind: PortKind = PortKind.MAIN
    ) -> list[pb.Broker]:
        """Return a broker for each gateway, by name.

        Args:
            access_point: The address that the client has called. A gateway that is alone is
                named by it, since the client can reach it.
            kind: Kind of the port that it has called; other gateways are named by theirs.
        """
        stored = (StoredNode.FromString(one.value) for one in self._nodes.values.values())
        addresses = {
            node.node_id: address_of(node, kind)
            for node in stored
            if node.service == nameserver_pb.SERVICE_KIND_GATEWAY
        }
        if len(addresses) <= 1 and access_point.addresses:
            name = next(iter(addresses), self._node_id)
            return [pb.Broker(name=name, id=0, endpoints=access_point)]
        return [
            pb.Broker(name=name, id=0, endpoints=endpoints_of(address))
            for name, address in sorted(addresses.items())
        ]

    def queues(
        self,
        topic: pb.Resource,
        access_point: pb.Endpoints,
        queue_id: int = 0,
        kind: PortKind = PortKind.MAIN,
        accepted: Sequence[pb.MessageType.ValueType] = ANY,
    ) -> list[pb.MessageQueue]:
        """Return the queues of a topic, one for each gateway.

        Args:
            accepted: Types of the messages that it takes.

        Raises:
            Refused: No gateway is registered yet, and the client names no address.
        """
        brokers = self.brokers(access_point, kind)
        if not brokers:
            raise Refused(pb.HA_NOT_AVAILABLE, "no gateway is registered yet; try again")
        return [
            pb.MessageQueue(
                topic=topic,
                id=queue_id,
                permission=pb.READ_WRITE,
                broker=broker,
                accept_message_types=accepted,
            )
            for broker in brokers
        ]

    def stored_queues(
        self,
        topic: pb.Resource,
        queues: Sequence[QueueRef],
        access_point: pb.Endpoints,
        kind: PortKind = PortKind.MAIN,
    ) -> list[pb.MessageQueue]:
        """Return the stored queues of a topic, for clients that read by themselves.

        Each is named by its own broker and number. All gateways can read all of them; the brokers
        are spread over the gateways.

        Raises:
            Refused: No gateway is registered yet, and the client names no address.
        """
        gateways = [queue.broker for queue in self.queues(topic, access_point, kind=kind)]
        brokers = sorted({queue.broker for queue in queues})
        by_name = {
            name: pb.Broker(name=name, id=0, endpoints=gateways[at % len(gateways)].endpoints)
            for at, name in enumerate(brokers)
        }
        return [
            pb.MessageQueue(
                topic=topic,
                id=queue.queue_id,
                permission=pb.READ,
                broker=by_name[queue.broker],
            )
            for queue in queues
        ]


def endpoints_of(address: str) -> pb.Endpoints:
    """Return host:port in the form of the contract."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        scheme = pb.DOMAIN_NAME
    else:
        scheme = pb.IPv4 if version == 4 else pb.IPv6
    return pb.Endpoints(scheme=scheme, addresses=[pb.Address(host=host, port=int(port))])
