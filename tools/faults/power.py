"""Disks that lose what was not synced when the power is cut: an ext4 image for each process.

A cut uses the ioctl by which file systems are tested for it (`godown` of xfstests): the file system
stops at once and writes nothing more, neither data nor its journal. The next mount replays the
journal, as after a power failure. So every fsync counts, that of etcd and of LMDB included, and
nothing else does, except what the kernel had written by itself before.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Self

_SHUTDOWN, _NO_LOG_FLUSH = 0x8004587D, 2
"""EXT4_IOC_SHUTDOWN, and its flag "also without writing the journal"."""
_IMAGE_BYTES = 2 << 30
"""Sparse: an image takes the space that its process writes."""
_CANARY = "unsynced"
_UNMOUNTS, _LOOK_S = 200, 0.05


def can_cut_power() -> bool:
    """Return whether this process, in its own mount namespace, may mount images."""
    if not all(map(shutil.which, ("unshare", "mount", "mkfs.ext4"))):
        return False
    with tempfile.TemporaryDirectory() as folder:
        trial = f"truncate -s 8M {folder}/i && mkfs.ext4 -q {folder}/i && mkdir {folder}/m"
        trial += f" && mount -o loop {folder}/i {folder}/m"
        command = ["unshare", "--mount", "sh", "-c", trial]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0


class PowerDisks:
    """A mounted image for each folder, inside `with`.

    Args:
        images: Folder of the images; created.
        folders: Folders of the processes, by name; created, and must be empty.
    """

    def __init__(self, images: Path, folders: dict[str, Path]) -> None:
        self._images, self._folders = images, folders
        images.mkdir(parents=True)
        for name, folder in folders.items():
            with self._image(name).open("wb") as file:
                file.truncate(_IMAGE_BYTES)
            _run("mkfs.ext4", "-q", str(self._image(name)))
            folder.mkdir(parents=True)
            self._mount(name)
            (folder / "lost+found").rmdir()
            folder.chmod(0o700)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._folders:
            self._unmount(name)

    def cut(self, names: Collection[str]) -> None:
        """Cut the power of the named disks; their processes must be stopped or paused."""
        for name in names:
            (self._folders[name] / _CANARY).write_bytes(bytes(4_096))
        for name in names:
            descriptor = os.open(self._folders[name], os.O_RDONLY)
            try:
                fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
            finally:
                os.close(descriptor)

    def restore(self, names: Collection[str]) -> list[str]:
        """Mount the named disks again; return those on which an unsynced file survived.

        Their processes must have ended.
        """
        for name in names:
            self._unmount(name)
            self._mount(name)
        return [name for name in names if (self._folders[name] / _CANARY).exists()]

    def _image(self, name: str) -> Path:
        return self._images / f"{name}.ext4"

    def _mount(self, name: str) -> None:
        _run("mount", "-o", "loop", str(self._image(name)), str(self._folders[name]))

    def _unmount(self, name: str) -> None:
        for _ in range(_UNMOUNTS):  # the end of a process closes its files a moment later
            with suppress(OSError):
                _run("umount", str(self._folders[name]))
                return
            threading.Event().wait(_LOOK_S)
        _run("umount", str(self._folders[name]))


def _run(*command: str) -> None:
    done = subprocess.run(command, text=True, check=False, capture_output=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
