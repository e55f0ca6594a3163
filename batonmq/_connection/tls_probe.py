"""Tries a TLS handshake, to tell why there is no connection: gRPC does not tell all it hears."""

from __future__ import annotations

import socket
import ssl

from batonmq._common.tls_failure import TlsFailure, explain_tls_failure
from batonmq._connection.security import Security

TIMEOUT_S = 1.0
_SPEAKS_TLS = TlsFailure(
    "it speaks TLS",
    "Give the authority of its certificate: ca_file, or --ca-file; or use the context of the "
    "cluster: baton context list.",
)
_WANTS_ONE = TlsFailure(
    "it wants a client certificate",
    "Give one: cert_file and key_file, or --cert-file and --key-file.",
)
_EXPIRED = TlsFailure(
    "it refuses the client certificate, which has expired",
    "Renew the certificate; clients that run take the new files by themselves.",
)
_UNTRUSTED = TlsFailure(
    "it does not trust the authority of the client certificate",
    "Show a certificate of an authority that the services trust: their tls_ca_file.",
)


def find_tls_failure(address: str, security: Security | None) -> TlsFailure | None:
    """Why there is no connection to `host:port`; None if TLS is not the reason. Blocks."""
    host, _, port = address.rpartition(":")
    place = (host.strip("[]"), int(port) if port.isdecimal() else 0)
    try:
        if security is None:
            return _SPEAKS_TLS if _speaks_tls(place) else None
        return None if _is_welcome(place, security) else _unwelcome(security)
    except ssl.SSLError as error:
        return explain_tls_failure(str(error))
    except OSError:
        return None


def _speaks_tls(place: tuple[str, int]) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with socket.create_connection(place, TIMEOUT_S) as plain:
        try:
            with context.wrap_socket(plain):
                return True
        except ssl.SSLError:
            return False


def _is_welcome(place: tuple[str, int], security: Security) -> bool:
    """False if the server hangs up once it has seen what the client shows.

    Raises:
        SSLError: the server can't prove itself.
        OSError: nobody answers.
    """
    context = ssl.create_default_context(cafile=security.ca_file or None)
    if security.cert_file:
        context.load_cert_chain(security.cert_file, security.key_file)
    context.set_alpn_protocols(["h2"])
    name = security.server_name or place[0]
    with (
        socket.create_connection(place, TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=name) as secured,
    ):
        return bool(secured.recv(1))


def _unwelcome(security: Security) -> TlsFailure:
    """What may be wrong with what a client shows, by what it trusts itself."""
    if not security.cert_file:
        return _WANTS_ONE
    judge = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    judge.verify_mode = ssl.CERT_REQUIRED
    judge.load_verify_locations(security.ca_file or ssl.get_default_verify_paths().cafile)
    judge.load_cert_chain(security.cert_file, security.key_file)
    judged = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    judged.check_hostname, judged.verify_mode = False, ssl.CERT_NONE
    judged.load_cert_chain(security.cert_file, security.key_file)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = judged.wrap_bio(back, there)
    server = judge.wrap_bio(there, back, server_side=True)
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
