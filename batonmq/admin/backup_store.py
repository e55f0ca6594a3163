"""Where a backup is kept: a folder, or an object store through fsspec.

Files are written once and never changed. A file appears whole or not at all.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from batonmq.errors import InvalidArgument, Unreachable

Value = TypeVar("Value")


class BackupStore(Protocol):
    """Files by name; names have slashes. The calls block."""

    def write(self, name: str, content: bytes) -> None:
        """Write a file; replace it if it exists."""

    def create(self, name: str, content: bytes) -> None:
        """Write a file; raise FileExistsError if it exists."""

    def read(self, name: str) -> bytes:
        """Return the content of a file; raise FileNotFoundError if it does not exist."""

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in a folder, not of those below it; empty if none."""


class FolderStore:
    """A folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, name: str, content: bytes) -> None:
        """See BackupStore. The content is on the disk before the file gets its name."""
        self._write(name, content, Path.rename)

    def create(self, name: str, content: bytes) -> None:
        """See BackupStore, and `write`."""
        self._write(name, content, _name_new)

    def _write(self, name: str, content: bytes, place: Callable[[Path, Path], object]) -> None:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            place(unfinished, path)
            _sync_folder(path.parent)
        finally:
            unfinished.unlink(missing_ok=True)

    def read(self, name: str) -> bytes:
        """See BackupStore."""
        return (self._folder / name).read_bytes()

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Return bytes [begin, end) of a file; raise FileNotFoundError if it does not exist."""
        with (self._folder / name).open("rb") as file:
            file.seek(begin)
            return file.read(end - begin)

    def remove(self, name: str) -> None:
        """Remove a file; does nothing if it does not exist."""
        (self._folder / name).unlink(missing_ok=True)

    def names(self, folder: str) -> list[str]:
        """See BackupStore."""
        path = self._folder / folder
        if not path.is_dir():
            return []
        return sorted(f"{folder}/{one.name}" for one in path.iterdir() if one.is_file())


class ObjectStore:
    """A store of fsspec, such as s3://bucket/folder; its package has to be installed.

    Args:
        url: URL of the folder. Credentials come from the environment, as the package of the store
            documents.

    Raises:
        InvalidArgument: fsspec or the package of the store is not installed, or the URL is wrong.
    """

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs  # noqa: PLC0415  an optional package
        except ImportError as error:
            raise InvalidArgument(
                f"{url} needs the package fsspec, which is not installed",
                remedy="Install it: pip install 'batonmq[backup]', and the package of the store, "
                "such as s3fs or gcsfs; or name a folder.",
            ) from error
        try:
            found: tuple[Any, str] = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise InvalidArgument(f"{url} can't be used: {error}") from error
        self._files, self._root = found[0], found[1].rstrip("/")

    def write(self, name: str, content: bytes) -> None:
        """See BackupStore."""
        self._files.pipe_file(self._new_path(name), content)

    def create(self, name: str, content: bytes) -> None:
        """See BackupStore. A store without conditional writes is asked for the file before."""
        path = self._new_path(name)
        try:
            self._files.pipe_file(path, content, mode="create")
        except FileExistsError:
            raise
        except Exception:  # noqa: BLE001  each package of a store has its own classes
            self._files.invalidate_cache()
            if self._files.exists(path):
                raise FileExistsError(path) from None
            self._files.pipe_file(path, content)

    def _new_path(self, name: str) -> str:
        """Return the path of a file that is to be written."""
        path = f"{self._root}/{name}"
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        return path

    def read(self, name: str) -> bytes:
        """See BackupStore."""
        content: bytes = self._files.cat_file(f"{self._root}/{name}")
        return content

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Return bytes [begin, end) of a file; raise FileNotFoundError if it does not exist."""
        content: bytes = self._files.cat_file(f"{self._root}/{name}", start=begin, end=end)
        return content

    def remove(self, name: str) -> None:
        """Remove a file; does nothing if it does not exist."""
        with suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}")

    def names(self, folder: str) -> list[str]:
        """See BackupStore."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(f"{self._root}/{folder}", detail=True)
        except FileNotFoundError:
            return []
        files = (one["name"] for one in found if one["type"] == "file")
        return sorted(f"{folder}/{name.rpartition('/')[2]}" for name in files)


def open_backup_store(place: str) -> BackupStore:
    """Return the store at a path or a URL.

    Raises:
        InvalidArgument: The URL can't be used.
    """
    return open_object_store(place)


def open_object_store(place: str) -> FolderStore | ObjectStore:
    """Return the store at a path or a URL, which can also read ranges and remove files.

    Raises:
        InvalidArgument: The URL can't be used.
    """
    return ObjectStore(place) if "://" in place else FolderStore(Path(place))


async def in_thread(what: str, call: Callable[[], Value]) -> Value:
    """Return the result of a call of a store, which is made in a thread.

    Args:
        what: The file, for the error.

    Raises:
        FileNotFoundError, FileExistsError: The file does not exist, or must not.
        Unreachable: The store failed.
    """
    try:
        return await asyncio.to_thread(call)
    except (FileNotFoundError, FileExistsError):
        raise
    except Exception as error:  # each package of a store has its own classes
        raise Unreachable(
            f"the store of the backup failed with {what}: {type(error).__name__}: {error}",
            remedy="Check the path or URL, the credentials and the free space; then repeat the "
            "command.",
            facts={"file": what},
        ) from error


def _name_new(unfinished: Path, path: Path) -> None:
    """Give a file its name; raise FileExistsError if another one has it."""
    try:
        path.hardlink_to(unfinished)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if path.exists():
            raise FileExistsError(path) from None
        unfinished.rename(path)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
