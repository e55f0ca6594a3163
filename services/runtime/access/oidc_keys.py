"""The keys of an OIDC issuer: a JWK set from a file or an https URL, read in the background.

A key verifies signatures of one algorithm only, the one of its type. So the algorithm that a token
names can't choose how a key is used.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from http.client import HTTPException
from pathlib import Path
from time import monotonic  # noqa: TID251  a thread has no event loop, of which a Clock takes the time
from typing import Any, NamedTuple, Protocol

import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from batonmq._common import timeouts
from batonmq._common.clock import Clock
from batonmq.errors import NotServing, Unauthenticated
from batonmq_server.runtime.log_limiter import LogLimiter
from batonmq_server.runtime.metrics import OidcMetrics

log = logging.getLogger(__name__)

DOCUMENT_BYTES_MAX = 1024 * 1024
FILE_INTERVAL_MS = 1_000
"""Time between two reads of a file."""
URL_PAUSE_MS = 10_000
"""Shortest time between two reads of a URL, whatever tokens name."""
_URL_TIMEOUT_S = 5.0
_ANSWER_S_MAX = 10.0
_LINE_INTERVAL_MS = 60_000
_RSA_BITS_MIN = 2_048
_SHOWN_CHARACTERS_MAX = 64
_TYPES = {("RSA", None): "RS256", ("EC", "P-256"): "ES256", ("OKP", "Ed25519"): "EdDSA"}
_MEMBERS = ("kty", "crv", "n", "e", "x", "y")
"""Members of a public key; a private key among them would stay unused."""


class IssuerKey(NamedTuple):
    """A key that verifies signatures.

    Attributes:
        key_id: Id that tokens name; None if it has none.
        algorithm: Its only algorithm.
        fingerprint: Digest of the key itself.
    """

    key_id: str | None
    algorithm: str
    material: jwt.PyJWK
    fingerprint: str


def token_refused(what: str, identity: str = "") -> Unauthenticated:
    """Return the error for a token of the issuer, of which `what` says what is wrong.

    Args:
        identity: Its identity, if its signature is good.
    """
    return Unauthenticated(
        f"the JSON Web Token {what}",
        remedy="Get a new token from the issuer of the cluster.",
        facts={"identity": identity} if identity else {},
    )


def parse_keys(document: bytes) -> tuple[IssuerKey, ...]:
    """Return the usable keys of a JWK set; others, such as secret ones, are left out.

    Raises:
        ValueError: it is no JWK set, or has no usable key.
    """
    try:
        key_set = json.loads(document)
    except RecursionError as error:
        raise ValueError("its values are nested too deep") from error
    entries = key_set.get("keys") if isinstance(key_set, dict) else None
    if not isinstance(entries, list):
        raise ValueError("it is no JWK set: it has no list of keys")
    keys = tuple(key for entry in entries if (key := _key(entry)) is not None)
    if not keys:
        raise ValueError(
            f"none of its {len(entries)} keys can be used: RSA of {_RSA_BITS_MIN} bits and more, "
            "P-256 and Ed25519 can"
        )
    return keys


def _key(entry: Any) -> IssuerKey | None:
    if not isinstance(entry, dict) or entry.get("use", "sig") != "sig":
        return None
    curve = entry.get("crv") if entry.get("kty") != "RSA" else None
    algorithm = next(
        (name for kind, name in _TYPES.items() if kind == (entry.get("kty"), curve)), ""
    )
    key_id = entry.get("kid")
    if entry.get("alg", algorithm) != algorithm or not isinstance(key_id, str | None):
        return None
    public = {name: entry[name] for name in _MEMBERS if name in entry}
    try:
        material = jwt.PyJWK(public, algorithm)
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        return None
    if isinstance(material.key, RSAPublicKey) and material.key.key_size < _RSA_BITS_MIN:
        return None
    digest = sha256(json.dumps(public, sort_keys=True).encode()).hexdigest()
    return IssuerKey(key_id, algorithm, material, digest)


class KeySource(Protocol):
    """Where the keys are read from.

    Attributes:
        interval_ms: Time between two reads.
        pause_ms: Shortest time between two reads.
    """

    interval_ms: int
    pause_ms: int

    def read(self) -> bytes:
        """Return the JWK set; blocks.

        Raises:
            OSError, ValueError: it can't be read.
        """
        ...


@dataclass(slots=True)
class KeyFile:
    """A JWK set in a file, which may be replaced."""

    path: str
    interval_ms: int = FILE_INTERVAL_MS
    pause_ms: int = FILE_INTERVAL_MS

    def read(self) -> bytes:
        """See KeySource."""
        with Path(self.path).open("rb") as file:
            return _bounded(file.read)


class KeyUrl:
    """A JWK set at an https URL. Redirects are not followed: they could lead to any server.

    Args:
        ca_file: PEM file with the trusted authorities; empty: those of the system.
    """

    def __init__(self, url: str, ca_file: str, interval_ms: int) -> None:
        self._url, self._ca_file = url, ca_file
        self.interval_ms, self.pause_ms = interval_ms, min(interval_ms, URL_PAUSE_MS)

    def read(self) -> bytes:
        """See KeySource."""
        context = ssl.create_default_context(cafile=self._ca_file or None)
        opener = urllib.request.build_opener(
            urllib.request.HTTPSHandler(context=context), _NoRedirects()
        )
        request = urllib.request.Request(self._url, headers={"Accept": "application/json"})
        end_s = monotonic() + _ANSWER_S_MAX

        def read(size: int) -> bytes:
            if monotonic() > end_s:
                raise TimeoutError(f"the answer took more than {_ANSWER_S_MAX} s")
            part: bytes = answer.read1(size)
            return part

        try:
            with opener.open(request, timeout=_URL_TIMEOUT_S) as answer:
                return _bounded(read)
        except HTTPException as error:
            raise ValueError(f"the answer is not HTTP: {error!r}") from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow no redirect: urllib then raises HTTPError."""


