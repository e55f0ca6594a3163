"""Signatures of calls by an access key, as the clients of RocketMQ 5 send them. Pure.

A client sends `authorization: MQv2-HMAC-SHA1 Credential=KEY, SignedHeaders=x-mq-date-time,
Signature=HEX`, where HEX is the HMAC-SHA1 of the header `x-mq-date-time` under its secret. Clients
differ in the case of the digits and in the form of the date: that of Rust is of RFC 3339.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from batonmq._common.secret import Secret

ALGORITHM = "MQv2-HMAC-SHA1"
DATE_HEADER = "x-mq-date-time"
_TEXT_CHARACTERS_MAX = 2_048
_DATE = re.compile(r"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)Z", re.ASCII)
_RFC_3339 = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d{1,9})?(Z|[+-]\d\d:\d\d)", re.ASCII)
_QUARTER_MS = 15 * 60_000
_ZONE_MS_MAX = 14 * 3_600_000


class BadSignature(Exception):
    """A signature is malformed, outside its window, or not made with the secret; and why."""


@dataclass(frozen=True, slots=True)
class CallSignature:
    """The signature of one call.

    Attributes:
        access_key: Empty if the client has none; such a call counts as one without signature.
        date: The header that is signed.
        digits: The signature in hex, lower case.
    """

    access_key: str
    date: str
    digits: str


def is_signature(authorization: str) -> bool:
    """Whether a header is a signature, rather than a bearer token."""
    return authorization.startswith(ALGORITHM)


def parse_signature(authorization: str, date: str) -> CallSignature:
    """Return the signature in the two headers of a call.

    Raises:
        BadSignature: They have another form.
    """
    if len(authorization) > _TEXT_CHARACTERS_MAX or len(date) > _TEXT_CHARACTERS_MAX:
        raise BadSignature(f"the headers are longer than {_TEXT_CHARACTERS_MAX} characters")
    fields = dict(
        (name.strip(), value.strip())
        for name, _, value in (
            part.partition("=") for part in authorization.removeprefix(ALGORITHM).split(",")
        )
    )
    if "Credential" not in fields or "Signature" not in fields:
        raise BadSignature(
            f"the authorization header must be {ALGORITHM} Credential=ACCESS_KEY, "
            f"SignedHeaders={DATE_HEADER}, Signature=HEX"
        )
    signed = fields.get("SignedHeaders", DATE_HEADER).lower()
    if signed != DATE_HEADER:
        raise BadSignature(f"SignedHeaders must be {DATE_HEADER}, got {signed[:100]!r}")
    access_key = fields["Credential"].partition("/")[0]
    return CallSignature(access_key, date, fields["Signature"].lower())


def check_date(date: str, now_unix_ms: int, *, window_ms: int, local_times: bool) -> None:
    """Return if the date of a signature is near the present time.

    Args:
        window_ms: Largest difference.
        local_times: Whether the date may be that of any time zone.

    Raises:
        BadSignature: It is not.
    """
    try:
        sent = _parse_date(date)
    except ValueError:
        raise BadSignature(
            f"the header {DATE_HEADER} is {date[:40]!r}; it must be a time like 20260102T030405Z "
            "or 2026-01-02T03:04:05Z"
        ) from None
    ahead_ms = int(sent.timestamp() * 1_000) - now_unix_ms
    off_ms = ahead_ms
    if local_times and abs(ahead_ms) <= _ZONE_MS_MAX + window_ms:
        off_ms = (ahead_ms + _QUARTER_MS // 2) % _QUARTER_MS - _QUARTER_MS // 2
    if abs(off_ms) > window_ms:
        way = "ahead of" if ahead_ms > 0 else "behind"
        raise BadSignature(
            f"the header {DATE_HEADER} is {abs(ahead_ms) // 1_000} s {way} the clock of the "
            f"gateway; the limit is {window_ms // 1_000} s. Set the client's clock; clients "
            "of Python and Go send their local time, so run them with TZ=UTC"
        )


def _parse_date(date: str) -> datetime:
    """Return the time of a date in either form, without fractions of a second."""
    if match := _DATE.fullmatch(date):
        return datetime(*map(int, match.groups()), tzinfo=UTC)  # type: ignore[arg-type, misc]
    if match := _RFC_3339.fullmatch(date):
        return datetime.fromisoformat("".join(match.groups()))
    raise ValueError(date)


def check_signature(signature: CallSignature, secrets: Iterable[Secret]) -> None:
    """Return if the signature was made with one of the secrets.

    Raises:
        BadSignature: It was not.
    """
    date, digits = signature.date.encode(), signature.digits.encode()
    for secret in secrets:
        wanted = hmac.new(secret.reveal().encode(), date, "sha1").hexdigest().encode()
        if hmac.compare_digest(wanted, digits):
            return
    raise BadSignature("the signature was not made with the secret of this access key")


def sign(access_key: str, secret: Secret, date: str) -> str:
    """Return the authorization header of a call."""
    digits = hmac.new(secret.reveal().encode(), date.encode(), "sha1").hexdigest()
    return f"{ALGORITHM} Credential={access_key}, SignedHeaders={DATE_HEADER}, Signature={digits}"
