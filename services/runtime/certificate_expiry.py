"""Expiry time of certificates, read from their X.509 structure. Pure.

Certificate     SEQUENCE { TBSCertificate, ... }
TBSCertificate  SEQUENCE { [0] version (may be left out), serial, signature, issuer, validity, ... }
validity        SEQUENCE { notBefore, notAfter }; UTCTime or GeneralizedTime, RFC 5280, 4.1.2.5
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from datetime import UTC, datetime

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17
_BEFORE_VALIDITY = 3  # serial, signature, issuer
_LONG = 0x80


def expiry_unix_s(pem: bytes) -> float | None:
    """Return the earliest expiry time of the certificates in a PEM file; None if unreadable."""
    try:
        ends = [_expiry(base64.b64decode(found[1])) for found in _PEM.finditer(pem)]
        return min(ends, default=None)
    except (ValueError, IndexError, StopIteration):
        return None


def _expiry(der: bytes) -> float:
    _, certificate = next(_values(der))
    _, signed = next(_values(certificate))
    fields = [field for field in _values(signed) if field[0] != _VERSION]
    _, validity = fields[_BEFORE_VALIDITY]
    _, (kind, text) = list(_values(validity))
    digits = text.decode("ascii")
    if kind == _UTC_TIME:  # two digits of the year, for 1950 to 2049
        digits = ("19" if digits >= "50" else "20") + digits
    return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _values(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and content of each value in a sequence."""
    at = 0
    while at < len(der):
        tag, length = der[at], der[at + 1]
        at += 2
        if length & _LONG:
            digits = length ^ _LONG
            length = int.from_bytes(der[at : at + digits])
            at += digits
        yield tag, der[at : at + length]
        at += length
