"""Client certificates, as gRPC shows them of a connection."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Mapping
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple

from cryptography import x509

_TRANSPORT = "transport_security_type"


class ClientCertificate(NamedTuple):
    """What identifies a certificate. Numbers are in hex, lower case.

    Attributes:
        sha256: SHA-256 of its DER form: 64 digits.
        serial: Serial number without leading zeros, unique for its authority.
    """

    sha256: str
    serial: str


def is_plain(properties: Mapping[str, Iterable[bytes]]) -> bool:
    """Return whether a connection has no TLS.

    Args:
        properties: The `auth_context` of a call.
    """
    return b"insecure" in properties.get(_TRANSPORT, ())


@lru_cache(maxsize=4096)
def certificate_of(pem: bytes) -> ClientCertificate:
    """Return the certificate in a PEM text.

    Raises:
        ValueError: it can't be read.
    """
    der = ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))
    serial = x509.load_der_x509_certificate(der).serial_number
    return ClientCertificate(sha256(der).hexdigest(), f"{serial:x}")
