"""Blocked identities and certificates. Pure: without calls, etcd or clock.

A subject is text: `identity:NAME`, `certificate:` and the SHA-256 of a certificate, or `serial:`
and its serial number.
"""

from __future__ import annotations

import re

from batonmq.errors import InvalidArgument, Unauthenticated
from batonmq_server.runtime.access.client_certificate import ClientCertificate
from batonmq_server.runtime.access.permissions import SERVICE_PREFIX, check_identity

IDENTITY, CERTIFICATE, SERIAL = "identity", "certificate", "serial"
_DIGITS = {CERTIFICATE: re.compile(r"[0-9a-f]{64}"), SERIAL: re.compile(r"[0-9a-f]{1,40}")}


class BlockList:
    """The subjects that are blocked."""

    def __init__(self) -> None:
        self._subjects: set[str] = set()

    def set_blocked(self, subject: str, *, blocked: bool) -> None:
        """Block a subject that `check_subject` has returned, or end its block."""
        if blocked:
            self._subjects.add(subject)
        else:
            self._subjects.discard(subject)

    def check(self, identity: str, certificate: ClientCertificate | None) -> None:
        """Return if neither the identity nor the certificate of a caller is blocked.

        Raises:
            Unauthenticated: one of them is blocked.
        """
        if not self._subjects:
            return
        subjects = [f"{IDENTITY}:{identity}"]
        if certificate is not None:
            subjects.append(f"{CERTIFICATE}:{certificate.sha256}")
            subjects.append(f"{SERIAL}:{certificate.serial}")
        for subject in subjects:
            if subject in self._subjects:
                raise Unauthenticated(
                    f"{subject} is blocked",
                    remedy=f"An administrator may end it: baton access unblock {subject}",
                    facts={"identity": identity},
                )


def check_subject(subject: str) -> str:
    """Return the subject of a block in its stored form.

    Raises:
        InvalidArgument: it is malformed, or the identity of a service.
    """
    kind, _, value = subject.partition(":")
    if kind == IDENTITY:
        if value.startswith(SERVICE_PREFIX):
            raise InvalidArgument(
                f"{value} is a service: without it the cluster does not work",
                remedy="Block its certificate.",
                facts={"field": "subject"},
            )
        return f"{kind}:{check_identity(value)}"
    value = value.replace(":", "").lower()
    if kind == SERIAL and value:
        value = value.removeprefix("0x").lstrip("0") or "0"
    digits = _DIGITS.get(kind)
    if digits is None or digits.fullmatch(value) is None:
        raise InvalidArgument(
            f"{subject[:200]!r} is nothing that can be blocked",
            remedy="Use identity:NAME, or certificate:SHA256 or serial:NUMBER of a client "
            "certificate, in hex.",
            facts={"field": "subject"},
        )
    return f"{kind}:{value}"


def check_fingerprint(value: str) -> str:
    """Return the SHA-256 of a certificate in hex, without colons.

    Raises:
        InvalidArgument: it is malformed.
    """
    digits = value.replace(":", "").lower()
    if _DIGITS[CERTIFICATE].fullmatch(digits) is None:
        raise InvalidArgument(
            f"{value[:100]!r} is not the SHA-256 of a certificate",
            remedy="Use 64 digits in hex: openssl x509 -noout -fingerprint -sha256 -in FILE",
            facts={"field": "certificate_sha256"},
        )
    return digits
