"""The ports of a gateway: the main one, as that of every service, and two for remote clients.

gRPC can't serve two kinds of connections on one port, and the official clients have no
certificates.
"""

from __future__ import annotations

import logging
from enum import Enum

import grpc.aio

from baton.nameserver.v1.stored_node_pb2 import StoredNode
from batonmq_server.gateway.callers import Context
from batonmq_server.gateway.config import GatewaySettings
from batonmq_server.runtime.access.client_certificate import is_plain
from batonmq_server.runtime.app import FurtherPorts
from batonmq_server.runtime.tls import server_credentials

log = logging.getLogger(__name__)


class PortKind(Enum):
    """The kind of a port: with the TLS settings of all services, or one of the further ports."""

    MAIN = "main"
    TLS = "tls"
    PLAIN = "plain"


def port_kind(context: Context) -> PortKind:
    """Return the kind of the port that a client has called, by its connection."""
    properties = context.auth_context()
    if is_plain(properties):
        return PortKind.PLAIN
    return PortKind.MAIN if properties.get("x509_pem_cert") else PortKind.TLS


def address_of(node: StoredNode, kind: PortKind) -> str:
    """Return where clients reach a gateway: at the port of this kind, else at its main one."""
    further = {PortKind.TLS: node.tls_address, PortKind.PLAIN: node.plain_address}
    return further.get(kind) or node.outside_address or node.address


def listen_further(settings: GatewaySettings, server: grpc.aio.Server) -> FurtherPorts:
    """Bind the ports for remote clients, and return them."""
    ports, security = [], settings.security
    tls_address = plain_address = ""
    if settings.tls_port and security is not None:
        credentials = server_credentials(security, require_client_cert=False)
        port = server.add_secure_port(f"{settings.host}:{settings.tls_port}", credentials)
        tls_address = settings.tls_address or f"{_host(settings)}:{port}"
        ports.append(port)
    if settings.plain_port:
        port = server.add_insecure_port(f"{settings.host}:{settings.plain_port}")
        plain_address = settings.plain_address or f"{_host(settings)}:{port}"
        ports.append(port)
        log.warning("traffic on the port without TLS can be read port=%d", port)
    return FurtherPorts(ports=ports, tls_address=tls_address, plain_address=plain_address)


def _host(settings: GatewaySettings) -> str:
    address = settings.outside_address or settings.advertise_address
    return address.rpartition(":")[0] or settings.host
