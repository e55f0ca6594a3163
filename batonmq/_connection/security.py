"""Credentials of a client or a service: certificates, keys and tokens, in files that may change."""

from __future__ import annotations

import json
import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from batonmq._common.secret import Secret
from batonmq.errors import InvalidArgument

log = logging.getLogger(__name__)

_TEXTS = ("ca_file", "cert_file", "key_file", "server_name", "token_file")
_TRIES = 5
_TOKEN_BYTES_MAX = 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """TLS settings of a client, or of a service that calls another one. All files are PEM.

    The files may be replaced at any time: later calls use the new ones.

    Attributes:
        ca_file: Certificates of the trusted authorities; those that gRPC contains if empty.
        cert_file: The client's certificate, followed by its intermediate certificates; empty for
            none.
        key_file: Key of the certificate, without a passphrase.
        server_name: Name in the servers' certificates, if it is not that of their addresses.
        token: Bearer token, sent with every call as `authorization: Bearer ...`; None for none.
        token_file: File that contains the token, in place of `token`.

    Raises:
        InvalidArgument: Only one of certificate and key is given, or both `token` and `token_file`.
    """

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    server_name: str = ""
    token: Secret | None = None
    token_file: str = ""

    def __post_init__(self) -> None:
        """Check that the settings fit together."""
        if bool(self.cert_file) != bool(self.key_file):
            missing = "key_file" if self.cert_file else "cert_file"
            raise InvalidArgument(
                f"{missing} is missing: a certificate and its key are given together",
                remedy=f"Give {missing} too.",
                facts={"field": missing},
            )
        if self.token is not None and self.token_file:
            raise InvalidArgument(
                "both token and token_file are given",
                remedy="Give one of token and token_file.",
                facts={"field": "token_file"},
            )

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of all files that are given."""
        named = (self.ca_file, self.cert_file, self.key_file, self.token_file)
        return tuple(path for path in named if path)


def to_json(security: Security) -> str:
    """Return `security` as JSON for another process; the token is not hidden in it."""
    token = security.token.reveal() if security.token else None
    return json.dumps({"token": token} | {name: getattr(security, name) for name in _TEXTS})


def from_json(text: str) -> Security:
    """Inverse of `to_json`."""
    values = json.loads(text)
    token = values.pop("token")
    return Security(**values, token=None if token is None else Secret(token))


@dataclass(frozen=True, slots=True)
class Pems:
    """Contents of the certificate files; None for a file that is not given."""

    ca: bytes | None
    key: bytes | None = field(repr=False)
    cert: bytes | None


class CredentialFiles:
    """The last usable contents of the files of a `Security`.

    Attributes:
        pems: The certificates: the same object until they change.
        token: The bearer token; empty for none.

    Raises:
        InvalidArgument: A file can't be read or used; the message names it.
    """

    def __init__(self, security: Security) -> None:
        self._security = security
        self._stamps = _stamps(security)
        self._logged_error = ""
        self.pems, self._token = _read(security)

    @property
    def token(self) -> str:
        """The current bearer token. It is a property so that dumps of attributes do not show it."""
        return self._token

    def renew(self) -> bool:
        """Read the files again if they have changed; return whether the certificates changed.

        Unusable files, such as a new certificate with the old key, change nothing; the next call
        reads them again.
        """
        try:
            stamps = _stamps(self._security)
            if stamps == self._stamps:
                return False
            pems, self._token = _read(self._security)
        except InvalidArgument as error:
            if error.message != self._logged_error:
                log.warning("new certificates are not usable yet error=%s", error.message)
                self._logged_error = error.message
            return False
        self._stamps, self._logged_error = stamps, ""
        if pems == self.pems:
            return False
        self.pems = pems
        log.info("certificates renewed cert_file=%s", self._security.cert_file)
        return True


def _stamps(security: Security) -> tuple[tuple[int, int, int], ...]:
    """Return values that differ when a file changes; follows links, which Kubernetes swaps."""
    stamps = []
    for path in security.files:
        try:
            stat = Path(path).stat()
        except OSError as error:
            raise _unusable(path, error) from error
        stamps.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(stamps)


def _read(security: Security) -> tuple[Pems, str]:
    for _ in range(_TRIES):
        before = _stamps(security)
        material = _read_once(security)
        if before == _stamps(security):
            return material
    raise InvalidArgument(
        f"{', '.join(security.files)}: the files changed during each of {_TRIES} reads",
        remedy="Replace the files once, each by a rename.",
    )


def _read_once(security: Security) -> tuple[Pems, str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if security.ca_file:
        try:
            context.load_verify_locations(security.ca_file)
        except (OSError, ValueError) as error:
            raise _unusable(security.ca_file, error) from error
    if security.cert_file:
        try:
            context.load_cert_chain(security.cert_file, security.key_file, _no_passphrase)
        except (OSError, ValueError) as error:
            raise _unusable(f"{security.cert_file}, {security.key_file}", error) from error
    paths = (security.ca_file, security.key_file, security.cert_file)
    token = security.token.reveal() if security.token else ""
    try:
        pems = Pems(*(Path(path).read_bytes() if path else None for path in paths))
        if security.token_file:
            token = Path(security.token_file).read_text().strip()
    except (OSError, ValueError) as error:
        raise _unusable(security.token_file or str(paths), error) from error
    _check_token(token, security)
    return pems, token


def _check_token(token: str, security: Security) -> None:
    """Reject a token that is no valid header: it would fail every call and appear in the error."""
    wanted = security.token is not None or bool(security.token_file)
    sendable = token.isascii() and token.isprintable() and " " not in token
    if wanted and not (sendable and 0 < len(token) <= _TOKEN_BYTES_MAX):
        source = security.token_file or "the token"
        raise InvalidArgument(
            f"{source}: a token has 1 to {_TOKEN_BYTES_MAX} visible ASCII characters",
            facts={"field": "token_file" if security.token_file else "token"},
        )


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase")


def _unusable(path: str, error: Exception) -> InvalidArgument:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return InvalidArgument(
        f"{path}: {reason}",
        remedy="Give files that this process may read: a certificate and its own key as PEM, or a "
        "file with nothing but the token.",
        facts={"file": path},
    )
