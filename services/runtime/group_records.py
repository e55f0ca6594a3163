"""Live copies of the records of all groups."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.group_record import (
    GROUPS_PREFIX,
    GroupRecord,
    read_record,
    split_key,
)


class GroupRecords:
    """The records of all groups, each as of one revision.

    Attributes:
        mirror: Copy of the keys, to be run as one task.
        on_change: Called with the names of the groups with a changed record.
    """

    def __init__(self, etcd: EtcdSession) -> None:
        self.mirror = EtcdMirror(etcd, GROUPS_PREFIX)
        self.on_change: list[Callable[[frozenset[str]], None]] = []
        self._parts: dict[str, dict[str, bytes]] = {}
        self.mirror.on_change.append(self._keys_changed)

    def get(self, name: str) -> GroupRecord | None:
        """Return the record of a group; None if it does not exist.

        Raises:
            Internal: it is not readable.
        """
        parts = self._parts.get(name)
        return read_record(name, parts) if parts is not None else None

    def revision(self, name: str) -> int:
        """Return the revision of the last write of the record; 0 if there is none."""
        head = self.mirror.values.get(name)
        return head.mod_revision if head is not None else 0

    async def watch(self) -> AsyncGenerator[frozenset[str], None]:
        """Yield the names of groups with a changed record; first, of all groups."""
        async for keys in self.mirror.watch():
            yield _names(keys)

    def _keys_changed(self, keys: frozenset[str]) -> None:
        for key in keys:
            name, part = split_key(key)
            stored = self.mirror.values.get(key)
            parts = self._parts.setdefault(name, {})
            if stored is not None:
                parts[part] = stored.value
            else:
                parts.pop(part, None)
            if not parts:
                del self._parts[name]
        names = _names(keys)
        for callback in self.on_change:
            callback(names)


def _names(keys: frozenset[str]) -> frozenset[str]:
    return frozenset(split_key(key)[0] for key in keys)
