"""An object store in memory, which outlives the processes that use it."""

from __future__ import annotations

from collections.abc import Callable


class MemoryObjects:
    """Files by name; a file appears whole or not at all.

    Attributes:
        files: Content by name.
        before: Called with the operation, `write`, `read` or `remove`, and the name, before each
            one; may raise an error.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.before: Callable[[str, str], None] = lambda operation, name: None

    def write(self, name: str, content: bytes) -> None:
        """See ObjectFiles."""
        self.before("write", name)
        self.files[name] = bytes(content)

    def create(self, name: str, content: bytes) -> None:
        """See BackupStore."""
        self.before("write", name)
        if name in self.files:
            raise FileExistsError(name)
        self.files[name] = bytes(content)

    def read(self, name: str) -> bytes:
        """See ObjectFiles."""
        self.before("read", name)
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name]

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """See ObjectFiles."""
        return self.read(name)[begin:end]

    def remove(self, name: str) -> None:
        """See ObjectFiles."""
        self.before("remove", name)
        self.files.pop(name, None)

    def names(self, folder: str) -> list[str]:
        """See ObjectFiles."""
        self.before("read", folder)
        start = f"{folder}/"
        return sorted(
            name for name in self.files if name.startswith(start) and "/" not in name[len(start) :]
        )
