"""What it means when TLS fails, and what to do: from the words of gRPC and of OpenSSL."""

from __future__ import annotations

from typing import NamedTuple


class TlsFailure(NamedTuple):
    """Why there is no connection, as a sentence about the server, and what to do about it."""

    reason: str
    remedy: str


_OTHER_NAME = TlsFailure(
    "it shows a certificate for other names than that of its address",
    "Use an address that is in the certificate, or give the name: server_name, or --server-name.",
)
_KNOWN = (
    (
        "has expired",
        TlsFailure(
            "it shows a certificate that has expired",
            "Renew the certificate of the services; they take the new files by themselves.",
        ),
    ),
    ("Hostname", _OTHER_NAME),
    ("IP address mismatch", _OTHER_NAME),
    (
        "CERTIFICATE_VERIFY_FAILED",
        TlsFailure(
            "it shows a certificate of no authority that is trusted here",
            "Give the authority of the cluster's certificates: ca_file, or --ca-file.",
        ),
    ),
    (
        "WRONG_VERSION_NUMBER",
        TlsFailure(
            "it does not speak TLS",
            "Leave TLS out: no files, or --no-tls where a context gives them.",
        ),
    ),
)
_ENDED = TlsFailure(
    "it ended the connection before the first call",
    "If it speaks TLS give ca_file, and cert_file and key_file of a certificate that it trusts and "
    "that has not expired; its log says what it missed.",
)
"""gRPC's servers do not tell what they miss."""


def explain_tls_failure(text: str) -> TlsFailure | None:
    """What `text` means; None if it does not tell of TLS."""
    for words, found in _KNOWN:
        if words in text:
            return found
    return _ENDED if "failed to connect" in text and "Socket closed" in text else None
