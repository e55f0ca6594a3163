"""Explanation of TLS failures from the error texts of gRPC and OpenSSL."""

from __future__ import annotations

from typing import NamedTuple


class TlsFailure(NamedTuple):
    """Why a connection failed.

    Attributes:
        reason: A sentence about the server, to follow its address.
        remedy: A sentence that says what to do.
    """

    reason: str
    remedy: str


_WRONG_NAME = TlsFailure(
    "its certificate is not valid for its address",
    "Use an address that the certificate contains, or set the name: server_name, or --server-name.",
)
_KNOWN = (
    (
        "has expired",
        TlsFailure(
            "its certificate has expired",
            "Renew the certificate of the services; they load new files without a restart.",
        ),
    ),
    ("Hostname", _WRONG_NAME),
    ("IP address mismatch", _WRONG_NAME),
    (
        "CERTIFICATE_VERIFY_FAILED",
        TlsFailure(
            "its certificate is not signed by a trusted authority",
            "Give the authority of the cluster's certificates: ca_file, or --ca-file.",
        ),
    ),
    (
        "WRONG_VERSION_NUMBER",
        TlsFailure(
            "it does not use TLS",
            "Connect without TLS: give no files, or --no-tls if a context gives them.",
        ),
    ),
)
_CLOSED = TlsFailure(
    "it closed the connection before the first call",
    "If it uses TLS, give ca_file, and cert_file and key_file of a certificate that it trusts and "
    "that has not expired; its log has the reason.",
)
"""gRPC servers do not tell the client why they reject a handshake."""


def explain_tls_failure(text: str) -> TlsFailure | None:
    """Return the TLS failure that an error text describes; None if it describes none."""
    for words, failure in _KNOWN:
        if words in text:
            return failure
    return _CLOSED if "failed to connect" in text and "Socket closed" in text else None
