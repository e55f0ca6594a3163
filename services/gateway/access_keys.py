"""The access keys of the cluster, as a gateway knows them: with their secrets."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from baton.nameserver.v1 import stored_access_pb2 as pb
from batonmq._common.secret import Secret
from batonmq_server.runtime.access.permissions import Grant
from batonmq_server.runtime.access.sealing import NotOpened, SealingKeys
from batonmq_server.runtime.access.stored_access import KEYS, grant_from_pb, sealing_context
from batonmq_server.runtime.etcd.session import KeyValue

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AccessKey:
    """A key pair.

    Attributes:
        expire_unix_ms: Wall clock from which on it is invalid; 0 for never.
        scopes: Its calls have only permissions that one of these covers, too; none: all.
        previous: The old secret; None for none.
        previous_expire_unix_ms: Wall clock from which on that one is invalid.
    """

    name: str
    identity: str
    secret: Secret
    expire_unix_ms: int = 0
    scopes: frozenset[Grant] = frozenset()
    previous: Secret | None = None
    previous_expire_unix_ms: int = 0

    def secrets(self, now_unix_ms: int) -> list[Secret]:
        """Return the secrets that are valid now."""
        if self.previous is None or self.previous_expire_unix_ms <= now_unix_ms:
            return [self.secret]
        return [self.secret, self.previous]


class AccessKeys:
    """The access keys that this gateway can check, by name; follows a mirror of `access/`.

    Args:
        sealing: Opens the secrets; None if there is no key for that: then no access key is known.
    """

    def __init__(self, sealing: SealingKeys | None) -> None:
        self._sealing = sealing
        self._keys: dict[str, AccessKey] = {}

    @property
    def usable(self) -> bool:
        """Whether secrets can be opened."""
        return self._sealing is not None

    def find(self, name: str, now_unix_ms: int) -> AccessKey | None:
        """Return the access key of this name; None if it is unknown, was revoked or has expired."""
        key = self._keys.get(name)
        return key if key is None or not 0 < key.expire_unix_ms <= now_unix_ms else None

    def update(self, changed: Iterable[str], values: Mapping[str, KeyValue]) -> bool:
        """Take over changes; return whether an access key is among them.

        Args:
            changed: Changed keys, relative to `access/`.
            values: All values by key.
        """
        names = [key.removeprefix(KEYS) for key in changed if key.startswith(KEYS)]
        for name in names:
            self._keys.pop(name, None)
            stored = values.get(f"{KEYS}{name}")
            if stored is not None and (key := self._read(name, stored.value)) is not None:
                self._keys[name] = key
        return bool(names)

    def _read(self, name: str, value: bytes) -> AccessKey | None:
        if self._sealing is None:
            return None
        try:
            stored = pb.StoredAccessKey.FromString(value)
            context = sealing_context(name, stored.identity)
            previous = None
            if stored.previous_sealed_secret:
                previous = self._sealing.open(stored.previous_sealed_secret, context)
            return AccessKey(
                name,
                stored.identity,
                self._sealing.open(stored.sealed_secret, context),
                stored.expire_unix_ms,
                frozenset(map(grant_from_pb, stored.scopes)),
                previous,
                stored.previous_expire_unix_ms,
            )
        except NotOpened:
            log.error("sealing_key_file does not open the secret of access key name=%s", name)
        except (DecodeError, KeyError):
            log.error("etcd has an unreadable access key name=%s", name)
        return None
