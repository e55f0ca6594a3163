"""A TLS handshake that finds out why a connection fails: gRPC does not report every reason."""

from __future__ import annotations

import socket
import ssl

from batonmq._common.tls_failure import TlsFailure, explain_tls_failure
from batonmq._connection.security import Security

TIMEOUT_S = 1.0
_USES_TLS = TlsFailure(
    "it uses TLS",
    "Give the authority of its certificate: ca_file, or --ca-file; or use the context of the "
    "cluster: baton context list.",
)
_NO_CLIENT_CERTIFICATE = TlsFailure(
    "it requires a client certificate",
    "Give one: cert_file and key_file, or --cert-file and --key-file.",
)
_EXPIRED = TlsFailure(
    "it rejects the client certificate, which has expired",
    "Renew the certificate; running clients load new files without a restart.",
)
_UNTRUSTED = TlsFailure(
    "it does not trust the authority of the client certificate",
    "Use a certificate of an authority that the services trust: their tls_ca_file.",
)


def find_tls_failure(address: str, security: Security | None) -> TlsFailure | None:
    """Return why there is no connection to `host:port`; None if TLS is not the reason. Blocks."""
    server = _socket_address(address)
    try:
        if security is None:
            return _USES_TLS if _uses_tls(server) else None
        return None if _accepts(server, security) else _explain_rejection(security)
    except ssl.SSLError as error:
        return explain_tls_failure(str(error))
    except OSError:
        return None


def accepts_connections(address: str) -> bool:
    """Return whether a process listens at `host:port`. Blocks."""
    try:
        socket.create_connection(_socket_address(address), TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _socket_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port) if port.isdecimal() else 0


def _uses_tls(server: tuple[str, int]) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with socket.create_connection(server, TIMEOUT_S) as plain:
        try:
            with context.wrap_socket(plain):
                return True
        except ssl.SSLError:
            return False


def _accepts(server: tuple[str, int], security: Security) -> bool:
    """Return whether the server keeps the connection after the client's handshake.

    Raises:
        SSLError: The certificate of the server is not valid.
        OSError: No server responds.
    """
    context = ssl.create_default_context(cafile=security.ca_file or None)
    if security.cert_file:
        context.load_cert_chain(security.cert_file, security.key_file)
    context.set_alpn_protocols(["h2"])
    name = security.server_name or server[0]
    with (
        socket.create_connection(server, TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=name) as secured,
    ):
        return bool(secured.recv(1))


def _explain_rejection(security: Security) -> TlsFailure:
    """Return why the server may reject the client: by a handshake of the client with itself.

    It takes the authorities that the client trusts for those that the server trusts.
    """
    if not security.cert_file:
        return _NO_CLIENT_CERTIFICATE
    verifier = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    verifier.verify_mode = ssl.CERT_REQUIRED
    verifier.load_verify_locations(security.ca_file or ssl.get_default_verify_paths().cafile)
    verifier.load_cert_chain(security.cert_file, security.key_file)
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname, client_context.verify_mode = False, ssl.CERT_NONE
    client_context.load_cert_chain(security.cert_file, security.key_file)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = verifier.wrap_bio(to_server, to_client, server_side=True)
    try:
        for _ in range(3):
            for side in (client, server):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
    except ssl.SSLError as error:
        return _EXPIRED if "expired" in str(error) else _UNTRUSTED
    return _UNTRUSTED
