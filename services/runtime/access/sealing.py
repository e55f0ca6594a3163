"""Secrets that have to be read again, encrypted for their way through etcd.

A sealed secret is bound to its context, such as the name that it belongs to: sealed bytes that are
moved to another place can't be opened.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from batonmq._common.secret import Secret
from batonmq._process.config import ConfigError, ConfigProblem

KEY_BYTES = 32
_NONCE_BYTES = 12
_ID_CHARACTERS = 16


class NotOpened(Exception):
    """A sealed secret can't be opened: its key is missing, or its bytes or its context differ."""


class Sealed(NamedTuple):
    """A sealed secret, and the id of the key that sealed it."""

    sealed: bytes
    key_id: str


class SealingKeys:
    """The keys of a file. The first one seals; each of them opens what it has sealed.

    Args:
        keys: At least one, each of 32 bytes.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = {sha256(key).hexdigest()[:_ID_CHARACTERS]: AESGCM(key) for key in keys}
        self._first = next(iter(self._keys))

    def seal(self, secret: Secret, context: str) -> Sealed:
        """Return the secret sealed by the first key."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = self._keys[self._first].encrypt(nonce, secret.reveal().encode(), context.encode())
        return Sealed(nonce + sealed, self._first)

    def open(self, sealed: bytes, context: str) -> Secret:
        """Return the secret.

        Raises:
            NotOpened: No key of the file has sealed these bytes for this context.
        """
        for key in self._keys.values():
            try:
                text = key.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], context.encode())
                return Secret(text.decode())
            except (InvalidTag, ValueError):
                continue
        raise NotOpened


def sealing_keys(path: str) -> SealingKeys | None:
    """Return the keys in the file of the setting `sealing_key_file`; None if it is empty.

    Raises:
        ConfigError: The file can't be used.
    """
    if not path:
        return None
    try:
        return read_sealing_keys(path)
    except (OSError, ValueError) as error:
        problem = ConfigProblem("sealing_key_file", f"sealing_key_file: {error}")
        raise ConfigError(problem) from error


def read_sealing_keys(path: str) -> SealingKeys:
    """Return the keys of a file: one line for each, 32 bytes in base64.

    Raises:
        OSError, ValueError: The file can't be read, or a line is not a key.
    """
    lines = [line.strip() for line in Path(path).read_text("ascii").splitlines() if line.strip()]
    try:
        keys = [base64.b64decode(line, validate=True) for line in lines]
    except binascii.Error as error:
        raise ValueError(f"{path}: a line is not base64") from error
    if not keys or any(len(key) != KEY_BYTES for key in keys):
        raise ValueError(f"{path}: every line must be {KEY_BYTES} bytes in base64")
    return SealingKeys(keys)


def new_sealing_key() -> str:
    """Return a random key, as a line of the file."""
    return base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()