def _bounded(read: Callable[[int], bytes]) -> bytes:
    """Return all that `read` returns.

    Raises:
        ValueError: it is too long.
    """
    parts: list[bytes] = []
    left = DOCUMENT_BYTES_MAX
    while part := read(left + 1):
        left -= len(part)
        if left < 0:
            raise ValueError(f"it has more than {DOCUMENT_BYTES_MAX} bytes")
        parts.append(part)
    return b"".join(parts)


class IssuerKeys:
    """The current keys of an issuer.

    Args:
        stale_ms_max: For so long after the last successful read the keys are used.

    Attributes:
        on_change: Called when the keys have changed.
    """

    def __init__(
        self, source: KeySource, clock: Clock, metrics: OidcMetrics, *, stale_ms_max: int
    ) -> None:
        self._source, self._clock, self._metrics = source, clock, metrics
        self._stale_ms_max = stale_ms_max
        self.on_change: list[Callable[[], None]] = []
        self._document = b""
        self._keys: tuple[IssuerKey, ...] = ()
        self._fingerprints: frozenset[str] = frozenset()
        self._read_ms: int | None = None
        self._tried_ms = 0
        self._failed = True
        self._wanted = asyncio.Event()
        self._lines = LogLimiter(clock.monotonic_ms, _LINE_INTERVAL_MS)

    def check_current(self, fingerprint: str) -> None:
        """Return if the key with this fingerprint may be used now.

        Raises:
            NotServing: the keys were not read, or not for too long.
            Unauthenticated: the issuer no longer has this key.
        """
        self._check_read()
        if fingerprint not in self._fingerprints:
            raise token_refused("is signed with a key that its issuer no longer has")

    def find(self, key_id: str | None, algorithm: str) -> IssuerKey:
        """Return the key for a token that names this key id and algorithm.

        Raises:
            NotServing: the keys were not read, or are being read again because of this key id.
            Unauthenticated: the issuer has no such key, or none for this algorithm.
        """
        self._check_read()
        named = [key for key in self._keys if key_id in (None, key.key_id)]
        usable = [key for key in named if key.algorithm == algorithm]
        if len(usable) == 1:
            return usable[0]
        shown = (key_id or "")[:_SHOWN_CHARACTERS_MAX]
        if usable:
            raise token_refused(
                f"has {'the key id ' + repr(shown) if key_id else 'no key id'}, and its issuer has "
                f"{len(usable)} such keys for {algorithm}"
            )
        if named and key_id is not None:
            raise token_refused(
                f"is signed with {algorithm}, but the key {shown!r} is for {named[0].algorithm}"
            )
        if self._failed or self._clock.monotonic_ms() - self._tried_ms >= self._source.pause_ms:
            self._wanted.set()
            raise NotServing(
                f"the key {shown!r} of the token is unknown; the keys of its issuer are read again",
                retry_after_ms=1_000,
            )
        raise token_refused(f"is signed with the key {shown!r}, which its issuer does not have")

    async def run(self) -> None:
        """Read the keys again and again until cancelled."""
        while True:
            await self._read()
            await asyncio.sleep(self._source.pause_ms / 1000)
            if not self._failed:
                rest_s = (self._source.interval_ms - self._source.pause_ms) / 1000
                try:
                    async with timeouts.timeout(rest_s):
                        await self._wanted.wait()
                except TimeoutError:
                    pass

    async def _read(self) -> None:
        self._wanted.clear()
        try:
            document = await asyncio.to_thread(self._source.read)
            if document != self._document:
                self._use(parse_keys(document))
                self._document = document
        except (OSError, ValueError) as error:
            self._failed = True
            self._metrics.failures.inc()
            if count := self._lines.count(""):
                log.error("keys of the OIDC issuer not read count=%d error=%s", count, error)
        else:
            self._failed = False
            self._read_ms = self._clock.monotonic_ms()
            self._metrics.read.set(self._clock.unix_ms() / 1000)
        self._tried_ms = self._clock.monotonic_ms()

    def _use(self, keys: tuple[IssuerKey, ...]) -> None:
        self._keys = keys
        self._fingerprints = frozenset(key.fingerprint for key in keys)
        key_ids = ",".join(str(key.key_id) for key in keys)
        log.info("keys of the OIDC issuer read key_ids=%.1000s", key_ids)
        for callback in self.on_change:
            callback()

    def _check_read(self) -> None:
        if self._read_ms is None:
            raise NotServing("the keys of the OIDC issuer were not read yet", retry_after_ms=500)
        age_ms = self._clock.monotonic_ms() - self._read_ms
        if age_ms > self._stale_ms_max:
            raise NotServing(
                f"the keys of the OIDC issuer could not be read for {age_ms // 1000} s; the limit "
                f"is {self._stale_ms_max // 1000} s",
                remedy="Make the JWK set reachable for the services.",
                retry_after_ms=5_000,
            )
