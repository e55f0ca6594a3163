"""Tokens of an OIDC issuer: JSON Web Tokens that it has signed, and the identities they give.

A verified token is remembered by its digest, so that the calls of a program cost one verification
for each token; times and keys are checked for each call.
"""

from __future__ import annotations

import math
from base64 import urlsafe_b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jwt

from batonmq._common.clock import Clock
from batonmq.errors import BatonError, InvalidArgument
from batonmq_server.runtime.access.oidc_keys import IssuerKey, IssuerKeys, token_refused
from batonmq_server.runtime.access.permissions import check_identity
from batonmq_server.runtime.access.stored_access import digest_of

TOKEN_CHARACTERS_MAX = 16 * 1024
REMEMBERED_MAX = 10_000
_SHOWN_CHARACTERS_MAX = 200
_UNIX_S_MAX = 1e11
_OPTIONS: Any = {
    "require": ["exp"],
    **dict.fromkeys(("verify_exp", "verify_nbf", "verify_iat"), False),
}
"""Times are checked by the clock of the process, here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OidcTrust:
    """Which tokens are trusted, and the identity that they give.

    Attributes:
        audiences: The claim `aud` must name one of these.
        identity_claim: Claim with the name of the identity.
        identity_prefix: Precedes that name, so that it differs from all identities of certificates.
        leeway_ms: Difference between the clocks of issuer and process that is tolerated.
    """

    issuer: str
    audiences: tuple[str, ...]
    algorithms: frozenset[str]
    identity_claim: str
    identity_prefix: str
    leeway_ms: int


class VerifiedToken(NamedTuple):
    """What a token of the issuer says.

    Attributes:
        key: Fingerprint of the key that has verified it.
        begin_unix_ms: Wall clock from which on it is valid.
        expire_unix_ms: Wall clock from which on it is invalid, with the leeway.
        certificate_sha256: Certificate that it is bound to; empty for none.
    """

    identity: str
    key: str
    begin_unix_ms: int
    expire_unix_ms: int
    certificate_sha256: str = ""


class OidcTokens:
    """Verifies the tokens of one issuer."""

    def __init__(self, trust: OidcTrust, keys: IssuerKeys, clock: Clock) -> None:
        self.trust, self.keys, self._clock = trust, keys, clock
        self._verified: dict[str, VerifiedToken] = {}

    @staticmethod
    def accepts(token: str) -> bool:
        """Return whether a bearer token looks like a JSON Web Token; other tokens have no dots."""
        return token.count(".") == 2

    def verify(self, token: str) -> VerifiedToken:
        """Return what a token says.

        Raises:
            Unauthenticated: it is not valid; the error says why.
            NotServing: the keys of the issuer are not known.
        """
        digest = digest_of(token)
        verified = self._verified.get(digest)
        if verified is None:
            verified = self._verify(token)
            if len(self._verified) >= REMEMBERED_MAX:
                del self._verified[next(iter(self._verified))]
            self._verified[digest] = verified
        try:
            self.check_current(verified)
        except BatonError:
            self._verified.pop(digest, None)
            raise
        return verified

    def check_current(self, token: VerifiedToken) -> None:
        """Return if a token that was verified is valid now.

        Raises:
            Unauthenticated: it has expired, or its issuer no longer has its key.
            NotServing: the keys of the issuer are not known.
        """
        now_ms = self._clock.unix_ms()
        if now_ms >= token.expire_unix_ms:
            ago_s = (now_ms - token.expire_unix_ms + self.trust.leeway_ms) // 1000
            raise token_refused(f"of {token.identity} expired {ago_s} s ago", token.identity)
        if now_ms < token.begin_unix_ms:
            raise token_refused(f"of {token.identity} is not valid yet", token.identity)
        self.keys.check_current(token.key)

    def _verify(self, token: str) -> VerifiedToken:
        if len(token) > TOKEN_CHARACTERS_MAX:
            raise token_refused(f"has more than {TOKEN_CHARACTERS_MAX} characters")
        try:
            header = jwt.get_unverified_header(token)
            algorithm, key_id = header.get("alg"), header.get("kid")
            if algorithm not in self.trust.algorithms:
                allowed = ", ".join(sorted(self.trust.algorithms))
                raise token_refused(f"is signed with {_shown(algorithm)}; allowed are {allowed}")
            key = self.keys.find(key_id, algorithm)
            claims = self._claims(token, key)
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError) as error:
            raise token_refused(f"is malformed: {_shown(error)}") from error
        return self._read(claims, key)

    def _claims(self, token: str, key: IssuerKey) -> Mapping[str, Any]:
        trust = self.trust
        try:
            return jwt.decode(
                token,
                key.material,
                algorithms=[key.algorithm],
                audience=trust.audiences,
                issuer=trust.issuer,
                options=_OPTIONS,
            )
        except jwt.InvalidSignatureError as error:
            raise token_refused(
                f"does not match the key {_shown(key.key_id)} of its issuer"
            ) from error
        except jwt.InvalidIssuerError as error:
            raise token_refused(f"is not issued by {trust.issuer}") from error
        except jwt.InvalidAudienceError as error:
            raise token_refused(
                f"is not for the audience {' or '.join(trust.audiences)}"
            ) from error
        except jwt.MissingRequiredClaimError as error:
            raise token_refused(f"has no claim {error.claim}") from error

    def _read(self, claims: Mapping[str, Any], key: IssuerKey) -> VerifiedToken:
        trust = self.trust
        name = claims.get(trust.identity_claim)
        if not isinstance(name, str) or not name:
            raise token_refused(f"has no text in the claim {trust.identity_claim}")
        try:
            identity = check_identity(trust.identity_prefix + name)
        except InvalidArgument as error:
            raise token_refused(f"names an unusable identity: {error.message}") from error
        begin_ms = _unix_ms(claims, "nbf") if "nbf" in claims else 0
        return VerifiedToken(
            identity,
            key.fingerprint,
            begin_ms - trust.leeway_ms,
            _unix_ms(claims, "exp") + trust.leeway_ms,
            _bound_to(claims),
        )


def _unix_ms(claims: Mapping[str, Any], name: str) -> int:
    value = claims[name]
    number = float(value) if type(value) in (int, float) and abs(value) < _UNIX_S_MAX else math.nan
    if math.isnan(number):
        raise token_refused(f"has no time in the claim {name}")
    return int(number * 1000)


def _bound_to(claims: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the certificate that a token is bound to, RFC 8705; empty for none."""
    if "cnf" not in claims:
        return ""
    confirmation = claims["cnf"]
    text = confirmation.get("x5t#S256") if isinstance(confirmation, dict) else None
    try:
        digest = urlsafe_b64decode(f"{text}=") if isinstance(text, str) else b""
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise token_refused("is bound in a way other than to a certificate (cnf with x5t#S256)")
    return digest.hex()


def _shown(value: object) -> str:
    text = str(value)[:_SHOWN_CHARACTERS_MAX]
    return text if text.isprintable() else repr(text)
